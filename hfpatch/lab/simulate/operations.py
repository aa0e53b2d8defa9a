"""An operation as a dispatch mode sees it: the tensors in it, and what its result's shape depends on."""

from functools import cache

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


@cache
def _is_fresh(func) -> bool:
    """Whether an operation writes to no argument and returns tensors with memory of their own."""
    schema = schema_of(func)
    return not any(x.alias_info for x in (*schema.arguments, *schema.returns))


@cache
def is_view(func) -> bool:
    """Whether an operation reads and writes nothing, and returns what it was given in another
    shape."""
    schema = schema_of(func)
    if func is torch.ops.aten._unsafe_view.default:
        return True
    return not schema.is_mutable and any(x.alias_info for x in schema.returns)


@cache
def writes(func) -> bool:
    """Whether an operation returns an argument that it wrote: `out`, or the first one."""
    returns = schema_of(func).returns
    found = len(returns) == 1 and returns[0].alias_info
    return bool(found and found.is_write) and not func.__name__.startswith("resize")


def _described(x):
    """A hashable description of an argument; a tensor's is its layout."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.storage_offset()
    if isinstance(x, (list, tuple)):
        return tuple(map(_described, x))
    return type(x), x  # 1 and True are equal


def key_of(func, args, kwargs) -> tuple | None:
    """A key that determines the shapes of the operation's fresh results, None without them."""
    if not _is_fresh(func):
        return None
    return func, _described(args), _described(tuple(kwargs.items()))


def is_dense(tensor: Tensor) -> bool:
    """Non-overlapping and dense, the layout in which autograd accumulates in place."""
    expected = 1
    for stride, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape) if sz != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
