"""Gate and up: whether a layer can keep them, and the modules whose values are then unread."""

from torch import nn

from hfpatch.compat import autocast_dtype
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts.parts import FusedMLP, activation_as_found
from hfpatch.parts.unread import as_found, can_go_without


def gates_of(layer: nn.Module) -> tuple[str, ...]:
    """Names of the projections that make gate and up, in a fused MLP."""
    return tuple(f"mlp.{name}" for name in layer.mlp._hfpatch.gates)


def gate_up_columns(layer: nn.Module, traits: LayerTraits, device: str) -> int:
    """The columns of gate and up together, 0 if keeping them spares this layer no work."""
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, FusedMLP) or "forward" in vars(mlp):
        return 0
    if traits.mixers or autocast_dtype(device) is not None or not activation_as_found(mlp):
        return 0
    columns = 0
    for name in gates_of(layer):
        gate = layer.get_submodule(name)
        if not (can_go_without(gate) and as_found(layer, name)):
            return 0
        columns += gate.out_features
    return columns
