"""Frozen 4-bit weights, dequantized once per phase of a layer.

With many small tiles, dequantizing a weight for each tile costs as much as the matmuls. A phase is
one pass over the tiles: before or after attention, in the forward or in the backward. Within it a
Linear is dequantized at its first use, and the dense weight serves all tiles. The products equal
those of the module's own forward and backward, bit for bit.
"""

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.parts.quantised import dense_of, holds_packed, is_written_out
from hfpatch.parts.unread import can_go_without, product


def _forward(module: nn.Linear, make, input: Tensor) -> Tensor:
    """Replaces `module.forward`: computes in the module's dtype and returns the input's dtype."""
    dtype = getattr(module, "compute_dtype", None) or input.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return product(input.to(dtype), make, bias).to(input.dtype)


class DequantizedWeights:
    """The dequantized weights of one call of a layer. linears: Linears too, not only fused experts,
    whose weights every tile dequantizes whole anyway.
    """

    def __init__(self, layer: nn.Module, linears: bool = True):
        modules = layer.modules() if linears else ()
        self.modules = [m for m in modules if is_written_out(m) and can_go_without(m)]
        self.weights: dict[tuple, Tensor] = {}
        self.kept = False

    def phase(self, tiles):
        """Yields the tiles. Until the last of them each weight is dequantized at most once."""
        self.kept = True
        try:
            yield from tiles
        finally:
            self.kept = False
            self.weights.clear()

    def dense_of(self, module: nn.Module):
        """Like quantised.dense_of, but from this call's cache."""
        return partial(self._make, module) if module in self.modules else dense_of(module)

    def _make(self, module: nn.Module, dtype: torch.dtype) -> Tensor:
        found = self.weights.get((module, dtype))
        if found is None:
            found = dense_of(module)(dtype)
            if self.kept:
                self.weights[module, dtype] = found
        return found

    def weight_of(self, experts: nn.Module, name: str) -> Tensor:
        """A weight of fused experts, dequantized at most once within a phase."""
        if not (self.kept and holds_packed(experts)):
            return getattr(experts, name)
        if (experts, name) not in self.weights:
            self.weights[experts, name] = getattr(experts, name)
        return self.weights[experts, name]

    def forwards(self, idle: list) -> list:
        """(module, forward) of each module that is not in `idle`."""
        others = [m for m in self.modules if all(m is not one for one, _ in idle)]
        return [(m, partial(_forward, m, partial(self._make, m))) for m in others]
