"""A decoder layer as two functions of a tile of tokens: before and after attention.

No family has its own version of them. Each call of a layer makes one object:

    Direct (direct.py)   the common block with plain weights. Ops only, derivatives written out; no
                         module is called and no graph is recorded.
    Traced (traced.py)   every other layer. Its own forward runs with our attention function, and
                         autograd differentiates a tile:

        before(x):       the forward runs on a tile of x up to its last attention call, counted on
                         the small instance. The inputs of attention are noted, and `Stopped` ends
                         the forward.
        after(x, outs):  the forward runs on the same tile again. Each attention call returns its
                         tile of `outs` at once. The values before it are computed in vain, except
                         that Linears with unread values are left out (parts/unread.py).

`parts_of` (function.py) chooses. layer/call.py and layer/backward.py do not know which one runs.
"""

from contextlib import nullcontext

from torch import Tensor, nn

from hfpatch.compat import autocast_dtype, submodule
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts.parts import FusedJointMLP, FusedMLP, activation_as_found
from hfpatch.parts.unread import as_found, can_go_without


class LayerParts:
    """One call of a layer, before and after its attention. [a, b): the tokens of a tile. What has a
    body here is that of a layer without anything further.

    Attributes:
        layer, its traits (LayerTraits) and modules: the layer and its submodules.
        condition: layer.condition.Condition, which holds for this call.
        by_hand: no module in the layer is called, so hooks and forwards inside it do not matter.
            Weight gradients go to WeightGradients.add.
        batch: context.masks.Batch.
        asked: scale, pattern and sinks of each attention call; mixers: modules that mix tokens
            otherwise; they run between `before` and `after`.
        places: indices, in the result of `before`, of keys and values for later layers; leaves:
            whether there may be some.
        autocast: autocast's dtype in forward, and whether it cached casts.
        wanted: the arguments besides the hidden states that need a gradient.
    """

    phase = staticmethod(iter)  # the tiles of one pass

    def before(self, x: Tensor, a: int, b: int) -> list[Tensor]:
        """q [B, t, H, E], k and v [B, t, K, E] of every attention call, then the mixers' inputs
        [B, t, D].
        """

    def after(self, x: Tensor, outs: list[Tensor], a: int, b: int, noted=None) -> list[Tensor]:
        """The layer's output for a tile of its input and of attention's outputs, then the recorded
        tensors (router logits). noted: receives the values that its keys name.
        """

    def after_backward(
        self, x, outs, a: int, b: int, dys: list, known: dict, need_x: bool, weights
    ) -> tuple:
        """(dx of a tile or None, the gradients of its attention outputs), from the gradients `dys`
        of the result of `after`. known: noted values, which are not recomputed; emptied.
        """

    def before_again(self, x, a: int, b: int, need_x: bool, weights, unread: bool) -> tuple:
        """(the result of `before`, a function from its gradients to dx of the tile or None).
        unread: the values of the result are unread.
        """

    def again(self, weights, several: bool):
        """Context of a backward. Yields the gradients of `wanted`, complete at its end. several:
        whether there is more than one tile.
        """
        return nullcontext(())

    def keepable(self, names, device: str) -> tuple[str, ...]:
        """The names in budget.policy.KEEPABLE that spare this layer work."""
        return tuple(names)

    def hand_on(self, y: Tensor, extras: list[Tensor], into: dict, shared):
        """The layer's return value, from its output y and the further outputs. Recorded tensors,
        joined along tokens, go to transformers' lists in `into`, in their own shape. Keys and
        values for later layers go into `shared`.
        """
        return y


def keepable(
    layer: nn.Module, traits: LayerTraits, names: tuple[str, ...], device: str
) -> tuple[str, ...]:
    """LayerParts.keepable, before any call."""
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
