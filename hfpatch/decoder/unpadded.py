"""Runs the layers on the real tokens of padded rows alone, where nothing reads padding's outputs.

Every decoder layer takes and returns [B, T] tokens, so all around the layers sees the caller's
shape. Inside, it runs on one packed row: the real tokens of all rows, each document of each row
isolated. Its outputs go back to the tokens' places. A layer that gets the very output of the one
before takes its packed row; else it packs what it is given. In padded rows, a token of padding costs
as much as a real one in every module that treats tokens one by one.

B rows, T tokens of a row, N tokens of the packed row.
"""

from functools import cache, partial

import torch
from torch import Tensor

from hfpatch.compat import GONE, collected_now, compiled_by_itself, pytree, version
from hfpatch.context.current import having
from hfpatch.context.masks import Batch, Mask
from hfpatch.decoder.batch import Inputs, StackTraits
from hfpatch.layer.arguments import other_argument, token_axis
from hfpatch.layer.layer import PatchedLayer
from hfpatch.layer.traits import LayerTraits

# The most padding that stays, as a share of the real tokens. Lengths are rounded up so that few of
# them occur: each new length needs new plans of attention kernels and new pinned memory.
FILLER = 1 / 32


class PackedRow:
    """The real tokens of padded rows, in their order, followed by some padding.

    Attributes:
        batch: the batch of the packed row, for the layers.
        at_N: the index of each token among the B * T tokens.
        real: the number of real tokens.
        form: the packed form of a tensor among a layer's arguments, made once: layers share most of
            them. Not of a Mask: it refers to the caller's batch, which holds this row. With such a
            cycle the last layer's output would wait for Python's collector.
        last: the last layer's output as [B, T] tokens, the number of writes to it, and its packed
            form. The next layer takes that, unless something changed the output in between.
    """

    def __init__(self, batch: Batch, bounds: tuple[int, ...], N: int):
        padding_N = ~batch.given[0].flatten().bool()
        # Real tokens first, in their order, then padding up to N.
        self.at_N = padding_N.to(torch.uint8).argsort(stable=True)[:N]
        self.real = bounds[-1]
        if N > self.real:
            bounds = (*bounds, N)  # what is filled up is a document of its own
        self.batch = Batch(1, N, batch.device, cu_seq_lens=bounds)
        self.form = cache(partial(_packed, self.at_N, batch.B, batch.T))
        self.last = (None, 0, None)

    def run(self, layer, traits: LayerTraits, x_BTD: Tensor, args, kwargs):
        """The layer's output for [B, T] tokens. It runs on all of them if it has residual streams,
        if an argument has no packed form or is not as in the small instance, or if transformers
        records outputs inside.
        """
        # Layers may write to a dict, such as that of the keys they share: it stays the same one. Nothing
        # here may close over the arguments: tree_flatten leaves a cycle behind.
        leaves, spec = pytree.tree_flatten(
            (args, [*kwargs.values()]), is_leaf=lambda x: isinstance(x, dict)
        )
        leaves = [self.form(x) if isinstance(x, Tensor) else x for x in leaves]
        leaves = [x.over(self.batch) if isinstance(x, Mask) else x for x in leaves]
        unlike = x_BTD.dim() != 3 or other_argument(traits, args, kwargs, *x_BTD.shape[:2])
        if unlike or any(x is GONE for x in leaves) or collected_now():
            return layer(x_BTD, *args, **kwargs)
        args, values = pytree.tree_unflatten(leaves, spec)
        y_BTD, writes, x_1ND = self.last
        if y_BTD is not x_BTD or version(x_BTD) != writes or x_BTD.is_inference():
            x_1ND = x_BTD.flatten(0, 1).index_select(0, self.at_N)[None]
        with having(batch=self.batch):
            out = layer(x_1ND, *args, **dict(zip(kwargs, values)))
        return pytree.tree_map_only(Tensor, partial(self._padded, x_BTD), out)

    def _padded(self, x_BTD: Tensor, y_1ND: Tensor) -> Tensor:
        """A layer's output as [B, T, ...]. Padding keeps the layer's input: with zeros, a norm
        might divide by zero."""
        y_ND = y_1ND[0, : self.real]
        x_ND = x_BTD.detach().to(y_ND).flatten(0, 1)
        y_BTD = x_ND.index_copy(0, self.at_N[: self.real], y_ND).view_as(x_BTD)
        self.last = y_BTD, version(y_BTD), y_1ND
        return y_BTD


def _packed(at_N: Tensor, B: int, T: int, x: Tensor):
    """[..., B or 1, T, ...] as [..., 1, N, ...]; GONE for other tensors with a token axis, and for
    those with an entry a row (an image's)."""
    axis = token_axis(x, B, T)
    if axis is None:
        return GONE if x.dim() and len(x) == B > 1 else x
    if not axis or x.shape[axis - 1] not in (1, B):
        return GONE
    places = (axis - 1, axis)
    rows = x.movedim(places, (0, 1))
    tokens = rows.expand(B, *rows.shape[1:]).flatten(0, 1)
    return tokens.index_select(0, at_N)[None].movedim((0, 1), places)


def packed_row(
    inputs: Inputs, traits: StackTraits, layers, as_tried: bool, batch: Batch
) -> PackedRow | None:
    """The packed row on which layers run in place of padded rows; None if they run on all tokens.
    as_tried: all patched layers run as in the small instance.

    They run on all tokens if any of these holds:
        - something reads padding, or padding lies between real tokens
        - ranks share rows, or attention's probabilities are asked for
        - transformers' mixers run, which do not isolate documents
        - a layer differs from the one that the small instance tried: with other modules in it, it may
          mix tokens, and one that runs untiled may remember padding
        - a layer was compiled by itself, which would be compiled for each length
        - the small instance's outputs differed
    """
    able = as_tried and traits.unpads and (inputs.tiled or not traits.mixers)
    if not able or inputs.rows_mask is None or batch.probabilities or batch.row_ranks:
        return None
    for layer in layers:
        if not isinstance(layer, PatchedLayer) or compiled_by_itself(layer):
            return None
    # The bounds cost nothing extra: the layers would read them, and wait for the device, anyway.
    bounds = batch.rows().real
    N = 0 if bounds is None else _rounded(bounds[-1])
    return PackedRow(batch, bounds, N) if 0 < N < inputs.B * inputs.T else None


def _rounded(tokens: int) -> int:
    """A multiple of the largest power of two within FILLER of the tokens."""
    filler = max(int(tokens * FILLER), 1)
    step = 1 << filler.bit_length() - 1
    return -(-tokens // step) * step
