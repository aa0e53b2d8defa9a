"""Torch's memory-efficient attention (Rabe and Staats, 2021; xFormers' kernel): any dtype but float64, heads of any multiple of 8.

All tensors [B, heads, T, E] views.
"""

from functools import lru_cache

import torch

from hfpatch.compat import aten
from hfpatch.ops._attention_pattern import CAUSAL
from hfpatch.ops._attention_trial import why_not


def for_each_head(q, k, v):
    """k and v for kernels that know no grouped heads: one for each of q's."""
    repeat = q.shape[1] // k.shape[1]
    return (k, v) if repeat == 1 else [x.repeat_interleave(repeat, 1) for x in (k, v)]


def of_groups(K: int, *grads):
    """Gradients of the K heads that were repeated so: sums over those of the copies."""
    return [x if x.shape[1] == K else x.unflatten(1, (K, -1)).sum(2) for x in grads]


def efficient_forward(q, k, v, scale):
    k, v = for_each_head(q, k, v)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return out, lse, (seed, offset)


def efficient_backward(dout, q, k, v, out, lse, state, scale):
    K, (k, v) = k.shape[1], for_each_head(q, k, v)
    # The kernel's own is of whole blocks of 32 tokens; that of a document is not.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], True, scale=scale
    )
    return dq, *of_groups(K, dk, dv)


@lru_cache(maxsize=32)
def why_not_efficient(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None where that kernel gives what plain blocks give at this head dimension, else the reason (see why_not)."""

    def forward(q, k, v, pattern, scale):
        out, *rest = efficient_forward(*(x.transpose(1, 2) for x in (q, k, v)), scale)
        return out.transpose(1, 2), *rest

    def backward(dout, q, k, v, out, lse, state, pattern, scale):
        given = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        return [x.transpose(1, 2) for x in efficient_backward(*given, lse, state, scale)]

    return why_not(forward, backward, device, dtype, head_dim, CAUSAL, 129)
