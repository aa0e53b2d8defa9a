"""What a kind of layer answered when it was asked how it is built."""

import sys
from dataclasses import dataclass

from torch import nn

from hfpatch.compat import MADE_FROM

OTHER_MIXER = "it mixes tokens by something else than attention"
BY_PLACE = "what it makes of a token depends on where that stands in its input"


@dataclass(frozen=True)
class Answers:
    """What a kind of layer answered when it was asked (models/verdict.py, or at its first call).

    attention: names of the modules that called attention, in order; mixers: of those that mix tokens otherwise and run whole;
    paired: of these, those that return a pair, whose second nobody reads; block: it is norm, attention, norm, MLP as
    models/block.py has them; dead_post, dead_pre: names of modules whose output values no gradient reads when `post`, or `pre`, is
    run again in backward; unread: those of dead_post that its output does not depend on either; reason: why it is not tiled, or
    None; softcap: what its attention caps scores at, or None; looked: whether what mixes its tokens was looked for; attends:
    whether its mixers are but modules that call attention, which cannot be asked for there.
    """

    attention: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    paired: tuple[str, ...] = ()
    block: bool = False
    dead_post: tuple[str, ...] = ()
    dead_pre: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    reason: str | None = None
    softcap: float | None = None
    looked: bool = False
    attends: bool = False

    @property
    def mixing(self) -> tuple[str, ...]:
        """The modules through which tokens meet."""
        return self.attention + self.mixers


def rope_of(attn: nn.Module):
    """The rotation that this attention's file of transformers uses, or None."""
    return _code(getattr(attn, "_hfpatch_base", type(attn)))[1]


def _code(kind: type) -> tuple:
    """What a class of modules runs: its forward, and the rotation of its file, which some replace for the whole process."""
    return MADE_FROM[kind].forward, getattr(sys.modules.get(kind.__module__), "apply_rotary_pos_emb", None)


_asked: dict[type, tuple] = {}


def code_asked(layers) -> frozenset:
    """What the classes in these layers, transformers' own yet, run: noted for `as_asked`, and part of what a verdict is about."""
    found = {kind: _code(kind) for kind in {type(m) for layer in layers for m in layer.modules()}}
    _asked.update(found)
    return frozenset(found.items())


def as_asked(kind: type) -> bool:
    """Whether a class runs what it ran when a model with it was asked."""
    return _asked.get(kind) in (None, _code(kind))


def looks_like_a_block(layer: nn.Module) -> bool:
    """Whether the layer has the modules that a block has; whether it is one, a probe says."""
    attn = getattr(layer, "self_attn", None)
    has = lambda m, names: all(hasattr(m, n) for n in names)  # noqa: E731
    return (
        attn is not None
        and has(layer, ("input_layernorm", "post_attention_layernorm", "mlp"))
        and has(attn, ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling"))
        and getattr(attn, "sinks", None) is None
        and rope_of(attn) is not None
    )
