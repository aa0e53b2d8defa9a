"""Triton kernels of a mixture of experts: the activation and the combination of rows around the
grouped matmuls, and the sum of weight gradients over tiles. ops/experts.py launches them by their
names (`define` in ops/_library.py).

S routed rows sorted by expert, N tokens, K experts a token, E experts, D hidden, F intermediate.
"""

import torch
import triton
import triton.language as tl

from hfpatch.kernels._launch import _load, launch
from hfpatch.kernels.swiglu import _act_and_slope, _sigmoids


@triton.jit
def _load_gate_up(p_gate, m, F, INTERLEAVED: tl.constexpr):
    b_gate = _load(p_gate, m)
    if INTERLEAVED:
        b_pairs = tl.reshape(b_gate, (m.shape[0], m.shape[1] // 2, 2))
        return tl.split(b_pairs)
    else:
        return b_gate, _load(p_gate + F, m)


@triton.jit
def _gate_up(
    gu_ptr, bias_ptr, ids_ptr, o_s, m_s, first, E, F, INTERLEAVED: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """gate and up of BLOCK_F pairs of rows of 2F in float32, with the bias of each row's expert; the
    columns of gate (up's are F further) and their mask.

    Interleaved, the columns are one range of 2 BLOCK_F, so that a thread loads 16 bytes at a time;
    each of two ranges of every second column would take 2 bytes at a time.
    """
    EACH: tl.constexpr = 1 + INTERLEAVED
    o_gate = EACH * first + tl.arange(0, EACH * BLOCK_F)[None, :]
    m = m_s & (o_gate < EACH * F)
    b_gate, b_up = _load_gate_up(gu_ptr + o_s * (2 * F) + o_gate, m, F, INTERLEAVED)
    if bias_ptr is not None:
        # Rows of another rank's experts come after all others. Their bias does not matter.
        i_e = tl.minimum(tl.load(ids_ptr + o_s, mask=m_s, other=0), E - 1)
        p_bias = bias_ptr + i_e * (2 * F) + o_gate
        b_bias_gate, b_bias_up = _load_gate_up(p_bias, m, F, INTERLEAVED)
        b_gate += b_bias_gate
        b_up += b_bias_up
    return b_gate, b_up, o_gate, m


@triton.jit
def _acted(b_gate, b_up, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation, and its derivatives with respect to gate and up."""
    if ACTIVATION == "clamped":
        b_low = tl.minimum(b_gate, limit)
        b_mid = tl.minimum(tl.maximum(b_up, -limit), limit) + 1.0
        s, r = _sigmoids(alpha * b_low)
        b_slope = b_mid * s * (1.0 + alpha * b_low * r)
        b_dgate = tl.where(b_gate <= limit, b_slope, 0.0)
        b_dup = tl.where(tl.abs(b_up) <= limit, b_low * s, 0.0)
        return b_mid * b_low * s, b_dgate, b_dup
    else:
        b_act, b_slope = _act_and_slope(b_gate, ACTIVATION)
        return b_act * b_up, b_up * b_slope, b_act


@triton.jit
def expert_act_kernel(
    gu_ptr,  # (S, 2F)
    w_ptr,  # (S,)
    bias_ptr,  # (E, 2F), or None
    ids_ptr,  # (S,)
    a_ptr,  # (S, F)
    S,
    E,
    F,
    n_blocks_f,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    first = i % n_blocks_f * BLOCK_F
    o_s = i // n_blocks_f * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    o_f = first + tl.arange(0, BLOCK_F)[None, :]
    m_s = o_s < S
    m = m_s & (o_f < F)
    b_gate, b_up, _, _ = _gate_up(
        gu_ptr, bias_ptr, ids_ptr, o_s, m_s, first, E, F, INTERLEAVED, BLOCK_F
    )
    b_w = _load(w_ptr + o_s, m_s)
    b_act, _, _ = _acted(b_gate, b_up, alpha, limit, ACTIVATION)
    tl.store(a_ptr + o_s * F + o_f, b_act * b_w, mask=m)


@triton.jit
def expert_act_bwd_kernel(
    da_ptr,  # (S, F)
    gu_ptr,  # (S, 2F)
    w_ptr,  # (S,)
    bias_ptr,  # (E, 2F), or None
    ids_ptr,  # (S,)
    dgu_ptr,  # (S, 2F)
    a_ptr,  # (S, F), or None
    dw_ptr,  # (S,)
    S,
    E,
    F,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    o_s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    m_s = o_s < S
    b_w = _load(w_ptr + o_s, m_s)
    b_dw = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for first in range(0, F, BLOCK_F):
        o_f = first + tl.arange(0, BLOCK_F)[None, :]
        m = m_s & (o_f < F)
        b_gate, b_up, o_gate, m_gate = _gate_up(
            gu_ptr, bias_ptr, ids_ptr, o_s, m_s, first, E, F, INTERLEAVED, BLOCK_F
        )
        b_da = _load(da_ptr + o_s * F + o_f, m)
        b_act, b_dgate, b_dup = _acted(b_gate, b_up, alpha, limit, ACTIVATION)
        # The routing weight comes behind the activation, so its gradient is <act, da>.
        b_dw += tl.sum(b_act * b_da, axis=1)
        b_da *= b_w
        b_dgate *= b_da
        b_dup *= b_da
        p_dgu = dgu_ptr + o_s * (2 * F) + o_gate
        if INTERLEAVED:
            b_dgu = tl.join(b_dgate, b_dup).to(dgu_ptr.dtype.element_ty)
            b_dgu = tl.reshape(b_dgu, (BLOCK_S, 2 * BLOCK_F))
            tl.store(p_dgu, b_dgu, mask=m_gate)
        else:
            tl.store(p_dgu, b_dgate, mask=m_gate)
            tl.store(p_dgu + F, b_dup, mask=m_gate)
        if a_ptr is not None:
            tl.store(a_ptr + o_s * F + o_f, b_act * b_w, mask=m)
    tl.store(dw_ptr + o_s, b_dw[:, None], mask=m_s)


@triton.jit
def expert_combine_kernel(
    z_ptr,  # (S, D)
    at_ptr,  # (N, K)
    y_ptr,  # (N, D)
    D,
    K,
    n_blocks_d,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_n = i // n_blocks_d
    o_d = i % n_blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m = o_d < D
    b_y = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in range(K):
        i_s = tl.load(at_ptr + i_n * K + k).to(tl.int64)
        o_z = i_s * D + o_d  # negative for a row of another rank
        b_y += _load(z_ptr + o_z, m & (o_z >= 0))
    tl.store(y_ptr + i_n * D + o_d, b_y, mask=m)


@triton.jit
def expert_product_kernel(
    y_ptr,  # (S, O)
    x_ptr,  # (S, I)
    w_ptr,  # (E, I, O), strides w_e, w_i, w_o
    offs_ptr,  # (E,)
    E,
    I,
    O,
    w_e,
    w_i,
    w_o,
    n_blocks_s,
    n_blocks_o,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    i = tl.program_id(0)
    # [Step 1] Choose the block. Programs in flight share rows and columns, which then come from L2.
    i_s, i_o = tl.swizzle2d(i // n_blocks_o, i % n_blocks_o, n_blocks_s, n_blocks_o, 8)
    # [Step 2] Find the expert whose rows block i_s holds. Its blocks start at its first row.
    o_e = tl.arange(0, EXPERTS)
    b_end = tl.load(offs_ptr + o_e, mask=o_e < E, other=0)
    b_start = tl.load(offs_ptr + o_e - 1, mask=(o_e > 0) & (o_e < E), other=0)
    b_blocks = tl.cdiv(tl.maximum(b_end - b_start, 0), BLOCK_S)
    b_first = tl.cumsum(b_blocks, 0) - b_blocks
    b_mine = (b_first <= i_s) & (i_s < b_first + b_blocks)
    i_e = tl.sum(tl.where(b_mine, o_e, 0), 0).to(tl.int64)
    start = tl.sum(tl.where(b_mine, b_start + (i_s - b_first) * BLOCK_S, 0), 0)
    end = tl.sum(tl.where(b_mine, b_end, 0), 0)
    if start >= end:  # more blocks were started than the rows need
        return
    # [Step 3] Multiply these rows by the expert's matrix.
    o_s = (start + tl.arange(0, BLOCK_S)[:, None]).to(tl.int64)
    o_o = (i_o * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    m_s = o_s < end
    m_o = o_o < O
    p_x = x_ptr + o_s * I
    p_w = w_ptr + i_e * w_e + o_o * w_o
    b_y = tl.zeros((BLOCK_S, BLOCK_O), dtype=tl.float32)
    for first in range(0, I, BLOCK_I):
        o_i = first + tl.arange(0, BLOCK_I)
        o_i1 = o_i[:, None]
        b_x = tl.load(p_x + o_i, mask=m_s & (o_i < I), other=0.0)
        b_w = tl.load(p_w + o_i1 * w_i, mask=(o_i1 < I) & m_o, other=0.0)
        b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
    tl.store(y_ptr + o_s * O + o_o, b_y, mask=m_s & m_o)


@triton.jit
def expert_sums_kernel(
    out_ptr,  # (E, M, N)
    a_ptr,  # (S, M)
    b_ptr,  # (S, N)
    offs_ptr,  # (E,)
    M,
    N,
    n_blocks_m,
    n_blocks_n,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # [Step 1] Choose the expert, and the block of its sum.
    i = tl.program_id(0).to(tl.int64)
    i_e = i // (n_blocks_m * n_blocks_n)
    i_m = i // n_blocks_n % n_blocks_m
    i_n = i % n_blocks_n
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < M
    m_n = o_n < N
    # [Step 2] Sum a^T b over the expert's rows.
    start = tl.where(i_e > 0, tl.load(offs_ptr + tl.maximum(i_e - 1, 0)), 0)
    end = tl.load(offs_ptr + i_e)
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_S):
        o_s = (first + tl.arange(0, BLOCK_S)).to(tl.int64)
        o_s1 = o_s[:, None]
        b_a = tl.load(a_ptr + o_s * M + o_m, mask=m_m & (o_s < end), other=0.0)
        b_b = tl.load(b_ptr + o_s1 * N + o_n, mask=(o_s1 < end) & m_n, other=0.0)
        b_sum = tl.dot(b_a, b_b, b_sum, input_precision="ieee")
    # [Step 3] Write the sum, or add it to the earlier ones.
    p_out = out_ptr + (i_e * M + o_m) * N + o_n
    m = m_m & m_n
    if not FIRST:
        if start == end:
            return
        b_sum += tl.load(p_out, mask=m, other=0.0)
    tl.store(p_out, b_sum, mask=m)


def _act_options(gu, bias, activation: str, interleaved: bool) -> tuple:
    """(bias, number of experts, constexprs) of the activation of gu [S, 2F] and of its backward."""
    block_f = min(512, triton.next_power_of_2(gu.shape[1] // 2))
    block_s = max(1, min(1024 // block_f, triton.next_power_of_2(len(gu))))
    constexprs = dict(
        ACTIVATION=activation, INTERLEAVED=interleaved, BLOCK_S=block_s, BLOCK_F=block_f
    )
    if bias is None:
        return None, 1, constexprs
    return bias.contiguous(), len(bias), constexprs


def expert_act(a, gu, w, bias, ids, activation, alpha, limit, interleaved) -> None:
    """Launches the activation. Result and arguments as `hfpatch::expert_act`."""
    S, F = a.shape
    bias, E, constexprs = _act_options(gu, bias, activation, interleaved)
    n_blocks_s = triton.cdiv(S, constexprs["BLOCK_S"])
    n_blocks_f = triton.cdiv(F, constexprs["BLOCK_F"])
    args = gu.contiguous(), w, bias, ids, a, S, E, F, n_blocks_f, alpha, limit
    launch(expert_act_kernel, (n_blocks_s * n_blocks_f,), args, constexprs, num_warps=4)


def expert_act_bwd(
    outs, da, gu, w, bias, ids, activation, alpha, limit, interleaved, need_a
) -> None:
    """Launches its backward. Results and arguments as `hfpatch::expert_act_bwd`."""
    dgu, a, dw = outs
    S, F = da.shape
    bias, E, constexprs = _act_options(gu, bias, activation, interleaved)
    n_blocks_s = triton.cdiv(S, constexprs["BLOCK_S"])
    args = (
        da.contiguous(), gu.contiguous(), w, bias, ids, dgu, a if need_a else None, dw,
        S, E, F, alpha, limit,
    )  # fmt: skip
    launch(expert_act_bwd_kernel, (n_blocks_s,), args, constexprs, num_warps=4)


def expert_combine(y, z, inverse) -> None:
    """Fills y [N, D] with the sum of each token's rows of z [S, D]; -1 in inverse [N, K] is no
    row."""
    N, K = inverse.shape
    D = z.shape[1]
    block = min(2048, triton.next_power_of_2(D))
    n = triton.cdiv(D, block)
    args = z.contiguous(), inverse.contiguous(), y, D, K, n
    launch(expert_combine_kernel, (N * n,), args, dict(BLOCK_D=block), num_warps=4)


def expert_product(y, x, w, offs) -> None:
    """Fills y [S, O]: each row of x [S, I] times its expert's matrix of w [E, I, O], which has any
    strides. The host does not know the rows of each expert, so it starts as many blocks as they may
    need."""
    S, I = x.shape
    E, _, O = w.shape
    wide = x.dtype == torch.float32
    blocks = dict(BLOCK_S=64 if wide else 128, BLOCK_O=128, BLOCK_I=32 if wide else 64)
    n_s = S // blocks["BLOCK_S"] + E
    n_o = triton.cdiv(O, blocks["BLOCK_O"])
    args = y, x.contiguous(), w, offs, E, I, O, *w.stride(), n_s, n_o
    constexprs = dict(EXPERTS=triton.next_power_of_2(E), **blocks)
    launch(expert_product_kernel, (n_s * n_o,), args, constexprs, num_warps=8, num_stages=3)


def expert_sums(out, a, b, offs, first) -> None:
    """Adds a^T b over each expert's rows to out [E, M, N], in float32; `first` overwrites."""
    E, M, N = out.shape
    blocks = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_S=32 if a.dtype == torch.float32 else 64)
    n_m = triton.cdiv(M, blocks["BLOCK_M"])
    n_n = triton.cdiv(N, blocks["BLOCK_N"])
    args = out, a.contiguous(), b.contiguous(), offs, M, N, n_m, n_n
    launch(expert_sums_kernel, (E * n_m * n_n,), args, dict(FIRST=first, **blocks), num_warps=8)
