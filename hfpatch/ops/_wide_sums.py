"""Float32 sums of products of 16-bit matrices, accumulated inside the matmul where the device can.

The products are then neither rounded nor written to memory before they are added.

M, N rows and columns of a sum; K the dimension that a matmul sums over.
"""

import contextlib
import contextvars
from functools import lru_cache

import torch
from torch import Tensor

from hfpatch.compat import is_fake

_AS_CUDA = contextvars.ContextVar("hfpatch_sums_as_cuda", default=False)
_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_on_cuda():
    """A context in which fake CPU tensors take the code path of CUDA tensors, with its
    allocations."""
    token = _AS_CUDA.set(True)
    try:
        yield
    finally:
        _AS_CUDA.reset(token)


def on_cuda(x: Tensor) -> bool:
    """Whether x is on a GPU, or is a fake tensor that represents one (as_on_cuda)."""
    return x.is_cuda or (_AS_CUDA.get() and is_fake(x))


def sums_in_matmul(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `into` supports matmuls of this dtype on x's device."""
    if dtype not in _HALF or not on_cuda(x):
        return False
    return is_fake(x) or exact_there(x.device, dtype)


def into(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, first: bool) -> None:
    """Adds a_MK @ b_KN to the float32 sum out_MN; `first` overwrites the sum instead."""
    aten = torch.ops.aten
    if first:
        aten.mm.dtype_out(a_MK, b_KN, out_MN.dtype, out=out_MN)
    else:
        aten.addmm.dtype_out(out_MN, a_MK, b_KN, out_MN.dtype, out=out_MN)


@lru_cache(maxsize=32)
def exact_there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device's matmul adds to a float32 sum with float32 precision. Measured once, on a
    small product.

    Raises:
        torch.OutOfMemoryError: no room for the trial. It is not caught, because the answer is
            cached.
    """
    M, K, N = 64, 256, 128
    generator = torch.Generator(device).manual_seed(0)
    a_KM, b_KN = (
        torch.randn(K, n, generator=generator, device=device, dtype=dtype) for n in (M, N)
    )
    sum_MN = torch.empty(M, N, dtype=torch.float32, device=device)
    try:
        for first in (True, False):
            into(sum_MN, a_KM.t(), b_KN, first)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError):
        return False
    a_MK, b_KN = a_KM.double().t(), b_KN.double()
    budget = 2 * (K + 1) * torch.finfo(torch.float32).eps * (a_MK.abs() @ b_KN.abs())
    return bool(((sum_MN.double() - 2 * (a_MK @ b_KN)).abs() <= budget).all())
