"""Cross-entropy over a chunk of logits, in place. One program per row loops over blocks of columns.

ops/_linear_ce_chunk.py launches `cross_entropy_fwd` and `cross_entropy_bwd`, by their names
(`define` in ops/_library.py).

Legend: N rows, V vocabulary; S the row stride of the logits, in elements (the buffer may be padded
past V).

The forward reads a row twice: first for the maximum and the sum (online softmax), then to replace
the row by its gradient. HBM sees one read and one write if the rows in flight stay in L2 in
between. So long rows (256 KiB each at V = 128,256 in bf16) run one program per SM. The registers of
its 1,024 threads leave no room for a second program, and it loads the next blocks while it computes
(`forward_config`; figures in profiles/kernels/).

Row offsets are int64. All arithmetic is float32; logits are upcast right after the load. A logit x
becomes z = outer * u with u = tanh(inner * x), or u = x without SOFTCAP. The outputs of a row are
defined in ops/_linear_ce_chunk.py. The kernel subtracts the u of two logits first, which is exact
near the largest, and then multiplies by outer.
"""

import triton
import triton.language as tl
from torch import Tensor

from hfpatch.kernels._launch import _load, launch

MAX_BLOCK = 8192
LONG_ROW = 96 << 10  # bytes


@triton.jit
def _tanh(x):
    # The interpreter lacks libdevice's tanh. Far from 0, exp of a negative number cannot overflow.
    # Near 0, where 1 - e loses digits, a polynomial is used. Both err by at most 1.1e-7, torch's
    # tanh by 0.6e-7. The sign is copied as a bit, because a condition takes two of an AMD GPU's
    # scalar registers per element.
    a = tl.abs(x)
    near = tl.minimum(a, 0.625)
    s = near * near
    p = (-5.70497836e-3 * s + 2.063907873e-2) * s - 5.373971215e-2
    p = (p * s + 1.333144216e-1) * s - 3.333328194e-1
    e = tl.exp(-2.0 * a)
    t = 1.0 - 2.0 * e / (1.0 + e)
    t = tl.where(a < 0.625, near + near * (s * p), t)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (t.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _tanh_slope(x):
    # 1 - tanh(x)^2 without the cancellation where tanh is near 1.
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _finite(x):
    # A word excluded by a logit of -inf has probability 0, and 0 * -inf would be NaN. tl.maximum
    # would hide a NaN, so a condition is used.
    return tl.where(x < -1e4, -1e4, x)


@triton.jit
def _u(b_x, inner, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        return _tanh(inner * b_x)
    else:
        return b_x


@triton.jit
def _write_zeros(p_row, V, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        tl.store(p_row + o_x, 0.0, mask=o_x < V)


@triton.jit
def _write_gradient(
    p_row,  # the logits of one row, V of them
    V,
    label,
    top,
    p_scale,
    y_scale,
    u_scale,
    entropy,
    h_scale,
    s_scale,
    inner,
    outer,
    UNIFORM: tl.constexpr,
    STATS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        o_x = start + tl.arange(0, BLOCK)
        m_v = o_x < V
        b_x = _load(p_row + o_x, m_v)
        b_below = outer * (_u(b_x, inner, SOFTCAP) - top)
        b_e = tl.exp(b_below)
        b_d = p_scale * b_e
        if STATS:
            b_log = _finite(b_below) + entropy
            b_d = b_e * (p_scale + h_scale * b_log + s_scale * b_e)
        b_d -= tl.where(o_x == label, y_scale, 0.0)
        if UNIFORM:
            b_d -= u_scale
        b_d *= outer
        if SOFTCAP:
            b_d *= inner * _tanh_slope(inner * b_x)
        tl.store(p_row + o_x, b_d, mask=m_v)


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient where GRAD
    labels_ptr,  # (N,)
    scale_ptr,  # (), float32: the factor of each token's loss in the total
    outs_ptr,  # (K, N) float32, row stride stride_outs: outs_KC of ops/_linear_ce_chunk.py
    S,
    V,
    stride_outs,
    ignore_index,
    inner,
    outer,
    smoothing,
    z_loss,
    K: tl.constexpr,
    BEST: tl.constexpr,
    GRAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    STATS: tl.constexpr = K > 4
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * S
    p_out = outs_ptr + i_n
    label = tl.load(labels_ptr + i_n)
    o_v = tl.arange(0, BLOCK)
    # [Step 1] A row whose label is ignored has zeros as outputs and as gradient.
    if label == ignore_index:
        for k in tl.static_range(K):
            tl.store(p_out + k * stride_outs, 0.0)
        if GRAD:
            _write_zeros(p_row, V, BLOCK)
    else:
        # [Step 2] Read the label's logit. The op asserts that labels are valid, but this kernel
        # runs before the assertion stops the program. An invalid label must not read outside the
        # row.
        safe = tl.minimum(tl.maximum(label, 0), V - 1)
        target = _u(tl.load(p_row + safe).to(tl.float32), inner, SOFTCAP)

        # [Step 3] Read the row once, for its largest u and the sums relative to it. Where a block
        # has a larger u, `fade` scales the sums of the earlier blocks (online softmax).
        top = -float("inf")
        total = 0.0
        u_sum = 0.0
        best = 0
        slack = 0.0  # sum of exp(z - outer top) (z - outer top)
        square = 0.0  # sum of exp(z - outer top)^2
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            m_v = start + o_v < V
            b_x = tl.load(p_row + start + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
            b_u = _u(b_x, inner, SOFTCAP)
            if SOFTCAP:
                b_u = tl.where(m_v, b_u, -float("inf"))
            if BEST:
                b_top, b_best = tl.max(
                    b_u, axis=0, return_indices=True, return_indices_tie_break_left=True
                )
                best = tl.where(b_top > top, start + b_best, best)
            else:
                b_top = tl.max(b_u, axis=0)
            new_top = tl.maximum(top, b_top)
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
            fade = tl.exp(outer * (top - shift))
            b_below = outer * (b_u - shift)
            b_e = tl.exp(b_below)
            if STATS:
                # The logarithms in slack are relative to the largest u too: each changes by
                # `lower`.
                lower = tl.where(top == -float("inf"), 0.0, outer * (top - shift))
                slack = fade * (slack + total * lower)
                slack += tl.sum(b_e * _finite(b_below), axis=0)
                square = fade * fade * square + tl.sum(b_e * b_e, axis=0)
            total = total * fade + tl.sum(b_e, axis=0)
            top = new_top
            if SMOOTHING or STATS:
                u_sum += tl.sum(tl.where(m_v, b_u, 0.0), axis=0)

        # [Step 4] Write the outputs of the row.
        log_total = tl.log(total)
        lse = outer * top + log_total
        loss = (1.0 - smoothing) * (outer * (top - target) + log_total) + z_loss * lse * lse
        if SMOOTHING:
            loss += smoothing / V * (V * lse - outer * u_sum)
        tl.store(p_out, loss)
        tl.store(p_out + stride_outs, top)
        tl.store(p_out + 2 * stride_outs, log_total)
        if STATS:
            tl.store(p_out + 3 * stride_outs, log_total - slack / total)
            tl.store(p_out + 4 * stride_outs, outer * u_sum / V)
            tl.store(p_out + 5 * stride_outs, square / (total * total))
        if BEST:
            tl.store(p_out + (K - 1) * stride_outs, best.to(tl.float32))

        if GRAD:
            # [Step 5] Read the row again, and write the gradient of the loss in its place.
            scale = tl.load(scale_ptr)
            y_scale = scale * (1.0 - smoothing)
            p_scale = y_scale + scale * 2.0 * z_loss * lse
            if SMOOTHING:
                p_scale += scale * smoothing
            p_scale /= total
            u_scale = scale * smoothing / V
            _write_gradient(
                p_row, V, label, top, p_scale, y_scale, u_scale, 0.0, 0.0, 0.0, inner, outer,
                SMOOTHING, False, SOFTCAP, BLOCK, STAGES,
            )  # fmt: skip


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient
    labels_ptr,  # (N,)
    factors_ptr,  # (K, N) float32, row stride F: factors_KC of ops/_linear_ce_chunk.py
    S,
    V,
    F,
    ignore_index,
    inner,
    outer,
    K: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * S
    p_factor = factors_ptr + i_n
    label = tl.load(labels_ptr + i_n)
    if label == ignore_index:
        _write_zeros(p_row, V, BLOCK)
    else:
        top = tl.load(p_factor)
        p_scale = tl.load(p_factor + F)
        y_scale = tl.load(p_factor + 2 * F)
        u_scale = tl.load(p_factor + 3 * F) if K > 3 else 0.0
        entropy = tl.load(p_factor + 4 * F) if K > 4 else 0.0
        h_scale = tl.load(p_factor + 5 * F) if K > 4 else 0.0
        s_scale = tl.load(p_factor + 6 * F) if K > 4 else 0.0
        _write_gradient(
            p_row, V, label, top, p_scale, y_scale, u_scale, entropy, h_scale, s_scale,
            inner, outer, K > 3, K > 4, SOFTCAP, BLOCK, 1,
        )  # fmt: skip


def block_and_warps(vocab_size: int, logits_only: bool = True) -> tuple[int, int]:
    """(block, num_warps) for rows of vocab_size. The block is a power of two of at least 128, with
    16 elements a thread at full size.

    If the loop holds more than the logits, a thread gets half as many elements, because
    registers would spill.
    """
    block = max(128, triton.next_power_of_2(vocab_size))
    if logits_only:
        block = min(MAX_BLOCK, block)
        num_warps = block // 512
    else:
        block = min(MAX_BLOCK // 4, block)
        num_warps = block // 256
    return block, max(1, min(16, num_warps))


def forward_config(
    row_bytes: int, itemsize: int, *, grad: bool, logits_only: bool, bare: bool
) -> tuple[int, int, int]:
    """(block, num_warps, stages) of the forward for rows of row_bytes.

    Small blocks suffice for rows of up to 96 KiB, which fit L2 with three programs per SM, and
    without a gradient, where no row is read twice. bare: no soft cap and no smoothing.
    """
    if not grad or not logits_only or row_bytes <= LONG_ROW:
        return *block_and_warps(row_bytes // itemsize, logits_only), 1
    # Blocks of 16 KiB. One block is in registers; the other stages - 1 are loading into shared
    # memory.
    return 16384 // itemsize, 32, 4 if bare else 3


def cross_entropy_fwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    outs_KN: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
    scale: Tensor,
    smoothing: float,
    z_loss: float,
    best: bool,
    grad: bool,
) -> None:
    """Launches the forward. Arguments as `hfpatch::cross_entropy_chunk_`."""
    N, V = logits_NV.shape
    K = len(outs_KN)
    itemsize = logits_NV.element_size()
    block, num_warps, stages = forward_config(
        V * itemsize, itemsize, grad=grad, logits_only=K <= 4, bare=not inner and not smoothing
    )
    args = (
        logits_NV, labels_N, scale, outs_KN, logits_NV.stride(0), V, outs_KN.stride(0),
        ignore_index, inner, outer, smoothing, z_loss,
    )  # fmt: skip
    constexprs = dict(
        K=K, BEST=best, GRAD=grad, SOFTCAP=inner != 0.0, SMOOTHING=smoothing != 0.0,
        BLOCK=block, STAGES=stages,
    )  # fmt: skip
    launch(cross_entropy_fwd_kernel, (N,), args, constexprs, num_warps=num_warps)


def cross_entropy_bwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    factors_KN: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
) -> None:
    """Launches the backward. Arguments as `hfpatch::cross_entropy_chunk_bwd_`."""
    N, V = logits_NV.shape
    block, num_warps = block_and_warps(V)
    args = (
        logits_NV, labels_N, factors_KN, logits_NV.stride(0), V, factors_KN.stride(0),
        ignore_index, inner, outer,
    )  # fmt: skip
    constexprs = dict(K=len(factors_KN), SOFTCAP=inner != 0.0, BLOCK=block)
    launch(cross_entropy_bwd_kernel, (N,), args, constexprs, num_warps=num_warps)
