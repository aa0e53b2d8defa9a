"""Whether a layer's backward may overwrite its incoming gradient: only if nobody else can see it.

dx is then written into dy's memory, one [T, hidden] tensor less at the peak: Llama-3.1-8B in bf16
at 131,072 tokens, checkpoints on the host, takes 5.58 GiB beyond parameters and gradients, and 6.58
GiB where dy counts as shared (both simulated).

A gradient may also be held by its caller, a hook, a skip connection or `.grad`. The holders that
Python and C++ count are compared with those of a gradient that is known to be private, seen from
the same place in the call stack.
"""

import sys

import torch
from torch import Tensor

from hfpatch import compat


class _Probe(torch.autograd.Function):
    """Counts the holders of a private gradient where LayerFunction.backward would receive it."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return (x.clone(),)

    @staticmethod
    def backward(ctx, dy, *_):
        held = sys.getrefcount(dy), *compat.holders(dy)
        ctx.seen.append(held)
        return dy.clone(), None


def private_holders(like: Tensor) -> tuple[int, int, int]:
    """References to a gradient that only the autograd engine holds, for tensors of this kind: in
    Python, in C++, and to its storage.
    """
    seen: list = []
    with torch.enable_grad(), compat.autocast(like.device.type, enabled=False):
        x = torch.ones(2, device=like.device).requires_grad_()
        y = _Probe.apply(_Probe.apply(x, seen)[0], [])[0]
        torch.autograd.grad(y, x, torch.ones_like(y))
    return seen[0]


def is_private(grad: Tensor, held: tuple, private: tuple) -> bool:
    """Whether only this backward can see the gradient's memory.

    held: sys.getrefcount(grad) and compat.holders(grad), in a statement of its own: an argument
    list holds a reference too. private: the result of private_holders. If PyTorch has no counts, no
    gradient counts as private: it is copied, never overwritten. So is one of an unknown kind (()).
    """
    whole = (
        grad.is_contiguous()
        and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    )
    if not (whole and private) or sys.maxsize in held:
        return False
    for have, alone in zip(held, private):
        if have > alone:
            return False
    return True
