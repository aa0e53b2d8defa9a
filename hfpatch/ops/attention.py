"""Causal attention with its two directions apart: forward gives out and lse, backward takes them back.

`scaled_dot_product_attention` hides the log-sum-exp, so a checkpointed layer runs its forward twice. Here both directions
are called directly, per group of KV heads, so that the scratch of the backward (an fp32 dq accumulator and dk, dv expanded to
the query heads; Dao, FlashAttention-2, 2023) is one group's, not the whole layer's.

B batch, T tokens, H query heads, K key-value heads, E head dim; N = B*T; a group is some KV heads and their query heads.
Layout in memory is [B, T, heads, E]; the kernels get transposed views.
"""

from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Documents:
    """Token ranges that attend only within themselves, over the flattened [B*T] tokens.

    bounds: ascending offsets, first 0 and last B*T, as host ints; on a device they are also the int32 cu_seqlens.
    """

    bounds: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:]))


def attention_ref(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, scale: float, documents: Documents | None = None):
    """Plain causal attention, in promote_types(q.dtype, float32): the oracle of the tests. Returns out_BTHE, lse_BHT."""
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    B, T, H, E = q_BTHE.shape
    repeat = H // k_BTKE.shape[2]
    q = q_BTHE.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(repeat, 1) for x in (k_BTKE, v_BTKE))
    allowed_BTT = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().expand(B, T, T)
    if documents is not None:
        index_N = torch.arange(B * T, device=q.device)
        ends = torch.tensor(documents.bounds[1:], device=q.device)
        document_BT = torch.bucketize(index_N, ends, right=True).view(B, T)
        allowed_BTT = allowed_BTT & (document_BT[:, :, None] == document_BT[:, None, :])
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed_BTT[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    return out.transpose(1, 2).to(q_BTHE.dtype), lse


# --- one row a backend: forward(q, k, v, scale) -> out, lse, state; backward(dout, q, k, v, out, lse, state, scale) ---------
# All tensors [B, heads, T, E] views. `state` is what the backward wants besides (the generator's state, unused without dropout).


def _cpu_forward(q, k, v, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _cpu_backward(dout, q, k, v, out, lse, state, scale):
    # The CPU kernel's backward does not know grouped heads: expand by a view, sum the gradients of the copies.
    K, H = k.shape[1], q.shape[1]
    wide = (x.repeat_interleave(H // K, 1) if H != K else x for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *wide, out, lse, 0.0, True, scale=scale
    )
    if H != K:
        dk, dv = (x.unflatten(1, (K, H // K)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _flash_forward(q, k, v, scale):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _flash_backward(dout, q, k, v, out, lse, state, scale):
    T = q.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, T, T, 0.0, True, *state, scale=scale
    )


def _cudnn_forward(q, k, v, scale):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _cudnn_backward(dout, q, k, v, out, lse, state, scale):
    T = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *state, None, None, None, T, T, 0.0, True, scale=scale
    )


def _efficient_forward(q, k, v, scale):
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return out, lse, (seed, offset)


def _efficient_backward(dout, q, k, v, out, lse, state, scale):
    K, repeat = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], True, scale=scale
    )
    if repeat > 1:
        dk, dv = (x.unflatten(1, (K, repeat)).sum(2) for x in (dk, dv))
    return dq, dk, dv


BACKENDS = {
    "cpu": (_cpu_forward, _cpu_backward),
    "flash": (_flash_forward, _flash_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (_efficient_forward, _efficient_backward),
}
# cuDNN's and FA2's varlen entries differ in what they return; only FA2's is used for packed documents.
_HALF = (torch.float16, torch.bfloat16)


def _varlen_forward(q_NHE, k_NKE, v_NKE, documents: Documents, scale: float):
    """FA2 over packed documents. lse is [H, N]."""
    cu, longest = documents.cu_seqlens, documents.longest
    out, lse, seed, offset, _ = aten._flash_attention_forward(
        q_NHE, k_NKE, v_NKE, cu, cu, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _varlen_backward(dout, q, k, v, out, lse, state, documents: Documents, scale: float):
    cu, longest = documents.cu_seqlens, documents.longest
    return aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, *state, scale=scale
    )


def supported(head_dim: int, dtype: torch.dtype, device: torch.device, documents: bool = False) -> str | None:
    """None where this module can run such an attention, else the reason in a few words."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no direct attention kernels on {device.type}"
    if dtype not in _HALF:
        return "packed documents need fp16 or bf16 on a GPU" if documents else None
    if head_dim % 8 or head_dim > 256:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    return None


@lru_cache(maxsize=64)
def choose_backend(
    device_type: str, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int, tokens: int
) -> str:
    """The fastest backend that is right on this device, by one forward and backward each on a short sequence.

    Measured once per shape (tokens: the next power of two, at most 16,384) and cached; a backend that raises, or that differs
    from FA2 by more than rounding, is left out.
    """
    if device_type != "cuda":
        return "cpu"
    if dtype not in _HALF:
        return "efficient"
    if torch.are_deterministic_algorithms_enabled():
        return "flash"  # the one backend whose backward has a deterministic form
    if torch.version.hip is not None:
        return "flash"
    times = {}
    generator = torch.Generator(device=device_type).manual_seed(0)
    # Heads out of the middle of a wider tensor, as the layer passes them.
    q, k, v, dout = (
        torch.randn(1, tokens, 2 * h, head_dim, generator=generator, device=device_type, dtype=dtype)[
            :, :, h:
        ].transpose(1, 2)
        for h in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    )
    scale = head_dim**-0.5
    expected = None
    for name in ("flash", "cudnn"):
        forward, backward = BACKENDS[name]
        try:
            for trial in range(3):
                torch.cuda.synchronize()
                start = perf_counter()
                out, lse, state = forward(q, k, v, scale)
                grads = backward(dout, q, k, v, out, lse, state, scale)
                torch.cuda.synchronize()
                times[name] = min(times.get(name, float("inf")) if trial > 1 else float("inf"), perf_counter() - start)
        except RuntimeError:
            times.pop(name, None)
            continue
        got = [out, *grads]
        if expected is None:
            expected = got
        elif not all((g - e).norm() <= 2e-2 * e.norm() for g, e in zip(got, expected)):
            del times[name]
    return min(times, key=times.get) if times else "efficient"


def pick(q_BTHE: Tensor, k_BTKE: Tensor) -> str:
    """The backend for one group's shapes (see choose_backend)."""
    if q_BTHE.device.type != "cuda":
        return "cpu"
    tokens = min(16384, 1 << max(7, (q_BTHE.shape[1] - 1).bit_length()))
    return choose_backend("cuda", q_BTHE.dtype, q_BTHE.shape[2], k_BTKE.shape[2], q_BTHE.shape[3], tokens)


def heads_per_group(batch: int, tokens: int, n_heads: int, n_kv_heads: int) -> int:
    """KV heads that go through the kernels together: as few as keep a large GPU full (512 blocks of 128 queries)."""
    blocks = batch * (n_heads // n_kv_heads) * -(-tokens // 128)
    wanted = -(-512 // max(blocks, 1))
    return next(n for n in range(1, n_kv_heads + 1) if n_kv_heads % n == 0 and (n >= wanted or n == n_kv_heads))


def deterministic_scratch(batch: int, tokens: int, group_heads: int, head_dim: int, multiprocessors: int) -> int:
    """Bytes of FA2's deterministic backward for one group: a float32 dq for each of its splits.

    It splits the keys over as many blocks as fill the device (FlashAttention-2's num_splits), each with a dq of its own.
    """
    splits = max(1, -(-multiprocessors // (batch * group_heads)))
    rows = -(-tokens // 128) * 128
    return splits * batch * rows * group_heads * head_dim * 4


def attention_forward(q_BTHE, k_BTKE, v_BTKE, *, scale: float, documents: Documents | None = None, backend: str):
    """Causal attention of one group. Returns out_BTHE, lse ([B, H, T] or, packed on a GPU, [H, N]; float32 or wider), state."""
    if documents is None:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        out, lse, state = BACKENDS[backend][0](q, k, v, scale)
        return out.transpose(1, 2), lse, state
    B, T, H, E = q_BTHE.shape
    q, k, v = (x.reshape(B * T, *x.shape[2:]) for x in (q_BTHE, k_BTKE, v_BTKE))
    if q.device.type == "cuda":
        out, lse, state = _varlen_forward(q, k, v, documents, scale)
        return out.view(B, T, H, E), lse, state
    out_NHE, lse_HN = torch.empty_like(q), q.new_empty(H, B * T, dtype=torch.promote_types(q.dtype, torch.float32))
    for a, b in zip(documents.bounds, documents.bounds[1:]):
        out, lse, _ = _cpu_forward(*(x[None, a:b].transpose(1, 2) for x in (q, k, v)), scale)
        out_NHE[a:b], lse_HN[:, a:b] = out[0].transpose(0, 1), lse[0]
    return out_NHE.view(B, T, H, E), lse_HN, ()


def attention_backward(
    dout_BTHE, q, k, v, out, lse, state, *, scale: float, documents: Documents | None = None, backend: str
):
    """Gradients of one group, [B, T, heads, E] each, from what attention_forward returned."""
    if documents is None:
        grads = BACKENDS[backend][1](*(x.transpose(1, 2) for x in (dout_BTHE, q, k, v, out)), lse, state, scale)
        return tuple(x.transpose(1, 2) for x in grads)
    B, T, H, E = q.shape
    flat = [x.reshape(B * T, *x.shape[2:]) for x in (dout_BTHE, q, k, v, out)]
    if q.device.type == "cuda":
        grads = _varlen_backward(*flat, lse, state, documents, scale)
    else:
        grads = [torch.empty_like(x) for x in flat[1:4]]
        for a, b in zip(documents.bounds, documents.bounds[1:]):
            args = [x[None, a:b].transpose(1, 2) for x in flat]
            pieces = _cpu_backward(*args, lse[None, :, a:b].contiguous(), (), scale)
            for grad, piece in zip(grads, pieces):
                grad[a:b] = piece[0].transpose(0, 1)
    return tuple(g.view(B, T, *g.shape[1:]) for g in grads)
