"""The code that a class of modules runs, and whether it changed since `apply`."""

from hfpatch.compat import code_of_class

_probed: dict[type, tuple] = {}


def code_probed(layers) -> frozenset:
    """The code of every class in these layers, before apply.

    `as_probed` compares with it later. It is part of the key of a cached verdict.
    """
    codes = {
        kind: code_of_class(kind) for kind in {type(m) for layer in layers for m in layer.modules()}
    }
    _probed.update(codes)
    return frozenset(codes.items())


def as_probed(kind: type) -> bool:
    """Whether a class still has the code that the probe of its model saw."""
    return _probed.get(kind) in (None, code_of_class(kind))
