"""Triton kernels of the gated activation: read once, computed in float32, written once.

ops/swiglu.py launches `swiglu_fwd` and `swiglu_bwd`, by their names (`define` in ops/_library.py).

N rows, F columns, tiled along both; contiguous tensors are one long row, so no width is a special
case.
"""

import triton
import triton.language as tl

from hfpatch.kernels._launch import _load, launch, rows_view


@triton.jit
def _sigmoids(x):
    """sigmoid(x) and sigmoid(-x), both in full precision.

    1 - sigmoid(x) would lose digits where the result is small.
    """
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def _act_and_slope(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        s, r = _sigmoids(x)
        return x * s, s * (1.0 + x * r)
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # sqrt(1 / 2)
        tail = x * tl.exp(-0.5 * x * x)
        return x * cdf, cdf + tail * 0.3989422804014327  # 1 / sqrt(2 pi)
    else:
        # 0.5 * (1 + tanh v) = sigmoid(2 v): no tanh (the interpreter has none) and no cancellation.
        tl.static_assert(ACTIVATION == "gelu_tanh")
        c = 1.5957691216057308  # 2 sqrt(2 / pi)
        s, r = _sigmoids(c * (x + 0.044715 * x * x * x))
        act = x * s
        return act, s + act * r * (c * (1.0 + 0.134145 * x * x))


@triton.jit
def _tile(n_blocks_f, N, F, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    o_n = i // n_blocks_f * BLOCK_N + tl.arange(0, BLOCK_N)
    o_f = i % n_blocks_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (o_n < N)[:, None] & (o_f < F)[None, :]
    return o_n[:, None], o_f[None, :], mask


@triton.jit
def swiglu_fwd_kernel(
    gate_ptr,  # (N, F)
    up_ptr,  # (N, F)
    y_ptr,  # (N, F)
    N,
    F,
    n_blocks_f,
    stride_gate,
    stride_up,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    o_n, o_f, mask = _tile(n_blocks_f, N, F, BLOCK_N, BLOCK_F)
    b_gate = _load(gate_ptr + o_n * stride_gate + o_f, mask)
    b_up = _load(up_ptr + o_n * stride_up + o_f, mask)
    b_act, _ = _act_and_slope(b_gate, ACTIVATION)
    tl.store(y_ptr + o_n * F + o_f, b_act * b_up, mask=mask)


@triton.jit
def swiglu_bwd_kernel(
    dy_ptr,  # (N, F)
    gate_ptr,  # (N, F)
    up_ptr,  # (N, F)
    dgate_ptr,  # (N, F)
    dup_ptr,  # (N, F)
    N,
    F,
    n_blocks_f,
    stride_dy,
    stride_gate,
    stride_up,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    o_n, o_f, mask = _tile(n_blocks_f, N, F, BLOCK_N, BLOCK_F)
    # All loads come before the first store, because the compiler must not move a load across it.
    b_gate = _load(gate_ptr + o_n * stride_gate + o_f, mask)
    b_dy = _load(dy_ptr + o_n * stride_dy + o_f, mask)
    b_up = _load(up_ptr + o_n * stride_up + o_f, mask)
    b_act, b_slope = _act_and_slope(b_gate, ACTIVATION)
    b_dup = b_dy * b_act
    b_dgate = b_dy * b_up * b_slope
    tl.store(dup_ptr + o_n * F + o_f, b_dup, mask=mask)
    tl.store(dgate_ptr + o_n * F + o_f, b_dgate, mask=mask)


def _launch_tiles(kernel, outs, tensors, activation: str) -> None:
    """Launches a kernel over tiles of at most 1,024 elements of [N, F]."""
    if all(x.is_contiguous() for x in tensors):
        rows = [x.view(1, -1) for x in tensors]
    else:
        rows = [rows_view(x) for x in tensors]
    N, F = rows[0].shape
    block_f = min(1024, triton.next_power_of_2(F))
    block_n = max(1, min(1024 // block_f, triton.next_power_of_2(N)))
    n_blocks_f = triton.cdiv(F, block_f)
    strides = [x.stride(0) for x in rows]
    args = *rows, *outs, N, F, n_blocks_f, *strides
    constexprs = dict(ACTIVATION=activation, BLOCK_N=block_n, BLOCK_F=block_f)
    launch(kernel, (triton.cdiv(N, block_n) * n_blocks_f,), args, constexprs, num_warps=4)


def swiglu_fwd(y, gate, up, activation) -> None:
    """Launches the forward. Result and arguments as `hfpatch::swiglu`."""
    _launch_tiles(swiglu_fwd_kernel, [y], [gate, up], activation)


def swiglu_bwd(outs, dy, gate, up, activation) -> None:
    """Launches the backward. Results and arguments as `hfpatch::swiglu_bwd`."""
    _launch_tiles(swiglu_bwd_kernel, outs, [dy, gate, up], activation)
