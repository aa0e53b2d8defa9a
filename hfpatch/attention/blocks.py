"""Attention in blocks of queries, in plain torch: exact for every pattern, device and dtype.

Used where there is no kernel (`no_kernel_takes` in attention.py; float64, and windows on a CPU).
Never holds [T, T] scores.

B batch, T tokens, H query heads, K key-value heads, E head dim. In the einsums: b batch, q queries,
s keys, k KV heads, r query heads of a KV head, e head dim.
"""

import torch

from hfpatch.attention.pattern import Pattern

BLOCK_BYTES = 64 << 20  # of one block of scores


def _blocks(q_BTHE, pattern: Pattern):
    """Yields (a slice of the queries, the slice of the keys that they can see)."""
    B, T, H, _ = q_BTHE.shape
    rows = max(1, min(T, BLOCK_BYTES // (8 * B * H * T)))
    window = pattern.window
    if window is not None:
        # A block of queries sees its own rows plus a window of keys. Long blocks compute more
        # masked scores, short blocks read the same keys more often.
        rows = min(T, max(min(rows, max(window, 128)), min(window, 1024)))
    for a in range(0, T, rows):
        b = min(a + rows, T)
        yield slice(a, b), slice(0 if window is None else max(0, a - window + 1), b)


def _block_scores(q, k, pattern: Pattern, scale: float, queries: slice, keys: slice, T: int):
    """(scores [B, K, repeat, queries, keys] capped and masked, the cap's derivative or None)."""
    scores = torch.einsum("bqkre,bske->bkrqs", q, k) * scale
    slope = None
    if pattern.softcap is not None:
        bent = torch.tanh(scores / pattern.softcap)
        scores = pattern.softcap * bent
        slope = 1 - bent * bent
    hidden = ~pattern.allowed(queries, keys, len(q), T, q.device)
    return scores.masked_fill(hidden[:, :, None], torch.finfo(scores.dtype).min), slope


def _grouped(x_BtHE, K: int, dtype):
    """[B, t, K, repeat, E]: query heads by their KV head, in the dtype of the sums."""
    return x_BtHE.to(dtype).unflatten(2, (K, -1))


def blocks_forward(q_BTHE, k_BTKE, v_BTKE, pattern: Pattern, scale: float):
    B, T, H, _ = q_BTHE.shape
    K = k_BTKE.shape[2]
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    out = q_BTHE.new_empty(B, T, H, v_BTKE.shape[3])
    lse = q_BTHE.new_empty(B, H, T, dtype=dtype)
    for rows, seen in _blocks(q_BTHE, pattern):
        q = _grouped(q_BTHE[:, rows], K, dtype)  # [B, queries, K, repeat, E]
        k = k_BTKE[:, seen].to(dtype)  # [B, keys, K, E]
        v = v_BTKE[:, seen].to(dtype)
        scores, _ = _block_scores(q, k, pattern, scale, rows, seen, T)
        block_lse = scores.logsumexp(-1)  # [B, K, repeat, queries]
        p = (scores - block_lse[..., None]).exp()
        out[:, rows] = torch.einsum("bkrqs,bske->bqkre", p, v).flatten(2, 3)
        lse[:, :, rows] = block_lse.flatten(1, 2)
    return out, lse, ()


def blocks_backward(dout, q_BTHE, k_BTKE, v_BTKE, out, lse, state, pattern: Pattern, scale: float):
    T = q_BTHE.shape[1]
    K = k_BTKE.shape[2]
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    dq = torch.empty_like(q_BTHE)
    dk = k_BTKE.new_zeros(k_BTKE.shape, dtype=dtype)
    dv = v_BTKE.new_zeros(v_BTKE.shape, dtype=dtype)
    for rows, seen in _blocks(q_BTHE, pattern):
        q = _grouped(q_BTHE[:, rows], K, dtype)  # [B, queries, K, repeat, E]
        do = _grouped(dout[:, rows], K, dtype)  # [B, queries, K, repeat, E], of v's E, as o
        o = _grouped(out[:, rows], K, dtype)
        k = k_BTKE[:, seen].to(dtype)  # [B, keys, K, E]
        v = v_BTKE[:, seen].to(dtype)
        scores, slope = _block_scores(q, k, pattern, scale, rows, seen, T)
        block_lse = lse[:, :, rows].to(dtype).unflatten(1, (K, -1))  # [B, K, repeat, queries]
        p = (scores - block_lse[..., None]).exp()
        dv[:, seen] += torch.einsum("bkrqs,bqkre->bske", p, do)
        dp = torch.einsum("bqkre,bske->bkrqs", do, v)  # [B, K, repeat, queries, keys]
        # This equals the sum of p * dp over the keys (Dao, FlashAttention-2, 2023).
        delta = (do * o).sum(-1).permute(0, 2, 3, 1)[..., None]
        ds = p * (dp - delta) * scale
        if slope is not None:
            ds = ds * slope
        dq[:, rows] = torch.einsum("bkrqs,bske->bqkre", ds, k).flatten(2, 3)
        dk[:, seen] += torch.einsum("bkrqs,bqkre->bske", ds, q)
    return dq, dk.to(k_BTKE.dtype), dv.to(v_BTKE.dtype)
