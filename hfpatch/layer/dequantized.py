"""Frozen 4-bit weights of fused experts, dequantized once per phase of a layer: one pass over its
tiles, before or after attention, in the forward or in the backward.
"""

from torch import Tensor, nn

from hfpatch.parts.quantised import holds_packed


class DequantizedWeights:
    """The dequantized weights of one call of a layer."""

    def __init__(self):
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

    def weight_of(self, experts: nn.Module, name: str) -> Tensor:
        """A weight of fused experts, dequantized at most once within a phase."""
        if not (self.kept and holds_packed(experts)):
            return getattr(experts, name)
        if (experts, name) not in self.weights:
            self.weights[experts, name] = getattr(experts, name)
        return self.weights[experts, name]
