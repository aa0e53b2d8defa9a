"""A decoder layer as two functions of a tile of tokens: before attention and behind it.

Nobody wrote these functions for a family: a layer is asked for them, one object a call.

    Direct (direct.py)   the common block of plain weights. Ops alone, derivatives written out;
                         no module is called and no graph is recorded.
    Traced (traced.py)   every other layer. Its own forward runs, with ours in the place of
                         attention, and autograd differentiates a tile:

        before(x):       the forward runs on a tile of x until it has called attention as often as
                         on its small instance; what it gave attention is noted, and `Stopped`
                         ends it there.
        after(x, outs):  the forward runs on the same tile again. Each call of attention traits
                         with its tile of `outs` at once; what led there is computed for nothing,
                         unless nobody reads it: then Linears are left out (parts/unread.py).

`parts_of` (function.py) chooses. Both say the same to layer/call.py and layer/backward.py, which
hold no trace of which one runs.
"""

from typing import Protocol

from torch import Tensor, nn

from hfpatch.compat import autocast_dtype, submodule
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts.parts import FusedJointMLP, FusedMLP, activation_as_found
from hfpatch.parts.unread import as_found, can_go_without


class LayerParts(Protocol):
    """One call of a layer, before and behind its attention. [a, b): the tokens of a tile.

    Attributes:
        traits: the layer's LayerTraits; modules: itself and those in it.
        condition: layer.condition.Condition, which holds for this call.
        by_hand: nothing in the layer is called, so hooks and forwards in it are nobody's concern,
            and weights' gradients are given to WeightGradients.add.
        batch: context.masks.Batch.
        asked: what each attention call asked for; mixers: what mixes tokens beside them, whole.
        places: of keys and values that later layers take, in what `before` gives; leaves: whether
            there may be some.
        autocast: its dtype in forward, and whether it cached casts.
        wanted: the arguments beside the hidden states that want a gradient.
    """

    layer: nn.Module
    traits: LayerTraits
    modules: list
    condition: object
    batch: object
    by_hand: bool
    asked: list
    mixers: list
    places: list[int]
    leaves: bool
    autocast: tuple
    wanted: list[Tensor]

    def before(self, x: Tensor, a: int, b: int) -> list[Tensor]:
        """q [B, t, H, E], k and v [B, t, K, E] of every attention call, then the mixers' inputs
        [B, t, D].
        """

    def after(self, x: Tensor, outs: list[Tensor], a: int, b: int, noted=None) -> list[Tensor]:
        """The layer's output for a tile of its input and of attention's outputs, behind it what
        was recorded on the way. noted: receives the values of the names that it has as keys.
        """

    def after_backward(
        self, x, outs, a: int, b: int, dys: list, known: dict, need_x: bool, weights
    ) -> tuple:
        """(dx of a tile or None, the gradients of its attention outputs), from those of what
        `after` gives. known: what was noted, which is not computed again; emptied.
        """

    def before_again(self, x, a: int, b: int, need_x: bool, weights, unread: bool) -> tuple:
        """(what `before` gives, a function that gives dx of the tile or None from the gradients of
        that). unread: nobody reads its values.
        """

    def again(self, weights, several: bool):
        """Context of a backward, which gives the gradients of `wanted`, complete at its end.
        several: whether there is more than one tile.
        """

    def keepable(self, names, device: str) -> tuple[str, ...]:
        """Those of budget.policy.KEEPABLE that spare this layer something."""

    def phase(self, tiles):
        """The tiles of one pass."""

    def hand_on(self, y: Tensor, extras: list[Tensor], into: dict, shared):
        """What the layer returns, of its hidden states and what came behind them. What was
        recorded, joined along tokens, is added to transformers' lists, in the shape it had; what
        goes to later layers, into `shared`.
        """


def keepable(
    layer: nn.Module, traits: LayerTraits, names: tuple[str, ...], device: str
) -> tuple[str, ...]:
    """LayerParts.keepable before there is a call."""
    if traits.mixers or not names:
        return ()
    if autocast_dtype(device) is not None:
        return tuple(n for n in names if n == "qkv")
    sources = sources_of(layer, traits)
    spared = lambda name: can_go_without(submodule(layer, name)) and as_found(layer, name)  # noqa: E731
    return tuple(n for n in names if n == "qkv" or n in sources and all(map(spared, sources[n])))


def sources_of(layer: nn.Module, traits: LayerTraits) -> dict[str, tuple[str, ...]]:
    """The modules whose values nobody reads where a kept value is known."""
    sources = {"mid": ("self_attn.o_proj",)} if traits.block else {}
    mlp = getattr(layer, "mlp", None)
    if (
        isinstance(mlp, (FusedMLP, FusedJointMLP))
        and "forward" not in vars(mlp)
        and activation_as_found(mlp)
    ):
        sources["gate_up"] = tuple(f"mlp.{name}" for name in mlp._hfpatch_gates)
    return sources
