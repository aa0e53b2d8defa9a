"""The mask as a description: what transformers' mask factories hand on in place of a [T, T] tensor.

A family asks `create_causal_mask` and its relatives for masks; those call the function registered
for the attention implementation with a closure `mask_function(batch, head, query, key)`. Ours asks
the closure which kind it is, once a kind, and returns a `Mask`, which the model hands to attention
untouched.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import CellType, FunctionType

import torch
from torch import Tensor
from transformers import masking_utils

from hfpatch.attention.attention import Pattern
from hfpatch.compat import is_fake, lock, pytree, real_tensors
from hfpatch.context.documents import Rows, find_rows

SAMPLES = 4096  # pairs a closure is asked about beside all neighbours
_kinds: dict = {}  # what closures of one structure turned out to be
_asking = lock()


class Batch:
    """What the caller said of a batch's tokens: who asks first looks it up, for each chunk size
    once.

    attention_mask [B, T], position_ids [1 or B, T], cu_seq_lens [n+1], idle_BT [B, T]: as
    documents.find_rows takes them. sequence: the ranks that share these rows
    (parallel.exchange.Sequence), or None; t: how many tokens this one has.
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
        sequence=None,
    ):
        self.B, self.T, self.device, self.sequence = B, T, device, sequence
        self.t = T if sequence is None else T // sequence.size
        self.said = (attention_mask, position_ids, cu_seq_lens)
        self._idle = idle_BT
        self.cached = False  # whether transformers would make a cache, which nobody reads
        self.weights = False  # whether attention is to give its probabilities too
        self.even = True  # ranks that exchange tokens in each tile have batches of this size
        self._rows: dict = {}
        self._parts: dict = {}

    @cached_property
    def apart(self) -> tuple[int, ...] | None:
        """Where documents start and end in the flattened tokens as the positions say, whatever is
        masked: for mixers, which see masked tokens as transformers has them do. None where every
        row is one.
        """
        visible, positions, offsets = self.said
        if positions is None and offsets is None:
            return None
        documents = find_rows(
            self.B, self.T, self.device, visible, positions, offsets, padding=False
        ).documents
        return None if documents is None else documents.bounds

    def part(self, rows: slice, a: int, b: int) -> "Batch":
        """Of these rows' tokens a to b, one document each; of one row, more where its positions
        jump.
        """
        if (rows.start, a, b) not in self._parts:
            visible, idle = (
                None if x is None else x[rows, a:b] for x in (self.said[0], self._idle)
            )
            B = len(range(self.B)[rows])
            part = self._parts[rows.start, a, b] = Batch(
                B, b - a, self.device, visible, idle_BT=idle
            )
            if B == 1 and visible is None:
                part._rows[None] = self.rows().part(
                    (rows.start or 0) * self.T + a, b - a, self.device
                )
        return self._parts[rows.start, a, b]

    def within_documents(self, function):
        """A closure of the caller's own as transformers asks it of packed rows, where neither a
        mask nor a cache came: each document sees itself alone, and is asked at positions inside it
        or, by older versions, inside its row.
        """
        visible, positions, offsets = self.said
        if (
            positions is None
            or visible is not None
            or offsets is not None
            or self.cached
            or self.sequence is not None
        ):
            return function
        at_BT = positions.expand(self.B, -1).to(self.device)
        of_BT = masking_utils.find_packed_sequence_indices(at_BT)
        if of_BT is None:
            return function
        inside = hasattr(masking_utils, "remap_positions_for_packed_sequence")
        at = (lambda b, i: at_BT[b, i]) if inside else (lambda b, i: i)
        return lambda b, h, q, kv: (
            (of_BT[b, q] == of_BT[b, kv]) & function(b, h, at(b, q), at(b, kv))
        )

    def rows(self, chunk: int | None = None) -> Rows:
        if chunk not in self._rows:
            self._rows[chunk] = find_rows(
                self.B,
                self.T,
                self.device,
                *self.said,
                chunk=chunk,
                idle_BT=self._idle,
                cached=self.cached,
            )
        return self._rows[chunk]


# functions of torch that take a mask -> what answers for them where that is a Mask
ANSWERED: dict = {}


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal attention within `rows`, within a window; build: makes the [B, 1, T, T] mask of what
    has no such description. rows are found before the layers run.

    Code that makes something of it (sparse attention, scores written out) meets transformers' own
    mask: `tensor`. added: the dtype in which that is added to scores, as eager attention has it;
    None where it is bool, as sdpa takes it.
    """

    batch: Batch
    window: int | None = None
    chunk: int | None = None
    build: object = None
    added: torch.dtype | None = None

    def __post_init__(self):
        vars(self)["rows"] = self.batch.rows(self.chunk)

    def pattern(self, softcap: float | None = None) -> Pattern:
        rows = self.rows
        window = self.window if self.window is not None and self.window < self.batch.T else None
        return Pattern(rows.documents, window, rows.hidden_BT, softcap, rows.blind_BT)

    def dense(self) -> Tensor | None:
        """As sdpa takes it: bool [B, 1, T, T], True where seen; None where plain causality says it
        all.
        """
        pattern, b = self.pattern(), self.batch
        if pattern.plain and self.build is None:
            return None
        allowed = pattern.allowed(range(b.T), range(b.T), b.B, b.T, b.device)
        if self.build is None:
            return allowed
        theirs = self.build()
        # A closure of its own may show keys that come later: only documents and hidden keys narrow
        #     it.
        apart = replace(pattern, window=None).allowed(range(b.T), range(b.T), b.B, b.T, b.device)
        causal = torch.ones(b.T, b.T, dtype=torch.bool, device=b.device).tril()
        return (apart | ~causal) & theirs if theirs is not None else apart

    @cached_property
    def tensor(self) -> Tensor:
        """[B, 1, T, T], whole also where causality says it all."""
        allowed, b = self.dense(), self.batch
        if allowed is None:
            allowed = (
                torch.ones(b.t, b.t, dtype=torch.bool, device=b.device)
                .tril()
                .expand(b.B, 1, -1, -1)
            )
        if self.added is None:
            return allowed
        return allowed.new_zeros(allowed.shape, dtype=self.added).masked_fill_(
            ~allowed, torch.finfo(self.added).min
        )

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
            return self  # models cut masks to the keys' length, which is ours already
        return self.tensor[index]

    def part(self, rows: slice, a: int, b: int) -> "Mask | Tensor":
        """Of these rows' tokens a to b, one document each."""
        if self.build is not None:
            return self.tensor[rows, :, a:b, a:b]
        return replace(self, batch=self.batch.part(rows, a, b))

    def to(self, *args, **kwargs) -> "Mask | Tensor":
        other = [
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, torch.dtype) and x is not self.dtype
        ]
        return self.tensor.to(*args, **kwargs) if other else self

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("shape", "size", "dim", "ndim"):  # for which T x T values are not to be made
            b = self.batch
            return getattr(torch.empty(b.B, 1, b.t, b.t, device="meta"), name)
        return self.batch.device if name == "device" else getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in ANSWERED:
            return ANSWERED[function](*args, **kwargs)
        args, kwargs = pytree().tree_map(
            lambda x: x.tensor if isinstance(x, Mask) else x, (args, kwargs)
        )
        return function(*args, **kwargs)


def _as_tensor(operator: str):
    def apply(self, *others):
        return getattr(self.tensor, operator)(*others)

    return apply


_OPERATORS = (
    "invert",
    "neg",
    "and",
    "or",
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
)
for _operator in _OPERATORS:
    setattr(Mask, f"__{_operator}__", _as_tensor(f"__{_operator}__"))


def _structure(function, tensors: list) -> list:
    """The code of a closure, the owner of a method, and what it and those it holds were made with,
    flat. Tensors go to `tensors`; their class stands for them.
    """
    if isinstance(function, Tensor):
        tensors.append(function)
        return [Tensor]
    if isinstance(function, (tuple, list)):
        found, held = [len(function)], function
    elif callable(function) and hasattr(function, "__code__"):
        found, held = [function.__code__, getattr(function, "__self__", None)], []
        for cell in function.__closure__ or ():
            held.append(cell.cell_contents)
        held += function.__defaults__ or ()
        for item in (function.__kwdefaults__ or {}).items():
            held += item
    else:
        return [function]
    for one in held:
        found += _structure(one, tensors)
    return found


def _unpadded(function):
    """The closure with zeros for its tensors, which have no values in a simulation: chunks count
    from the left padding.
    """
    if isinstance(function, (tuple, list)):
        return type(function)(map(_unpadded, function))
    if isinstance(function, Tensor):
        return torch.zeros(function.shape, dtype=function.dtype, device="cpu")
    if not hasattr(function, "__code__"):
        return function
    cells = tuple(CellType(_unpadded(c.cell_contents)) for c in function.__closure__ or ())
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )


def _ask(function, T: int, local: int | None, device):
    """("causal" | "window" | "chunk", size) of a closure, None where it is none of these."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(T, (SAMPLES,), generator=generator)
    near = (q - torch.randint(-2, (local or 2) + 2, (SAMPLES,), generator=generator)).clamp(
        0, T - 1
    )
    far = torch.randint(T, (SAMPLES,), generator=generator)
    q, kv = torch.cat([q, q]), torch.cat([near, far])
    seen = lambda q, kv: torch.as_tensor(function(zero, zero, q.to(device), kv.to(device))).cpu()  # noqa: E731
    found, causal = seen(q, kv), kv <= q
    if torch.equal(found, causal):
        return "causal", None
    if local is None:
        return None
    if torch.equal(found, causal & (kv > q - local)):
        return "window", local
    every = torch.arange(1, T)
    starts = (~seen(every, every - 1)).nonzero().flatten() + 1
    chunk_of = torch.bucketize(torch.arange(T), starts, right=True)
    if bool((starts.diff() == local).all()) and torch.equal(
        found, causal & (chunk_of[q] == chunk_of[kv])
    ):
        return "chunk", local
    return None


def describe(function, T: int, local: int | None, device) -> tuple | None:
    """The kind of a mask closure, from what it answers; closures of a structure seen before are
    known.
    """
    tensors: list[Tensor] = []
    try:
        key = *_structure(function, tensors), local, T
        if key in _kinds:
            return _kinds[key]
    except (TypeError, ValueError):  # what has no hash, an empty cell
        return None
    has_tensor, simulated = bool(tensors), any(map(is_fake, tensors))
    with _asking:
        try:
            with (
                real_tensors() if simulated or not has_tensor else nullcontext(),
                torch.device("cpu"),
            ):
                function, device = (
                    (_unpadded(function), torch.device("cpu")) if simulated else (function, device)
                )
                kind = _ask(function, T, local, device if has_tensor else torch.device("cpu"))
        except (RuntimeError, IndexError, TypeError, ValueError):
            kind = None
        if has_tensor and (kind is None or kind[0] != "chunk"):
            # what a tensor says may change with the batch; a chunk's says the left padding, which
            # we count too
            return None
        _kinds[key] = kind
    return kind
