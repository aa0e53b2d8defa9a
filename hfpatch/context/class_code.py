"""The code that a class of modules runs, and whether it is still what `apply` saw."""

import sys

from torch import nn

from hfpatch.compat import MADE_FROM


def rope_of(attn: nn.Module):
    """The `apply_rotary_pos_emb` of the transformers file that defines this attention, or None."""
    return _code(getattr(attn, "_hfpatch_base", type(attn)))[1]


def _code(kind: type) -> tuple:
    """A class's forward, and its file's rotation.

    Some libraries replace the latter process-wide.
    """
    return MADE_FROM[kind].forward, getattr(
        sys.modules.get(kind.__module__), "apply_rotary_pos_emb", None
    )


_asked: dict[type, tuple] = {}


def code_asked(layers) -> frozenset:
    """The code of every class in these layers, before apply.

    Remembered for `as_asked`; part of the key of a verdict.
    """
    found = {kind: _code(kind) for kind in {type(m) for layer in layers for m in layer.modules()}}
    _asked.update(found)
    return frozenset(found.items())


def as_asked(kind: type) -> bool:
    """Whether a class still has the code that it had when a model with it was probed."""
    return _asked.get(kind) in (None, _code(kind))
