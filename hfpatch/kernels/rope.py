"""Triton kernel of RoPE: queries and keys in one launch, in any memory layout. ops/rope.py launches
`rope`, forward and (transposed) backward.

B batch, T tokens, H query heads, K key heads, E head dim. A program takes BLOCK_T tokens of one
sequence, loads their cos and sin once and rotates every head of q, then of k. Each pair (x1, x2) is
read before it is written.
"""

import triton
import triton.language as tl

from hfpatch.kernels._launch import _load, launch


@triton.jit
def _rotate_heads(
    p_in,  # of the first head
    p_out,
    stride_in,
    stride_out,
    m_te,
    b_cos1,
    b_cos2,
    b_sin1,
    b_sin2,
    n_heads,
    HALF: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    for i_h in range(0, n_heads, BLOCK_H):
        o_h = (i_h + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :, None]
        mask = m_te & (o_h < n_heads)
        p_x = p_in + o_h * stride_in
        p_y = p_out + o_h * stride_out
        b_x1 = _load(p_x, mask)
        b_x2 = _load(p_x + HALF, mask)
        if TRANSPOSE:
            b_y1 = b_x1 * b_cos1 + b_x2 * b_sin2
            b_y2 = b_x2 * b_cos2 - b_x1 * b_sin1
        else:
            b_y1 = b_x1 * b_cos1 - b_x2 * b_sin1
            b_y2 = b_x2 * b_cos2 + b_x1 * b_sin2
        tl.store(p_y, b_y1, mask=mask)
        tl.store(p_y + HALF, b_y2, mask=mask)


@triton.jit
def rope_kernel(
    q_ptr,  # (B, H, T, E), any strides but a unit last one
    k_ptr,  # (B, K, T, E)
    q_out_ptr,  # (B, H, T, E)
    k_out_ptr,  # (B, K, T, E)
    cos_ptr,  # (1 or B, T, E)
    sin_ptr,  # (1 or B, T, E)
    T,
    n_blocks_t,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_qob,
    stride_qoh,
    stride_qot,
    stride_kob,
    stride_koh,
    stride_kot,
    stride_cb,  # 0 where all sequences share cos and sin
    H,
    K,
    HALF: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_b = i // n_blocks_t
    o_t = i % n_blocks_t * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    o_e = tl.arange(0, BLOCK_E)[None, None, :]
    mask = (o_t < T) & (o_e < HALF)
    o_cos = i_b * stride_cb + o_t * (2 * HALF) + o_e
    p_cos = cos_ptr + o_cos
    p_sin = sin_ptr + o_cos
    b_cos1 = _load(p_cos, mask)
    b_cos2 = _load(p_cos + HALF, mask)
    b_sin1 = _load(p_sin, mask)
    b_sin2 = _load(p_sin + HALF, mask)
    p_q = q_ptr + (i_b * stride_qb + o_t * stride_qt + o_e)
    p_qo = q_out_ptr + (i_b * stride_qob + o_t * stride_qot + o_e)
    _rotate_heads(
        p_q, p_qo, stride_qh, stride_qoh, mask, b_cos1, b_cos2, b_sin1, b_sin2, H,
        HALF, TRANSPOSE, BLOCK_H,
    )  # fmt: skip
    p_k = k_ptr + (i_b * stride_kb + o_t * stride_kt + o_e)
    p_ko = k_out_ptr + (i_b * stride_kob + o_t * stride_kot + o_e)
    _rotate_heads(
        p_k, p_ko, stride_kh, stride_koh, mask, b_cos1, b_cos2, b_sin1, b_sin2, K,
        HALF, TRANSPOSE, BLOCK_K,
    )  # fmt: skip


def _blocks(q, k, half: int) -> dict:
    """How many tokens and heads a program takes: about 2048 pairs in all.

    It takes several heads where heads are adjacent in memory, else several tokens.
    """
    block_e = triton.next_power_of_2(half)
    pairs = max(1, 2048 // block_e)
    _, H, T, _ = q.shape
    if q.stride(1) < q.stride(2) or T == 1:
        block_h = min(pairs, triton.next_power_of_2(max(H, k.shape[1])))
        block_t = min(max(1, pairs // block_h), triton.next_power_of_2(T))
    else:
        block_t = min(pairs, triton.next_power_of_2(T), 32)
        block_h = min(max(1, pairs // block_t), triton.next_power_of_2(H))
    block_k = min(block_h, triton.next_power_of_2(k.shape[1]))
    return dict(BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_E=block_e)


def rope(outs, q, k, cos, sin, transpose, dtype) -> None:
    """Launches the kernel. Results and arguments as `hfpatch::rope`."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    B, H, T, E = q.shape
    blocks = _blocks(q, k, E // 2)
    n_blocks_t = triton.cdiv(T, blocks["BLOCK_T"])
    strides = [s for x in (q, k, *outs) for s in x.stride()[:3]]
    strides.append(T * E if cos.shape[0] > 1 else 0)
    args = q, k, *outs, cos.contiguous(), sin.contiguous(), T, n_blocks_t, *strides, H, k.shape[1]
    constexprs = dict(HALF=E // 2, TRANSPOSE=transpose, **blocks)
    launch(rope_kernel, (B * n_blocks_t,), args, constexprs, num_warps=4)
