"""Is the incoming gradient ours to overwrite? Only where nobody else, in Python or C++, can see its memory.

A gradient may also be held by its caller, a hook, a skip connection or `.grad`. Rather than asking each, the counts of holders
are compared with those of a gradient that is known to be private, seen from the same place in the call stack.
"""

import sys

import torch
from torch import Tensor

from hfpatch import compat


def holders(grad: Tensor) -> tuple[int, int, int]:
    """How many hold this tensor: in Python, in C++, and its storage."""
    # Where PyTorch does not tell, nothing counts as private: the gradient is copied, never overwritten.
    return sys.getrefcount(grad), *compat.holders(grad)


class _Probe(torch.autograd.Function):
    """Sees a gradient that nobody else holds, from where _TiledLayer.backward sees one."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return (x.clone(),)

    @staticmethod
    def backward(ctx, dy, *_):
        ctx.seen.append(holders(dy))
        return dy.clone(), None


def private_holders(like: Tensor) -> tuple[int, int, int]:
    """What `holders` says of a gradient that only the autograd engine holds, for tensors of this kind."""
    seen: list = []
    with torch.enable_grad(), compat.autocast(like.device.type, enabled=False):
        x = torch.ones(2, device=like.device).requires_grad_()
        y = _Probe.apply(_Probe.apply(x, seen)[0], [])[0]
        torch.autograd.grad(y, x, torch.ones_like(y))
    return seen[0]


def is_private(grad: Tensor, held: tuple, private: tuple) -> bool:
    """Whether nobody but this backward can see the gradient's memory. held: holders(grad), called on a line of its own."""
    whole = grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    return whole and sys.maxsize not in held and all(have <= alone for have, alone in zip(held, private))
