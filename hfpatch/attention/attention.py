"""Causal attention as two functions: forward returns out and lse, backward takes them.

`scaled_dot_product_attention` hides the log-sum-exp, so a checkpointed layer runs its forward
twice. Here both kernels are called directly. The backward can take one group of KV heads at a time,
so that its scratch (an fp32 dq accumulator, and dk and dv expanded to the query heads; Dao,
FlashAttention-2, 2023) is that of one group, not of the whole layer.

B batch, T tokens, H query heads, K key-value heads, E head dim; N = B*T; a group is some KV heads
and their query heads. Layout in memory is [B, T, heads, E]; the kernels get transposed views.
"""

from operator import methodcaller

import torch
from torch import Tensor, nn

from hfpatch.attention.backends import (
    BACKENDS,
    HALF,
    WIDEST_HEAD,
    pick,  # noqa: F401 (for callers of both directions)
)
from hfpatch.attention.blocks import blocks_backward, blocks_forward
from hfpatch.attention.pattern import CAUSAL, Documents, Pattern
from hfpatch.compat import aten

# [B, T, heads, E] to [B, heads, T, E], or back.
_turned = methodcaller("transpose", 1, 2)


def _flat(x_BTHE: Tensor) -> Tensor:
    """[N, heads, E]: the rows of a batch behind each other."""
    return x_BTHE.reshape(-1, *x_BTHE.shape[2:])


def _fa2_arguments(T: int, pattern: Pattern):
    """Arguments of FA2's own entry: (cu_q, cu_k, longest, longest), and the window's keywords."""
    documents = pattern.documents
    lengths = (None, None, T, T)
    if documents is not None:
        cu = documents.cu_seqlens
        lengths = (cu, cu, documents.longest, documents.longest)
    if pattern.window is None:
        return lengths, {}
    return lengths, {"window_size_left": pattern.window - 1, "window_size_right": 0}


def _fa2_forward(q_BTHE, k_BTKE, v_BTKE, pattern: Pattern, scale: float):
    """FA2 over packed documents (lse [H, N]) or with a window (lse [B, H, T])."""
    lengths, window = _fa2_arguments(q_BTHE.shape[1], pattern)
    qkv = (q_BTHE, k_BTKE, v_BTKE)
    if pattern.documents is not None:
        qkv = map(_flat, qkv)
    out, lse, seed, offset, _ = aten._flash_attention_forward(
        *qkv, *lengths, 0.0, True, False, scale=scale, **window
    )
    return out.view(q_BTHE.shape), lse, (seed, offset)


def _fa2_backward(dout, q, k, v, out, lse, state, pattern: Pattern, scale: float):
    lengths, window = _fa2_arguments(q.shape[1], pattern)
    given = (dout, q, k, v, out)
    if pattern.documents is not None:
        given = map(_flat, given)
    grads = aten._flash_attention_backward(
        *given, lse, *lengths, 0.0, True, *state, scale=scale, **window
    )
    return [grad.view(x.shape) for grad, x in zip(grads, (q, k, v))]


def no_kernel_takes(head_dim: int, dtype: torch.dtype, pattern: Pattern) -> bool:
    """Whether this attention runs in blocks on a GPU: kernels cap no scores, take documents and
    windows in fp16 and bf16, heads that are multiples of 8, and no window above WIDEST_HEAD.
    """
    if pattern.softcap is not None:
        return True
    if dtype not in HALF:
        return pattern.documents is not None or pattern.window is not None
    return head_dim % 8 > 0 or (head_dim > WIDEST_HEAD and pattern.window is not None)


def _chosen(q, v, pattern: Pattern, backend: str) -> str:
    """The backend for a pattern. On a GPU: blocks for what no kernel serves, efficient above
    WIDEST_HEAD, FA2's own entry for documents and windows, flash in place of cuDNN and FA3 for
    widened heads, else `backend`, the choice of `pick`.
    """
    if backend == "blocks":
        return backend
    if backend == "cpu" and pattern.window is None and pattern.softcap is None:
        return backend
    if backend == "cpu" or no_kernel_takes(q.shape[3], q.dtype, pattern):
        return "blocks"
    if max(q.shape[3], v.shape[3]) > WIDEST_HEAD:
        return "efficient"
    if pattern.documents is not None or pattern.window is not None:
        return "fa2_varlen"
    if v.shape[3] > q.shape[3] and backend in ("cudnn", "fa3"):
        # These were not compared at the head dims that _widened makes. FA2 takes any multiple of 8.
        return "flash"
    return backend


def _widened(xs: list[Tensor]) -> list[Tensor]:
    """The tensors padded with zeros to one head dim, a multiple of 8."""
    width = -(-max(x.shape[3] for x in xs) // 8) * 8
    missing = [width - x.shape[3] for x in xs]
    return [nn.functional.pad(x, (0, n)) if n else x for x, n in zip(xs, missing)]


def _packed_forward(q, k, v, documents: Documents, scale: float, backend: str):
    """Runs a backend without support for documents once per document: out_BTHE, lse [H, N],
    state."""
    flat = [_flat(x) for x in (q, k, v)]
    N, H, _ = flat[0].shape
    out_NHE = torch.empty_like(flat[0])
    lse_HN = q.new_empty(H, N, dtype=torch.promote_types(q.dtype, torch.float32))
    forward = BACKENDS[backend][0]
    for a, b in zip(documents.bounds, documents.bounds[1:]):
        out, lse, state = forward(*(_turned(x[None, a:b]) for x in flat), scale)
        out_NHE[a:b] = out[0].transpose(0, 1)
        lse_HN[:, a:b] = lse[0, :, : b - a]
    return out_NHE.view(q.shape), lse_HN, state


def _packed_backward(
    dout, q, k, v, out, lse, state, documents: Documents, scale: float, backend: str
):
    flat = [_flat(x) for x in (dout, q, k, v, out)]
    grads = [torch.empty_like(x) for x in flat[1:4]]
    backward = BACKENDS[backend][1]
    for a, b in zip(documents.bounds, documents.bounds[1:]):
        given = [_turned(x[None, a:b]) for x in flat]
        for grad, piece in zip(
            grads, backward(*given, lse[None, :, a:b].contiguous(), state, scale)
        ):
            grad[a:b] = piece[0].transpose(0, 1)
    return [grad.view(x.shape) for grad, x in zip(grads, (q, k, v))]


def _per_head(lse: Tensor, B: int, T: int) -> Tensor:
    """lse as a view [B, H, T]. Packed kernels return [H, N], cuDNN [B, H, T, 1]; some pad T."""
    if lse.dim() == 2:
        return lse.unflatten(1, (B, T)).transpose(0, 1)
    lse = lse[:, :, :T]
    return lse.squeeze(3) if lse.dim() == 4 else lse


def attention_forward(
    q_BTHE,
    k_BTKE,
    v_BTKE,
    *,
    scale: float,
    pattern: Pattern = CAUSAL,
    sinks_H: Tensor | None = None,
    backend: str,
):
    """Causal attention of one group of heads.

    Args:
        q_BTHE, k_BTKE, v_BTKE: v's head dim may differ from that of q and k.
        scale: of the scores.
        pattern: what a query sees.
        sinks_H: one score per head, which enters the softmax but has no value (Xiao et al., 2023;
            gpt-oss).
        backend: a name from `pick`.

    Returns:
        out_BTHE; lse with the sinks, [B, H, T] or, from packed kernels, [H, N], float32 or wider;
        and the kernel's state for the backward.
    """
    # [Step 1] Choose the backend, by the pattern and the width of the heads.
    chosen = _chosen(q_BTHE, v_BTKE, pattern, backend)
    # [Step 2] Kernels take heads of one width: narrower ones are padded, and the output is
    # cut back to v's width.
    if chosen == "blocks":
        out, lse, state = blocks_forward(q_BTHE, k_BTKE, v_BTKE, pattern, scale)
    else:
        qkv = [q_BTHE, k_BTKE, v_BTKE]
        # Kernels assume that a head's columns are contiguous; torch's CPU kernels do not check.
        if not q_BTHE.stride(3) == k_BTKE.stride(3) == v_BTKE.stride(3) == 1:
            qkv = [x.contiguous() for x in qkv]
        width = v_BTKE.shape[3]
        if q_BTHE.shape[3] != width:
            qkv = _widened(qkv)
        if chosen == "fa2_varlen":
            out, lse, state = _fa2_forward(*qkv, pattern, scale)
        elif pattern.documents is not None:
            out, lse, state = _packed_forward(*qkv, pattern.documents, scale, chosen)
        else:
            out, lse, state = BACKENDS[chosen][0](*map(_turned, qkv), scale)
            out = _turned(out)
        if out.shape[3] != width:
            out = out[..., :width].contiguous()
    # [Step 3] Set the output of padding before a row to zero. Then let the sinks, which have no
    # value, shrink the output and enter lse.
    if pattern.blind_BT is not None:
        out.masked_fill_(pattern.blind_BT[:, :, None, None], 0)
    if sinks_H is not None:
        lse_BHT = _per_head(lse, *out.shape[:2])
        sinks_H1 = sinks_H.to(lse.dtype)[:, None]
        out.mul_(_turned(torch.sigmoid(lse_BHT - sinks_H1))[..., None])
        lse_BHT.copy_(torch.logaddexp(lse_BHT, sinks_H1))
    return out, lse, state


def attention_backward(
    dout_BTHE, q, k, v, out, lse, state, *, scale: float, pattern: Pattern = CAUSAL,
    sinks_H: Tensor | None = None,
    backend: str,
):  # fmt: skip
    """Gradients of one group from the outputs of attention_forward: dq, dk, dv, and dsinks if it
    has sinks.

    out and lse include the sinks, so p = exp(score - lse) is exact in the ordinary backward.
    """
    # [Step 1] Choose the same backend. Padding before a row sends no gradient.
    chosen = _chosen(q, v, pattern, backend)
    if pattern.blind_BT is not None:
        dout_BTHE = dout_BTHE.masked_fill(pattern.blind_BT[:, :, None, None], 0)
    # [Step 2] Heads get one width, as in the forward.
    if chosen == "blocks":
        grads = blocks_backward(dout_BTHE, q, k, v, out, lse, state, pattern, scale)
    else:
        # dout and out are contiguous on every path. FA2 would copy other layouts itself. cuDNN's
        # plans are cached by the strides of q, k and v alone in torch up to 2.13
        # (aten/native/cudnn/MHA.cpp); later versions expect q's layout in both.
        given = [dout_BTHE.contiguous(), q, k, v, out.contiguous()]
        if chosen == "cudnn" or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            given = [x.contiguous() for x in given]
        widens = q.shape[3] != v.shape[3]
        if widens:
            given = _widened(given)
        if chosen == "fa2_varlen":
            grads = _fa2_backward(*given, lse, state, pattern, scale)
        elif pattern.documents is not None:
            grads = _packed_backward(*given, lse, state, pattern.documents, scale, chosen)
        else:
            given = map(_turned, given)
            grads = map(_turned, BACKENDS[chosen][1](*given, lse, state, scale))
        if widens:
            grads = [grad[..., : x.shape[3]] for grad, x in zip(grads, (q, k, v))]
    if sinks_H is None:
        return tuple(grads)
    # [Step 3] Compute the gradient of the sinks, from the share of the softmax that each of them
    # takes.
    # bfloat16 has float32's range: products lose bits but do not underflow.
    wide = out.dtype if out.dtype == torch.bfloat16 else lse.dtype
    delta_BTH = (dout_BTHE.to(wide) * out.to(wide)).sum(-1, dtype=lse.dtype)
    lse_BHT = _per_head(lse, *q.shape[:2])
    share_BHT = torch.exp(sinks_H.to(lse.dtype)[:, None] - lse_BHT)
    dsinks_H = -(share_BHT * _turned(delta_BTH)).sum((0, 2))
    return *grads, dsinks_H.to(sinks_H.dtype)
