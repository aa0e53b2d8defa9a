"""Cross-entropy over a chunk of logits, in place: one program per row, any vocabulary by looping over blocks.

Legend: N rows, V vocabulary; S the row stride of the logits, in elements (the buffer may be padded past V).
The forward reads a row twice, once for the maximum and the sum (online softmax), once to turn it into its gradient; the
rows in flight (one per program, 256 KiB each at V = 128,256 in bf16) stay in L2 between the two, so HBM sees one read
and one write. Row offsets are int64. All arithmetic is float32; logits are upcast right after the load.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfpatch.kernels._launch import cdiv, launch, next_power_of_2

MAX_BLOCK = 8192
SCALE_BLOCK = 4096


@triton.jit
def _tanh(x):
    # From exp of a non-positive number: it cannot overflow, and needs no libdevice (absent under the interpreter).
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _tanh_slope(x):
    # 1 - tanh(x)^2 without the cancellation where tanh is near 1.
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient where GRAD
    labels_ptr,  # (N,)
    scale_ptr,  # (), float32: what each token's loss is multiplied by on its way into the total
    loss_ptr,  # (N,)
    lse_ptr,  # (N,)
    correct_ptr,  # (N,) bool, touched only where ACCURACY
    S,
    V,
    ignore_index,
    smoothing,
    softcap,
    z_loss,
    GRAD: tl.constexpr,
    ACCURACY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * S
    label = tl.load(labels_ptr + i_n)
    o_v = tl.arange(0, BLOCK)

    if label == ignore_index:
        tl.store(loss_ptr + i_n, 0.0)
        tl.store(lse_ptr + i_n, 0.0)
        if ACCURACY:
            tl.store(correct_ptr + i_n, 0)
        if GRAD:
            for start in range(0, V, BLOCK):
                b_zero = tl.zeros([BLOCK], dtype=tl.float32).to(logits_ptr.dtype.element_ty)
                tl.store(p_row + start + o_v, b_zero, mask=start + o_v < V)
    else:
        # A label outside the vocabulary has tripped the assertion of the op; it must not read outside memory as well.
        safe = tl.minimum(tl.maximum(label, 0), V - 1)
        target = tl.load(p_row + safe).to(tl.float32)
        if SOFTCAP:
            target = softcap * _tanh(target / softcap)

        top = -float("inf")
        total = 0.0
        z_sum = 0.0
        best = 0
        for start in range(0, V, BLOCK):
            m_v = start + o_v < V
            b_z = tl.load(p_row + start + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
            if SOFTCAP:
                b_z = tl.where(m_v, softcap * _tanh(b_z / softcap), -float("inf"))
            if ACCURACY:
                b_top, b_best = tl.max(b_z, axis=0, return_indices=True, return_indices_tie_break_left=True)
                best = tl.where(b_top > top, start + b_best, best)
            else:
                b_top = tl.max(b_z, axis=0)
            new_top = tl.maximum(top, b_top)
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(b_z - shift), axis=0)
            top = new_top
            if SMOOTHING:
                z_sum += tl.sum(tl.where(m_v, b_z, 0.0), axis=0)

        lse = top + tl.log(total)
        loss = lse - (1.0 - smoothing) * target + z_loss * lse * lse
        if SMOOTHING:
            loss -= smoothing / V * z_sum
        tl.store(loss_ptr + i_n, loss)
        tl.store(lse_ptr + i_n, lse)
        if ACCURACY:
            tl.store(correct_ptr + i_n, (best == label).to(tl.int8))

        if GRAD:
            scale = tl.load(scale_ptr)
            p_scale = scale * (1.0 + 2.0 * z_loss * lse)
            for start in range(0, V, BLOCK):
                m_v = start + o_v < V
                b_z = tl.load(p_row + start + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
                if SOFTCAP:
                    b_x = tl.where(m_v, b_z, 0.0) / softcap
                    b_d = p_scale * tl.exp(softcap * _tanh(b_x) - lse)
                else:
                    b_d = p_scale * tl.exp(b_z - lse)
                b_d -= scale * (smoothing / V)
                b_d -= tl.where(start + o_v == label, scale * (1.0 - smoothing), 0.0)
                if SOFTCAP:
                    b_d *= _tanh_slope(b_x)
                tl.store(p_row + start + o_v, b_d.to(logits_ptr.dtype.element_ty), mask=m_v)


@triton.jit
def cross_entropy_bwd_kernel(
    logits_ptr,  # (N, V), row stride S; becomes the gradient
    labels_ptr,  # (N,)
    lse_ptr,  # (N,)
    p_scale_ptr,  # (N,) float32: the factor of the softmax
    y_scale_ptr,  # (N,) float32: the factor of the (smoothed) one-hot label
    S,
    V,
    ignore_index,
    smoothing,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + i_n * S
    label = tl.load(labels_ptr + i_n)
    o_v = tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + i_n)
    p_scale = tl.load(p_scale_ptr + i_n)
    y_scale = tl.load(y_scale_ptr + i_n)
    keep = label != ignore_index
    for start in range(0, V, BLOCK):
        m_v = start + o_v < V
        b_z = tl.load(p_row + start + o_v, mask=m_v, other=0.0).to(tl.float32)
        if SOFTCAP:
            b_x = b_z / softcap
            b_d = p_scale * tl.exp(softcap * _tanh(b_x) - lse)
        else:
            b_d = p_scale * tl.exp(b_z - lse)
        b_d -= y_scale * (smoothing / V)
        b_d -= tl.where(start + o_v == label, y_scale * (1.0 - smoothing), 0.0)
        if SOFTCAP:
            b_d *= _tanh_slope(b_x)
        b_d = tl.where(keep, b_d, 0.0)
        tl.store(p_row + start + o_v, b_d.to(logits_ptr.dtype.element_ty), mask=m_v)


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
        b_x = tl.load(x_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(x_ptr + o_n, (b_x * factor).to(x_ptr.dtype.element_ty), mask=m_n)


def block_and_warps(vocab_size: int) -> tuple[int, int]:
    """(block, num_warps) for rows of vocab_size: 16 elements a thread at full size, a power of two, never below 128."""
    block = min(MAX_BLOCK, max(128, next_power_of_2(vocab_size)))
    return block, max(1, min(16, block // 512))


def cross_entropy_fwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    loss_N: Tensor,
    lse_N: Tensor,
    correct_N: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    grad: bool,
) -> None:
    """Launch of the forward; the arguments are those of `hfpatch::cross_entropy_chunk_` (softcap 0 means none)."""
    rows, vocab_size = logits_NV.shape
    if rows == 0:
        return
    correct = loss_N if correct_N is None else correct_N.view(torch.int8)
    block, warps = block_and_warps(vocab_size)
    options = {
        "GRAD": grad,
        "ACCURACY": correct_N is not None,
        "SOFTCAP": softcap != 0.0,
        "SMOOTHING": smoothing != 0.0,
    }
    args = (logits_NV, labels_N, scale, loss_N, lse_N, correct, logits_NV.stride(0), vocab_size)
    args += (ignore_index, smoothing, softcap, z_loss)
    launch(cross_entropy_fwd_kernel, (rows,), args, {**options, "BLOCK": block}, num_warps=warps)


def cross_entropy_bwd(
    logits_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    p_scale_N: Tensor,
    y_scale_N: Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float,
) -> None:
    """Launch of the backward; the arguments are those of `hfpatch::cross_entropy_chunk_bwd_`."""
    rows, vocab_size = logits_NV.shape
    if rows == 0:
        return
    block, warps = block_and_warps(vocab_size)
    args = (logits_NV, labels_N, lse_N, p_scale_N, y_scale_N, logits_NV.stride(0), vocab_size)
    args += (ignore_index, smoothing, softcap)
    launch(cross_entropy_bwd_kernel, (rows,), args, {"SOFTCAP": softcap != 0.0, "BLOCK": block}, num_warps=warps)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place; x contiguous, factor a float32 scalar on the device. Reads nothing of x where it is 1."""
    if x.numel():
        args = (x, factor, x.numel())
        launch(scale_kernel, (cdiv(x.numel(), SCALE_BLOCK),), args, {"BLOCK": SCALE_BLOCK}, num_warps=8)
