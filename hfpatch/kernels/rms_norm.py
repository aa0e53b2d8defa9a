"""Triton kernels of RMSNorm. Rows live in registers. ops/rms_norm.py launches `rms_norm_fwd` and
`rms_norm_bwd`, by their names (`define` in ops/_library.py).

N rows, D hidden, P programs of the backward. Bounded by memory traffic: forward moves 2 ND elements,
backward 3 ND. Beyond D = 8,192 the backward spills some
registers; such a model's matmuls take a few hundred times as long. Each backward program walks its
own rows, keeps its share of dW in registers and writes it once, as one row of [P, D] float32 that
torch then sums.
"""

import torch
import triton
import triton.language as tl

from hfpatch.kernels._launch import _load, launch, rows_view, sm_count


@triton.jit
def _factor(weight_ptr, o_d, D, OFFSET: tl.constexpr):
    """The factor of x_hat: OFFSET + weight. A missing weight counts as 1."""
    if weight_ptr is not None:
        return _load(weight_ptr + o_d, o_d < D) + OFFSET
    else:
        return tl.full(o_d.shape, 1.0 + OFFSET, tl.float32)


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr,  # (N, D)
    weight_ptr,  # (D,), or None
    y_ptr,  # (N, D)
    rstd_ptr,  # (N,)
    N,
    D,
    stride_x,
    eps,
    OFFSET: tl.constexpr,
    ROUND_X_HAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < N
    mask = m_n[:, None] & (o_d < D)[None, :]
    b_w = _factor(weight_ptr, o_d, D, OFFSET)
    b_x = _load(x_ptr + o_n[:, None] * stride_x + o_d[None, :], mask)
    b_square = tl.sum(b_x * b_x, axis=1) / D
    b_rstd = tl.rsqrt(b_square + eps)
    tl.store(rstd_ptr + o_n, b_rstd, mask=m_n)
    b_y = b_x * b_rstd[:, None]
    if ROUND_X_HAT:
        b_y = b_y.to(x_ptr.dtype.element_ty).to(tl.float32)
    b_y *= b_w[None, :]
    tl.store(y_ptr + o_n[:, None] * D + o_d[None, :], b_y, mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    dy_ptr,  # (N, D)
    x_ptr,  # (N, D)
    weight_ptr,  # (D,), or None
    rstd_ptr,  # (N,)
    dx_ptr,  # (N, D)
    dw_ptr,  # (P, D), float32, or None
    N,
    D,
    stride_dy,
    stride_x,
    rows_each,  # rows a program, a multiple of BLOCK_N
    OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_p = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_dw = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    b_w = _factor(weight_ptr, o_d, D, OFFSET)
    first = i_p * rows_each
    # The loads of the next rows are in flight (cp.async) while this row is reduced.
    for i in tl.range(0, rows_each, BLOCK_N, num_stages=STAGES):
        o_n = first + i + tl.arange(0, BLOCK_N)
        m_n = o_n < N
        mask = m_n[:, None] & m_d[None, :]
        p_x = x_ptr + o_n[:, None] * stride_x + o_d[None, :]
        p_dy = dy_ptr + o_n[:, None] * stride_dy + o_d[None, :]
        b_x = _load(p_x, mask)
        b_dy = _load(p_dy, mask)
        b_rstd = _load(rstd_ptr + o_n, m_n)
        # With g = dy * factor: dx = (g - x_hat * mean(g * x_hat)) * rstd, and dw sums dy * x_hat.
        b_xhat = b_x * b_rstd[:, None]
        b_g = b_dy * b_w[None, :]
        b_mean = tl.sum(b_g * b_xhat, axis=1) / D
        # Behind the reduction: before it, the sums spilled registers on sm_120.
        if dw_ptr is not None:
            b_dw += b_dy * b_xhat
        b_dx = (b_g - b_xhat * b_mean[:, None]) * b_rstd[:, None]
        p_dx = dx_ptr + o_n[:, None] * D + o_d[None, :]
        tl.store(p_dx, b_dx, mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + i_p * D + o_d, tl.sum(b_dw, axis=0), mask=m_d)


def _block(D: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_D, num_warps).

    Wide rows get 16 elements per thread. A program takes several narrow rows.
    """
    block_d = triton.next_power_of_2(D)
    block_n = max(1, min(16, 2048 // block_d))
    return block_n, block_d, min(32, max(4, block_n * block_d // 512))


def rms_norm_fwd(outs, x, weight, eps, offset, cast) -> None:
    """Launches the forward. Results and arguments as `hfpatch::rms_norm`."""
    y, rstd = outs
    x_ND = rows_view(x)
    N, D = x_ND.shape
    weight = None if weight is None else weight.contiguous()
    block_n, block_d, num_warps = _block(D)
    args = x_ND, weight, y, rstd, N, D, x_ND.stride(0), eps
    constexprs = dict(OFFSET=offset, ROUND_X_HAT=cast == "before", BLOCK_N=block_n, BLOCK_D=block_d)
    launch(rms_norm_fwd_kernel, (triton.cdiv(N, block_n),), args, constexprs, num_warps=num_warps)


def rms_norm_bwd(outs, dy, x, weight, rstd, offset, need_dw) -> None:
    """Launches the backward. Results and arguments as `hfpatch::rms_norm_bwd`."""
    dx, dw = outs
    x_ND = rows_view(x)
    dy_ND = rows_view(dy)
    N, D = x_ND.shape
    block_n, block_d, num_warps = _block(D)
    # About two programs an SM hide each other's reductions. Then the fewest programs that cover the
    # rows, so that no row of dw is unused.
    rows_each = triton.cdiv(triton.cdiv(N, 2 * sm_count(x.device)), block_n) * block_n
    programs = triton.cdiv(N, rows_each)
    dw_PD = x.new_empty(programs, D, dtype=torch.float32) if need_dw else None
    # stages - 1 loop steps wait in shared memory. Two programs per SM must fit an A100's 164 KiB. One
    # program alone may take 96 KiB; wider rows are not prefetched.
    step = block_n * block_d * (x.element_size() + dy.element_size())
    stages = 1 + (step <= 96 * 1024) + (step <= 36 * 1024)
    weight = None if weight is None else weight.contiguous()
    args = (
        dy_ND, x_ND, weight, rstd.contiguous(), dx, dw_PD, N, D,
        dy_ND.stride(0), x_ND.stride(0), rows_each,
    )  # fmt: skip
    constexprs = dict(OFFSET=offset, BLOCK_N=block_n, BLOCK_D=block_d, STAGES=stages)
    launch(rms_norm_bwd_kernel, (programs,), args, constexprs, num_warps=num_warps)
    if need_dw:
        dw.copy_(dw_PD.sum(0))
