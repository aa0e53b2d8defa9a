"""The mask as a description, which transformers' mask factories return in place of a [T, T] tensor.

A family calls `create_causal_mask` and its relatives. These call the mask function that is
registered for the attention implementation, with a closure `mask_function(batch, head, query,
key)`. Ours compares the closure's code with that of transformers' own, and returns a `Mask`. The
model passes it to attention unchanged.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from transformers import masking_utils

from hfpatch.attention.attention import Pattern
from hfpatch.compat import GONE, pytree
from hfpatch.context.documents import Rows, find_rows


class Batch:
    """The caller's description of a batch's tokens. Documents are found on first need, once for
    each chunk size.

    Args:
        B, T, device: of the whole rows.
        attention_mask: [B, T] of 0 and 1, or None.
        position_ids: [1 or B, T], or None.
        cu_seq_lens: [n+1] offsets over the flattened tokens (FlashAttention's keyword), or None.
        idle_BT: tokens whose output the loss does not read, or None.
        watched: whether other code may read it.
        row_ranks: the ranks that share these rows (parallel.exchange.RowRanks), or None.
    """

    def __init__(
        self,
        B: int,
        T: int,
        device,
        attention_mask=None,
        position_ids=None,
        cu_seq_lens=None,
        idle_BT=None,
        watched=False,
        row_ranks=None,
    ):
        self.B = B
        self.T = T
        self.t = T if row_ranks is None else T // row_ranks.size  # tokens of this rank
        self.device = device
        self.given = (attention_mask, position_ids, cu_seq_lens)
        self.idle_BT = idle_BT
        self.watched = watched
        self.row_ranks = row_ranks
        self.only_restarts = False  # whether positions start documents at restarts alone
        self.probabilities = False  # whether attention returns them too
        self.packed_row = None  # the decoder.unpadded.PackedRow on which the layers run
        self.averages = False  # whether tokens that see nobody get a mean in transformers, no zeros
        self._rows: dict = {}
        self._parts: dict = {}

    @cached_property
    def document_bounds(self) -> tuple[int, ...] | None:
        """The document bounds in the flattened tokens by the positions alone, whatever is masked.

        For mixers, which see masked tokens, as in transformers. None where every row is one
        document.
        """
        _, positions, offsets = self.given
        if positions is None and offsets is None:
            return None
        documents = find_rows(self, padding=False).documents
        return None if documents is None else documents.bounds

    def part(self, rows: slice, a: int, b: int) -> "Batch":
        """Tokens a to b of these rows, each as one document; a single row may have several."""
        key = (rows.start, a, b)
        if key not in self._parts:
            visible = self.given[0]
            if visible is not None:
                visible = visible[rows, a:b]
            part = Batch(len(range(self.B)[rows]), b - a, self.device, visible)
            if part.B == 1 and visible is None:
                part._rows[None] = self.rows().part(
                    (rows.start or 0) * self.T + a, b - a, self.device
                )
            self._parts[key] = part
        return self._parts[key]

    def within_documents(self, function):
        """The caller's own closure, as transformers calls it for packed rows if neither a mask nor
        a cache came.

        Each document sees only itself. The closure gets positions inside the document or, in older
        versions, inside the row.
        """
        visible, positions, offsets = self.given
        packed = positions is not None and visible is None and offsets is None
        if not packed or self.only_restarts or self.row_ranks is not None:
            return function
        positions = positions.expand(self.B, -1).to(self.device)
        number_BT = masking_utils.find_packed_sequence_indices(positions)
        if number_BT is None:
            return function
        # transformers before 5.8 asks at positions in the row.
        inside = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
        if inside is not None:
            function = inside(function, positions)
        return masking_utils.and_masks(
            function, masking_utils.packed_sequence_mask_function(number_BT)
        )

    def rows(self, chunk: int | None = None) -> Rows:
        if chunk not in self._rows:
            self._rows[chunk] = find_rows(self, chunk=chunk)
        return self._rows[chunk]


# function of torch that takes a mask -> its replacement for a Mask
ANSWERED: dict = {}


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal attention within `rows` and a window, or a mask that `build` makes.

    The rows are found when the Mask is made, before the layers run. Code that computes with the
    mask (sparse attention, explicit scores) gets transformers' own mask: `tensor`.

    Attributes:
        build: makes the [B, 1, T, T] mask of a closure that has no such description.
        added: the dtype of a mask that is added to scores, as in eager attention. None for a bool
            mask, as in sdpa.
    """

    batch: Batch
    window: int | None = None
    chunk: int | None = None
    build: object = None
    added: torch.dtype | None = None

    def __post_init__(self):
        vars(self)["rows"] = self.batch.rows(self.chunk)

    def over(self, batch: Batch) -> "Mask | object":
        """This mask over a packed row; GONE for a closure, which is of the caller's rows."""
        return replace(self, batch=batch) if self.build is None else GONE

    def pattern(self, softcap: float | None = None) -> Pattern:
        window = self.window
        if window is not None and window >= self.batch.T:
            window = None
        return Pattern(self.rows.documents, window, softcap, self.rows.blind_BT)

    def dense(self) -> Tensor | None:
        """The mask of sdpa: bool [B, 1, T, T], True where seen; None for plain causality."""
        pattern = self.pattern()
        b = self.batch
        if pattern.causal_only and self.build is None:
            return None
        theirs = self.build() if self.build is not None else None
        if theirs is None:
            allowed = pattern.allowed(range(b.T), range(b.T), b.B, b.T, b.device)
            return (
                allowed
                if pattern.blind_BT is None
                else allowed & ~pattern.blind_BT[:, None, :, None]
            )
        # A model of the user's own may have put tokens in front of the stack's.
        if pattern.documents is None or theirs.shape[-1] != b.T:
            return theirs
        # A custom closure may show later keys, of its own document alone.
        of_BT = pattern.documents.numbers(b.B, b.T)
        return theirs & (of_BT[:, :, None] == of_BT[:, None])[:, None]

    @cached_property
    def tensor(self) -> Tensor:
        """[B, 1, T, T], dense also for plain causality."""
        allowed = self.dense()
        b = self.batch
        if allowed is None:
            allowed = torch.ones(1, 1, b.t, b.t, dtype=torch.bool, device=b.device).tril()
        allowed = allowed.expand(b.B, -1, -1, -1)
        if self.added is None:
            return allowed
        least = torch.finfo(self.added).min
        return allowed.new_zeros(allowed.shape, dtype=self.added).masked_fill_(~allowed, least)

    @property
    def dtype(self) -> torch.dtype:
        return self.added or torch.bool

    def __getitem__(self, index) -> "Mask | Tensor":
        cut = (
            isinstance(index, tuple)
            and len(index) == 4
            and all(isinstance(x, slice) for x in index)
        )
        if cut and not any(x.start for x in index) and all(x.stop is None for x in index[:3]):
            return self  # models cut masks to the length of the keys, which is T
        return self.tensor[index]

    def part(self, rows: slice, a: int, b: int) -> "Mask | Tensor":
        """The mask of tokens a to b of these rows, each as one document."""
        if self.build is not None:
            return self.tensor[rows, :, a:b, a:b]
        return replace(self, batch=self.batch.part(rows, a, b))

    def to(self, *args, **kwargs) -> "Mask | Tensor":
        dtypes = {x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)}
        return self if dtypes <= {self.dtype} else self.tensor.to(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        b = self.batch
        if name == "device":
            return b.device
        if name in ("shape", "size", "dim", "ndim"):  # these need no T x T values
            return getattr(torch.empty(b.B, 1, b.t, b.t, device="meta"), name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in ANSWERED:
            return ANSWERED[function](*args, **kwargs)
        args, kwargs = pytree.tree_map(
            lambda x: x.tensor if isinstance(x, Mask) else x, (args, kwargs)
        )
        return function(*args, **kwargs)


def _as_tensor(operator: str):
    def apply(self, *others):
        return getattr(self.tensor, operator)(*others)

    return apply


for _operator in "invert neg and or add radd sub rsub mul rmul eq ne lt le gt ge".split():
    setattr(Mask, f"__{_operator}__", _as_tensor(f"__{_operator}__"))


def _structure(function) -> list:
    """A flat list that identifies a closure: its code, and its cells, recursively. A tensor is
    there by its class.
    """
    if isinstance(function, Tensor):
        return [Tensor]
    if isinstance(function, tuple):
        return [len(function), *chain.from_iterable(map(_structure, function))]
    if hasattr(function, "__code__"):
        held = tuple(cell.cell_contents for cell in function.__closure__ or ())
        return [function.__code__, *_structure(held)]
    return [function]


def describe(function, local: int | None) -> dict | None:
    """The fields of a Mask for a mask closure; None for one that transformers' functions do not make.

    The tensor of a chunk's closure is the left padding, which find_rows counts too.
    """
    made = _structure(function)
    if made == _structure(masking_utils.causal_mask_function):
        return {}
    if local is None:
        return None
    padding = torch.empty(0, device="meta")
    theirs = {
        "window": masking_utils.sliding_window_causal_mask_function(local),
        "chunk": masking_utils.chunked_causal_mask_function(local, padding),
    }
    return next(({kind: local} for kind, f in theirs.items() if _structure(f) == made), None)
