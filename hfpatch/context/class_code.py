"""The code that a class of modules runs, and whether it changed since `apply`."""

import sys

from hfpatch.compat import MADE_FROM


def _code(kind: type) -> tuple:
    """A class's forward, and the rotation of its file.

    Some libraries replace the rotation process-wide.
    """
    return MADE_FROM[kind].forward, getattr(
        sys.modules.get(kind.__module__), "apply_rotary_pos_emb", None
    )


_asked: dict[type, tuple] = {}


def code_asked(layers) -> frozenset:
    """The code of every class in these layers, before apply.

    `as_asked` compares with it later. It is part of the key of a cached verdict.
    """
    found = {kind: _code(kind) for kind in {type(m) for layer in layers for m in layer.modules()}}
    _asked.update(found)
    return frozenset(found.items())


def as_asked(kind: type) -> bool:
    """Whether a class still has the code that the probe of its model saw."""
    return _asked.get(kind) in (None, _code(kind))
