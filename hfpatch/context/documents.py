"""Which tokens may see each other, decided once a step from the caller's arguments, never as a [T,
T] mask.

One rule serves every family. Without a mask and without a cache, a document starts wherever a
position is not its predecessor plus 1 (transformers' rule). With a 2D mask or a cache, and in
families that make their masks without positions, transformers reads the mask alone. Here a document
then starts where the positions of the visible tokens restart: at a smaller one, or at the row's
least again. Jumps (PoSE), fractions (interpolation) and other repeats start none, so such rows equal
transformers. Packed rows stay isolated, where transformers lets their documents see each other.

Padding needs no mask: before a row's first visible token it is a document of its own, and behind the
last one causality hides it. A mask with holes is left to transformers (decoder/batch.py): masked
tokens between visible ones, or behind them if a loss reads their outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.attention.attention import Documents
from hfpatch.store.device import device_for, on_host


@dataclass(frozen=True)
class Rows:
    """The documents and the padding of a batch.

    Attributes:
        documents: None where every row is one document.
        real: the document starts among the visible tokens alone, and their number: all that layers
            on one packed row need. None without padding, where padding is read, and with holes.
        holes: whether masked tokens lie between visible ones, or a loss reads those behind.
        blind_BT: tokens before a row's first visible one; None if their output is unread.
    """

    documents: Documents | None = None
    real: tuple[int, ...] | None = None
    holes: bool = False
    blind_BT: Tensor | None = None

    def part(self, first: int, tokens: int, device: torch.device) -> "Rows":
        """The Rows of `tokens` tokens of one row, from `first` among the flattened ones."""
        bounds = [] if self.documents is None else self.documents.bounds
        inside = {x - first for x in bounds if first < x < first + tokens}
        return Rows(_from_bounds([0, *sorted(inside), tokens], 1, tokens, device))


def _restarts(positions_BT: Tensor) -> Tensor:
    """Where positions restart: [B, T-1], for tokens 1 to T-1.

    A token that repeats its row's least position starts a document, unless the row repeats other
    positions too (interpolated positions) or holds no other position.
    """
    next_BT = positions_BT[:, 1:]
    step_BT = next_BT - positions_BT[:, :-1]
    least_B1 = positions_BT.amin(1, keepdim=True)
    again_BT = (step_BT == 0) & (next_BT == least_B1)
    others_repeat_B1 = ((step_BT == 0) & ~again_BT).any(1, keepdim=True)
    again_BT = again_BT & ~others_repeat_B1 & (positions_BT != least_B1).any(1, keepdim=True)
    return (step_BT < 0) | again_BT


def _document_starts(
    positions_BT: Tensor, visible_BT: Tensor | None, only_restarts: bool
) -> Tensor:
    """[B, T-1] of bool. only_restarts: whether a restart alone starts one, or any jump too."""
    if not only_restarts:
        return positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    if visible_BT is None:
        return _restarts(positions_BT)
    # Only the visible tokens, in their order: the stable sort puts hidden ones behind them.
    order_BT = (~visible_BT).to(torch.uint8).argsort(dim=1, stable=True)
    ordered_BT = positions_BT.gather(1, order_BT)
    last_B1 = visible_BT.sum(1, keepdim=True) - 1
    top_B1 = ordered_BT.gather(1, last_B1.clamp_min(0))
    index_BT = torch.arange(positions_BT.shape[1], device=positions_BT.device).expand_as(order_BT)
    # Behind the visible tokens positions go on counting, so that none restarts.
    ordered_BT = torch.where(index_BT <= last_B1, ordered_BT, top_B1 + index_BT - last_B1)
    starts_BT = torch.zeros_like(visible_BT).scatter(1, order_BT[:, 1:], _restarts(ordered_BT))
    return starts_BT[:, 1:] & visible_BT[:, 1:]


def shown(mask, B: int, T: int, past: int) -> Tensor | None:
    """[B, T] of bool: which of the T tokens behind `past` ones a 4D mask, or a dict of masks, lets
    see themselves.

    Padding is hidden from itself. None where the mask is of another kind, or too short.
    """
    for one in mask.values() if isinstance(mask, dict) else [mask]:
        if not isinstance(one, Tensor) or one.dim() != 4:
            continue
        if one.shape[2] == T and past + T <= one.shape[3]:
            itself = one[:, 0].diagonal(past, 1, 2).expand(B, T)
            return itself if itself.dtype == torch.bool else itself == 0
    return None


def packs(
    B: int, position_ids: Tensor | None, attention_mask: Tensor | None, cu_seq_lens: Tensor | None
) -> bool:
    """Whether a batch of B rows holds more documents than rows, by its offsets or by its positions
    [1 or B, T].
    """
    if cu_seq_lens is not None:
        return cu_seq_lens.numel() > B + 1
    if position_ids is None:
        return False
    visible_BT = None if attention_mask is None else attention_mask.bool()
    # None, without values, is one document a row.
    return bool(on_host(_document_starts(position_ids.expand(B, -1), visible_BT, True).any()))


def refuse_packed(kind: type, advice: str = "do not pack"):
    """Raises ValueError: documents would see each other in this class of model or layer."""
    raise ValueError(
        f"hfpatch: a {kind.__name__} must get one document a sequence, got position_ids that "
        f"restart: its layers may not keep documents apart. To go on, {advice}."
    )


def find_rows(batch, *, chunk: int | None = None, padding: bool = True) -> Rows:
    """Documents and padding of a masks.Batch, by the rule in this module's docstring.

    Args:
        batch: the caller's arguments.
        chunk: attention ends every so many tokens of a document, left padding not counted (Llama 4).
        padding: False where masked tokens form no documents of their own, and only a restart starts
            one.

    Raises:
        ValueError: the offsets do not cover the tokens.
    """
    B = batch.B
    T = batch.T
    mask, positions, offsets = batch.given
    # [Step 1] Take the caller's offsets. They override positions.
    bounds = _checked(offsets, B * T)
    if bounds is not None:
        positions = None
        if mask is None and chunk is None:
            # Each row begins a document too.
            return Rows(_from_bounds(sorted({*bounds, *range(0, B * T, T)}), B, T, batch.device))
    elif mask is None and positions is None and chunk is None:
        return Rows()
    # [Step 2] Bring everything else that the host must know there, in one copy.
    idle_BT = None if mask is None else batch.idle_BT
    if mask is not None and mask.is_floating_point():
        mask = mask.bool()  # beside floats the copy would round positions
    known = _on_host(mask, positions, idle_BT)
    if known is None:  # every row is one document
        return Rows()
    mask_BT, positions_BT, idle_BT = known
    visible_BT = None if mask is None else mask_BT.bool()
    # [Step 3] Set the starts by the offsets or the positions.
    only_restarts = mask is not None or batch.only_restarts or not padding
    starts_BT = _starts(B, T, bounds, positions_BT, visible_BT, only_restarts)
    # [Step 4] Set the starts behind padding: before the first visible token it is a document of its
    # own.
    holes = False
    padding_is_read = False
    if mask is not None and padding:
        holes, padding_is_read = _padding(starts_BT, visible_BT, idle_BT, batch)
    # [Step 5] Start a document at each chunk too.
    if chunk is not None:
        starts_BT |= _chunks(starts_BT, None if only_restarts else positions_BT, chunk)
    # [Step 6] Find rows that may run without their padding, and those that begin with padding that
    # is read.
    documents = _from_bounds(_bounds(starts_BT.view(-1)), B, T, batch.device)
    real = None
    if mask is not None and padding and not (holes or padding_is_read or visible_BT.all()):
        real = _bounds(starts_BT[visible_BT])
    blind_BT = None
    if padding_is_read and not visible_BT[:, 0].all():
        blind_BT = mask.bool().cumsum(1) == 0
    return Rows(documents, real, holes, blind_BT)


def _starts(
    B: int,
    T: int,
    bounds: list[int] | None,
    positions_BT: Tensor | None,
    visible_BT: Tensor | None,
    only_restarts: bool,
) -> Tensor:
    """[B, T] of bool: where documents start, by the caller's offsets, or else by the positions."""
    starts_BT = torch.zeros(B, T, dtype=torch.bool, device="cpu")
    starts_BT[:, 0] = True
    if bounds is not None:
        starts_BT.view(-1)[[n for n in bounds if n < B * T]] = True
    elif positions_BT is not None:
        positions_BT = positions_BT.expand(B, T)
        starts_BT[:, 1:] |= _document_starts(positions_BT, visible_BT, only_restarts)
    return starts_BT


def _padding(
    starts_BT: Tensor, visible_BT: Tensor, idle_BT: Tensor | None, batch
) -> tuple[bool, bool]:
    """Sets a start at each row's first visible token. Returns whether the mask has holes, and whether
    something may read outputs of padding.

    If a loss reads padding, its values must be transformers', so it counts as a hole; but not where
    these are the zeros of a token that sees nobody.
    """
    front_BT = visible_BT.cumsum(1) == 0
    back_BT = visible_BT.flip(1).cumsum(1).flip(1) == 0
    starts_BT[:, 1:] |= front_BT[:, :-1] & ~front_BT[:, 1:]
    # Where it is unknown what the loss reads, back padding makes no holes, and all padding counts as
    # read.
    loss_BT = torch.zeros_like(visible_BT) if idle_BT is None else ~idle_BT.bool()
    padding_BT = ~visible_BT
    read_BT = padding_BT if idle_BT is None or batch.watched else padding_BT & loss_BT
    exact_BT = front_BT & ~loss_BT if batch.averages else front_BT
    return bool((padding_BT & ~exact_BT & (~back_BT | loss_BT)).any()), bool(read_BT.any())


def _chunks(starts_BT: Tensor, positions_BT: Tensor | None, chunk: int) -> Tensor:
    """Where chunks of documents start: [B, T] of bool. positions_BT: None beside a mask or a cache."""
    if positions_BT is not None and starts_BT[:, 1:].any():
        # If transformers finds documents, it counts chunks by their positions, which may begin at
        # any number.
        return positions_BT % chunk == 0
    at = torch.arange(starts_BT.shape[1], device="cpu")
    return (at - torch.where(starts_BT, at, 0).cummax(1).values) % chunk == 0


def _on_host(*given: Tensor | None) -> list[Tensor | None] | None:
    """These tensors on the host, in one copy; None in a simulation, which has no values."""
    # Without any, a number shows a simulation, and nothing waits for the device.
    xs = [x for x in given if x is not None] or [torch.zeros(1, device="cpu")]
    flat = on_host(torch.cat([x.reshape(-1) for x in xs]))
    if flat is None:
        return None
    parts = iter(flat.split([x.numel() for x in xs]))
    return [None if x is None else next(parts).view_as(x) for x in given]


def _checked(offsets: Tensor | tuple[int, ...] | None, tokens: int) -> list[int] | None:
    """The offsets, on the host; None in a simulation or without any. ValueError if they do not
    cover the tokens."""
    offsets = on_host(offsets) if isinstance(offsets, Tensor) else offsets
    if offsets is None:
        return None
    bounds = [int(bound) for bound in offsets]
    if bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ValueError(
            f"hfpatch: cu_seq_lens must rise from 0 to {tokens} (batch x tokens), got "
            f"{bounds[:3]}...{bounds[-1]}. Count every token of the batch once."
        )
    return bounds


def _bounds(starts_N: Tensor) -> tuple[int, ...]:
    """The document starts, and the number of tokens."""
    return *starts_N.nonzero().flatten().tolist(), len(starts_N)


def _from_bounds(bounds: list[int] | tuple[int, ...], B: int, T: int, device) -> Documents | None:
    """Documents with these bounds; None where every row is one."""
    if list(bounds) == list(range(0, B * T + 1, T)):
        return None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cpu")
    return Documents(tuple(bounds), device_for(device).from_host(cu_seqlens))
