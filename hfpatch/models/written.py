"""Frozen weights of 4 bits, written out once a phase: over many small tiles writing them out costs as much as the products.

Within a phase (pre of a layer's forward, post of it, each of backward's) a Linear's dense weight is made at its first use and
serves all tiles; a product is then the one that the module's own forward and backward make of it, to the bit.
"""

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.checkpoint.quantised import dense_of, is_written_out
from hfpatch.compat import applying
from hfpatch.models.dead import can_go_without


class _Product(torch.autograd.Function):
    """F.linear over a frozen weight that `make` gives for a dtype, in either direction."""

    @staticmethod
    def forward(ctx, x, make, bias):
        ctx.make = make
        return nn.functional.linear(x, make(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.make(dy.dtype), None, None


_product = applying(_Product)


def _forward(module: nn.Linear, make, input: Tensor) -> Tensor:
    """Stands for `module.forward`: the input in the dtype that the module computes in, the output in the input's."""
    dtype = getattr(module, "compute_dtype", None) or input.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return _product(input.to(dtype), make, bias).to(input.dtype)


class WrittenOut:
    """The dense weights of one call of a layer."""

    def __init__(self, layer: nn.Module):
        self.modules = [m for m in layer.modules() if is_written_out(m) and can_go_without(m)]
        self.weights: dict[tuple, Tensor] = {}
        self.kept = False

    def phase(self, tiles):
        """The same tiles; until they end each weight is made once."""
        self.kept = True
        try:
            yield from tiles
        finally:
            self.kept = False
            self.weights.clear()

    def dense_of(self, module: nn.Module):
        """As quantised.dense_of."""
        return partial(self._make, module) if module in self.modules else dense_of(module)

    def _make(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        found = self.weights.get((module, dtype))
        if found is None:
            found = dense_of(module)(dtype)
            if self.kept:
                self.weights[module, dtype] = found
        return found

    def forwards(self, idle: list) -> list:
        """(module, forward) of all but those that are idle."""
        others = [m for m in self.modules if all(m is not one for one, _ in idle)]
        return [(m, partial(_forward, m, partial(self._make, m))) for m in others]
