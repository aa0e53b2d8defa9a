"""A tensor times one number on the device, in place. ops/_linear_ce_chunk.py launches `scale_`."""

import triton
import triton.language as tl
from torch import Tensor

from hfpatch.kernels._launch import _load, launch

SCALE_BLOCK = 4096


@triton.jit
def scale_kernel(
    x_ptr,  # (N,), multiplied in place
    factor_ptr,  # (), float32
    N,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < N
        b_x = _load(x_ptr + o_n, m_n)
        tl.store(x_ptr + o_n, b_x * factor, mask=m_n)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place. x: contiguous. factor: a float32 scalar on the device.

    Where factor is 1, x is neither read nor written.
    """
    N = x.numel()
    blocks = triton.cdiv(N, SCALE_BLOCK)
    launch(scale_kernel, (blocks,), (x, factor, N), dict(BLOCK=SCALE_BLOCK), num_warps=8)
