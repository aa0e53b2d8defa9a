"""Names of what a layer can keep inside a tile, and the modules whose values are then unread."""

from torch import nn

from hfpatch.compat import autocast_dtype, submodule
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts.parts import FusedJointMLP, FusedMLP, activation_as_found
from hfpatch.parts.unread import as_found, can_go_without


def keepable(
    layer: nn.Module, traits: LayerTraits, names: tuple[str, ...], device: str
) -> tuple[str, ...]:
    """The names in budget.policy.KEEPABLE that spare this layer work."""
    if traits.mixers or not names:
        return ()
    if autocast_dtype(device) is not None:
        return tuple(n for n in names if n == "qkv")
    sources = sources_of(layer, traits)
    spared = lambda name: can_go_without(submodule(layer, name)) and as_found(layer, name)  # noqa: E731
    return tuple(n for n in names if n == "qkv" or n in sources and all(map(spared, sources[n])))


def sources_of(layer: nn.Module, traits: LayerTraits) -> dict[str, tuple[str, ...]]:
    """For each name that a layer can keep, the modules whose values are then unread."""
    sources = {"mid": ("self_attn.o_proj",)} if traits.block else {}
    mlp = getattr(layer, "mlp", None)
    if (
        isinstance(mlp, (FusedMLP, FusedJointMLP))
        and "forward" not in vars(mlp)
        and activation_as_found(mlp)
    ):
        sources["gate_up"] = tuple(f"mlp.{name}" for name in mlp._hfpatch_gates)
    return sources


def gate_up_columns(layer: nn.Module, traits: LayerTraits, device: str) -> int:
    """The columns of gate and up together, 0 if keeping them spares this layer nothing."""
    if not keepable(layer, traits, ("gate_up",), device):
        return 0
    gates = (submodule(layer.mlp, name) for name in layer.mlp._hfpatch_gates)
    return sum(getattr(gate, "out_features", 0) for gate in gates)
