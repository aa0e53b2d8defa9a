"""Cross-entropy over a chunk of logits, in place. One program per row loops over blocks of columns.

ops/_linear_ce_chunk.py launches `cross_entropy_fwd` and `cross_entropy_bwd`, by their names
(`by_device` in ops/_library.py).

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

from hfpatch.kernels._launch import launch

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
def cross_entropy_fwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient where GRAD
    labels_ptr,  # (N,)
    scale_ptr,  # (), float32: the factor of each token's loss in the total
    loss_ptr,  # (N,)
    lse_ptr,  # (2, N), row stride stride_lse: the largest u, log of the sum of exp(z - largest z)
    best_ptr,  # (N,) int32, the first largest logit; or None
    stats_ptr,  # (3, N), row stride stride_stats: entropy, mean z, sum of squared p; or None
    S,
    V,
    stride_lse,
    stride_stats,
    ignore_index,
    smoothing,
    inner,
    outer,
    z_loss,
    GRAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * S
    label = tl.load(labels_ptr + i_n)
    o_v = tl.arange(0, BLOCK)

    if label == ignore_index:
        tl.store(loss_ptr + i_n, 0.0)
        tl.store(lse_ptr + i_n, 0.0)
        tl.store(lse_ptr + stride_lse + i_n, 0.0)
        if best_ptr is not None:
            tl.store(best_ptr + i_n, -1)
        if stats_ptr is not None:
            for k in tl.static_range(3):
                tl.store(stats_ptr + k * stride_stats + i_n, 0.0)
        if GRAD:
            for start in range(0, V, BLOCK):
                b_zero = tl.zeros([BLOCK], dtype=tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(p_row + start + o_v, b_zero, mask=start + o_v < V)
    else:
        # The op asserts that labels are valid, but this kernel runs before the assertion stops the
        # program. An invalid label must not read outside the row.
        safe = tl.minimum(tl.maximum(label, 0), V - 1)
        target = _u(tl.load(p_row + safe).to(tl.float32), inner, SOFTCAP)

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
            if best_ptr is not None:
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
            if stats_ptr is not None:
                slack = fade * (
                    slack + total * tl.where(top == -float("inf"), 0.0, outer * (top - shift))
                )
                slack += tl.sum(b_e * _finite(b_below), axis=0)
                square = fade * fade * square + tl.sum(b_e * b_e, axis=0)
            total = total * fade + tl.sum(b_e, axis=0)
            top = new_top
            if SMOOTHING or stats_ptr is not None:
                u_sum += tl.sum(tl.where(m_v, b_u, 0.0), axis=0)

        log_total = tl.log(total)
        lse = outer * top + log_total
        loss = (1.0 - smoothing) * (outer * (top - target) + log_total) + z_loss * lse * lse
        if SMOOTHING:
            loss += smoothing / V * (V * lse - outer * u_sum)
        tl.store(loss_ptr + i_n, loss)
        tl.store(lse_ptr + i_n, top)
        tl.store(lse_ptr + stride_lse + i_n, log_total)
        if best_ptr is not None:
            tl.store(best_ptr + i_n, best)
        if stats_ptr is not None:
            tl.store(stats_ptr + i_n, log_total - slack / total)
            tl.store(stats_ptr + stride_stats + i_n, outer * u_sum / V)
            tl.store(stats_ptr + 2 * stride_stats + i_n, square / (total * total))

        if GRAD:
            scale = tl.load(scale_ptr)
            y_scale = scale * (1.0 - smoothing)
            p_scale = y_scale + scale * 2.0 * z_loss * lse
            if SMOOTHING:
                p_scale += scale * smoothing
            p_scale /= total
            for start in tl.range(0, V, BLOCK, num_stages=STAGES):
                m_v = start + o_v < V
                b_x = tl.load(p_row + start + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_d = p_scale * tl.exp(outer * (_u(b_x, inner, SOFTCAP) - top))
                b_d -= tl.where(start + o_v == label, y_scale, 0.0)
                if SMOOTHING:
                    b_d -= scale * smoothing / V
                b_d *= outer
                if SOFTCAP:
                    b_d *= inner * _tanh_slope(inner * b_x)
                tl.store(p_row + start + o_v, b_d.to(logits_ptr.dtype.element_ty), mask=m_v)


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient
    labels_ptr,  # (N,)
    rows_ptr,  # (K, N) float32, row stride stride_rows: the largest u, factors of the gradient
    S,
    V,
    stride_rows,
    ignore_index,
    inner,
    outer,
    UNIFORM: tl.constexpr,
    STATS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row, p_factor = logits_ptr + i_n * S, rows_ptr + i_n
    label = tl.load(labels_ptr + i_n)
    o_v = tl.arange(0, BLOCK)
    keep = label != ignore_index
    top = tl.where(
        keep, tl.load(p_factor), float("inf")
    )  # gives probabilities of 0, so nothing overflows
    p_scale = tl.load(p_factor + stride_rows)
    y_scale = tl.load(p_factor + 2 * stride_rows)
    if UNIFORM:
        u_scale = tl.load(p_factor + 3 * stride_rows)
    if STATS:
        entropy = tl.load(p_factor + 4 * stride_rows)
        h_scale = tl.load(p_factor + 5 * stride_rows)
        s_scale = tl.load(p_factor + 6 * stride_rows)
    for start in range(0, V, BLOCK):
        m_v = start + o_v < V
        b_x = tl.load(p_row + start + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_below = outer * (_u(b_x, inner, SOFTCAP) - top)
        b_e = tl.exp(b_below)
        if STATS:
            b_d = b_e * (p_scale + h_scale * (_finite(b_below) + entropy) + s_scale * b_e)
        else:
            b_d = p_scale * b_e
        b_d -= tl.where(start + o_v == label, y_scale, 0.0)
        if UNIFORM:
            b_d -= u_scale
        b_d *= outer
        if SOFTCAP:
            b_d *= inner * _tanh_slope(inner * b_x)
        b_d = tl.where(keep, b_d, 0.0)
        tl.store(p_row + start + o_v, b_d.to(logits_ptr.dtype.element_ty), mask=m_v)


def block_and_warps(vocab_size: int, plain: bool = True) -> tuple[int, int]:
    """(block, num_warps) for rows of vocab_size. The block is a power of two of at least 128, with
    16 elements a thread at full size.

    If the loop holds more than the logits (not plain), a thread gets half as many elements, because
    registers would spill.
    """
    block = min(
        MAX_BLOCK if plain else MAX_BLOCK // 4, max(128, triton.next_power_of_2(vocab_size))
    )
    return block, max(1, min(16, block // (512 if plain else 256)))


def forward_config(
    row_bytes: int, itemsize: int, *, grad: bool, plain: bool, bare: bool
) -> tuple[int, int, int]:
    """(block, num_warps, stages) of the forward for rows of row_bytes.

    Small blocks suffice for rows of up to 96 KiB, which fit L2 with three programs per SM, and
    without a gradient, where no row is read twice. bare: no soft cap and no smoothing.
    """
    if not grad or not plain or row_bytes <= LONG_ROW:
        return *block_and_warps(row_bytes // itemsize, plain), 1
    # Blocks of 16 KiB. One block is in registers; the other stages - 1 are loading into shared
    # memory.
    return 16384 // itemsize, 32, 4 if bare else 3


def cross_entropy_fwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    loss_N: Tensor,
    lse_2N: Tensor,
    best_N: Tensor | None,
    stats_3N: Tensor | None,
    ignore_index: int,
    smoothing: float,
    inner: float,
    outer: float,
    z_loss: float,
    grad: bool,
) -> None:
    """Launches the forward. Arguments as `hfpatch::cross_entropy_chunk_`."""
    rows, vocab_size = logits_NV.shape
    itemsize = logits_NV.element_size()
    block, warps, stages = forward_config(
        vocab_size * itemsize, itemsize, grad=grad, plain=stats_3N is None,
        bare=not inner and not smoothing,
    )  # fmt: skip
    stride_stats = 0 if stats_3N is None else stats_3N.stride(0)
    args = logits_NV, labels_N, scale, loss_N, lse_2N, best_N, stats_3N
    args += logits_NV.stride(0), vocab_size, lse_2N.stride(0), stride_stats
    args += ignore_index, smoothing, inner, outer, z_loss
    constexprs = dict(
        GRAD=grad, SOFTCAP=inner != 0.0, SMOOTHING=smoothing != 0.0, BLOCK=block, STAGES=stages
    )
    launch(cross_entropy_fwd_kernel, (rows,), args, constexprs, num_warps=warps)


def cross_entropy_bwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    rows_KN: Tensor,
    ignore_index: int,
    inner: float,
    outer: float,
) -> None:
    """Launches the backward. Arguments as `hfpatch::cross_entropy_chunk_bwd_`."""
    rows, vocab_size = logits_NV.shape
    block, warps = block_and_warps(vocab_size)
    args = logits_NV, labels_N, rows_KN, logits_NV.stride(0), vocab_size, rows_KN.stride(0)
    args += ignore_index, inner, outer
    K = len(rows_KN)
    constexprs = dict(UNIFORM=K > 3, STATS=K > 4, SOFTCAP=inner != 0.0, BLOCK=block)
    launch(cross_entropy_bwd_kernel, (rows,), args, constexprs, num_warps=warps)
