"""Runs padded rows as one packed row, where nothing reads the outputs of padding.

The stack runs on the real tokens of all rows, with each document of each row isolated. Its outputs
are put back at the tokens' places, with zeros at padding. In padded rows, a token of padding costs
as much as a real one in every module that treats tokens one by one.

B rows, T tokens of a row, N tokens of the packed row, S layouts of positions (images have several).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.compat import compiled_by_itself, pytree
from hfpatch.context.current import asks_for_hidden_states
from hfpatch.context.masks import Batch
from hfpatch.decoder.batch import Given
from hfpatch.decoder.find import list_of_layers
from hfpatch.layer.condition import look
from hfpatch.layer.layer import UntiledLayer

# The most padding that stays, as a share of the real tokens. Lengths are rounded up so that few of
# them occur: each new length needs new plans of attention kernels and new pinned memory.
FILLER = 1 / 32
_BY_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask")


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of padded rows, in their order, followed by some padding.

    Attributes:
        batch: the batch of the packed row, for the layers.
        B, T: rows, and tokens of a row, before packing.
        at_N: the index of each token among the B * T tokens.
        real: the number of real tokens.
    """

    batch: Batch
    B: int
    T: int
    at_N: Tensor
    real: int

    def arguments(self, kwargs: dict) -> dict:
        """The stack's arguments, with the packed row in place of [B, T] tokens."""
        row, positions = dict(kwargs), kwargs.get("position_ids")
        for name in ("input_ids", "inputs_embeds"):
            if row.get(name) is not None:
                row[name] = row[name].flatten(0, 1)[self.at_N][None]
        if positions is None:  # the small instance showed that transformers counts from 0 too
            positions = torch.arange(self.T, device=self.at_N.device)[None]
        positions_SBT = positions.expand(*positions.shape[:-2], self.B, self.T)
        row["position_ids"] = positions_SBT.flatten(-2)[..., self.at_N].unsqueeze(-2)
        row["attention_mask"] = None
        return row

    def put_back(self, out):
        """The stack's output with [B, T] tokens, zero at padding."""
        for name, value in out.items():
            out[name] = pytree().tree_map(self._padded, value)
        return out

    def _padded(self, x):
        """[1, N, ...] as [B, T, ...], and [N, ...] (router logits) as [B * T, ...]."""
        N = len(self.at_N)
        if not isinstance(x, Tensor) or N not in x.shape[:2]:
            return x
        rows = x.shape[:2] == (1, N)
        x = x[0] if rows else x
        full = x.new_zeros(self.B * self.T, *x.shape[1:])
        full = full.index_copy(0, self.at_N[: self.real], x[: self.real])
        return full.unflatten(0, (self.B, self.T)) if rows else full


def without_padding(stack, given: Given, batch: Batch, kwargs: dict) -> PackedRow | None:
    """The packed row to run in place of padded rows; None if the batch stays padded.

    The batch stays padded if any of these holds:
        - something reads padding: it has a label, or the caller asks for hidden states
        - padding lies between real tokens, whose distances a packed row would change
        - other arguments have tokens too
        - a layer differs from the one that the small instance tried
        - the small instance's outputs differed
    """
    traits, positions = stack._hfpatch_traits, kwargs.get("position_ids")
    padded = traits.unpads and given.rows_mask is not None and given.idle_BT is not None
    if not padded or given.offsets is not None or batch.sequence or batch.weights:
        return None
    others = pytree().tree_leaves([x for name, x in kwargs.items() if name not in _BY_TOKEN])
    same = (
        (given.tiled or not traits.mixers)  # transformers' mixers do not isolate documents
        and (positions is None or positions.dim() > 1 and positions.shape[-1] == given.T)
        and not any(isinstance(x, Tensor) and x.numel() > 1 for x in others)
        and not asks_for_hidden_states(stack, kwargs)
        and all(map(_as_tried, list_of_layers(stack) or (None,)))
    )
    if not same:
        return None
    # The bounds cost nothing extra: the layers would read them, and wait for the device, anyway.
    bounds = batch.rows().real
    N = 0 if bounds is None else _rounded(bounds[-1])
    return _packed_row(batch, bounds, N) if 0 < N < given.B * given.T else None


def _as_tried(layer) -> bool:
    """Whether a layer behaves as in the small instance, on rows of any length. A layer compiled by
    itself would be compiled for each length. A layer with other modules in it may mix tokens, and a
    mixer under a bias that an adapter adds remembers padding."""
    if not isinstance(layer, UntiledLayer) or compiled_by_itself(layer):
        return False
    now = look(layer)
    return now.reason in (None, layer._hfpatch_traits.reason) and not now.biased


def _rounded(tokens: int) -> int:
    """A multiple of the largest power of two within FILLER of the tokens."""
    step = 1 << max(int(tokens * FILLER), 1).bit_length() - 1
    return -(-tokens // step) * step


def _packed_row(batch: Batch, bounds: tuple[int, ...], N: int) -> PackedRow:
    visible_BT, real = batch.said[0].bool(), bounds[-1]
    # Real tokens first, in their order, then padding up to N.
    at_N = (~visible_BT).flatten().to(torch.uint8).argsort(stable=True)[:N]
    offsets = bounds if N == real else (*bounds, N)
    return PackedRow(Batch(1, N, batch.device, cu_seq_lens=offsets), batch.B, batch.T, at_N, real)
