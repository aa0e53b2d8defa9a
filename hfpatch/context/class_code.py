"""The code that a class of modules runs, and whether it changed since `apply`."""

from hfpatch.compat import code_of_class

_asked: dict[type, tuple] = {}


def code_asked(layers) -> frozenset:
    """The code of every class in these layers, before apply.

    `as_asked` compares with it later. It is part of the key of a cached verdict.
    """
    found = {
        kind: code_of_class(kind) for kind in {type(m) for layer in layers for m in layer.modules()}
    }
    _asked.update(found)
    return frozenset(found.items())


def as_asked(kind: type) -> bool:
    """Whether a class still has the code that the probe of its model saw."""
    return _asked.get(kind) in (None, code_of_class(kind))
