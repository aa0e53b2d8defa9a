"""An operation as a dispatch mode sees it: the tensors in it, and what its result's shape depends on."""

import torch
from torch import Tensor

from hfpatch.lab.compat import schema_of


def tensors_in(tree, out: list) -> list[Tensor]:
    """`out` with the tensors in nested arguments or results appended."""
    for item in tree:
        if isinstance(item, Tensor):
            out.append(item)
        elif isinstance(item, (list, tuple)):
            tensors_in(item, out)
        elif isinstance(item, dict):
            tensors_in(item.values(), out)
    return out


class Operation:
    """What holds of an operation whatever its arguments are.

    Attributes:
        fresh: it writes to no argument and returns tensors with memory of their own.
        view: it reads and writes nothing, and returns what it was given in another shape.
        writes: it returns an argument that it wrote: `out`, or the first one.
        written: the positions of the arguments that it writes.
    """

    def __init__(self, func):
        schema = schema_of(func)
        self.func = func
        self.mutable = schema.is_mutable
        given = [x.alias_info for x in schema.arguments]
        self.written = [at for at, x in enumerate(given) if x is not None and x.is_write]
        aliased = [x.alias_info for x in schema.returns if x.alias_info]
        self.fresh = not (aliased or any(given))
        hidden = func is torch.ops.aten._unsafe_view.default
        self.view = hidden or bool(not self.mutable and aliased)
        resizes = func.__name__.startswith("resize")
        one = len(schema.returns) == 1
        self.writes = one and any(x.is_write for x in aliased) and not resizes
        self.ours = func.namespace in ("aten", "hfpatch")


_KNOWN: dict = {}  # id(func) -> Operation; torch's own hash of an operator runs in Python


def operation(func) -> Operation:
    return _KNOWN.get(id(func)) or _KNOWN.setdefault(id(func), Operation(func))


def _described(x):
    """A hashable description of an argument; a tensor's is its layout."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple(map(_described, x))
    return type(x), x  # 1 and True are equal


def key_of(func, args, kwargs) -> tuple:
    """A key that determines the cost of an operation, and the shapes of fresh results."""
    return id(func), _described(args), _described(tuple(kwargs.items()))


def is_dense(tensor: Tensor) -> bool:
    """Non-overlapping and dense, the layout in which autograd accumulates in place."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
