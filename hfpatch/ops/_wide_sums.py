"""Float32 sums of products of 16-bit matrices, added up in the matmul itself where the device can: what is summed is neither
rounded nor written and read again in between.

M, N rows and columns of a sum, K what is summed over.
"""

import contextlib
import contextvars
from functools import lru_cache

import torch
from torch import Tensor

from hfpatch.compat import is_fake, shapes_of_out_dtype

_AS_CUDA = contextvars.ContextVar("hfpatch_sums_as_cuda", default=False)
_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_on_cuda():
    """Inside, fake CPU tensors take the route of CUDA tensors, and so their allocations."""
    token = _AS_CUDA.set(True)
    try:
        with shapes_of_out_dtype():
            yield
    finally:
        _AS_CUDA.reset(token)


def on_cuda(x: Tensor) -> bool:
    """Whether x is, or stands for, a tensor on such a device."""
    return x.is_cuda or (_AS_CUDA.get() and is_fake(x))


def sums_in_matmul(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `into` serves products of this dtype on x's device."""
    if dtype not in _HALF or not on_cuda(x):
        return False
    return is_fake(x) or exact_there(x.device, dtype)


def into(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, first: bool) -> None:
    """The product into the float32 sum or, where it is the first, in its place."""
    aten = torch.ops.aten
    if first:
        aten.mm.dtype_out(a_MK, b_KN, out_MN.dtype, out=out_MN)
    else:
        aten.addmm.dtype_out(out_MN, a_MK, b_KN, out_MN.dtype, out=out_MN)


@lru_cache(maxsize=32)
def exact_there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device's matmul takes a float32 sum, and adds as float32 does: tried once, on a small product.

    torch.OutOfMemoryError where there is no room to find it: the answer stands for the process.
    """
    M, K, N = 64, 256, 128
    generator = torch.Generator(device).manual_seed(0)
    a_KM, b_KN = (torch.randn(K, n, generator=generator, device=device, dtype=dtype) for n in (M, N))
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
