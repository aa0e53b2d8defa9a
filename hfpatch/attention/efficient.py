"""Torch's memory-efficient attention (Rabe and Staats, 2021; xFormers' kernel).

It takes any dtype but float64, and head dims that are multiples of 8. All tensors are [B, heads, T,
E] views.
"""

import torch

from hfpatch.compat import aten


def for_each_head(q, k, v):
    """k and v repeated to one head per query head, for kernels without grouped heads."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)


def of_groups(K: int, dk, dv):
    """dk and dv of K heads, summed over the copies that for_each_head made."""
    if dk.shape[1] == K:
        return dk, dv
    return dk.unflatten(1, (K, -1)).sum(2), dv.unflatten(1, (K, -1)).sum(2)


def efficient_forward(q, k, v, scale):
    k, v = for_each_head(q, k, v)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True, scale=scale
    )
    return out, lse, (seed, offset)


def efficient_backward(dout, q, k, v, out, lse, state, scale):
    K = k.shape[1]
    k, v = for_each_head(q, k, v)
    # The kernel pads its lse to blocks of 32 tokens; the lse of a document is not padded.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], True, scale=scale
    )
    return dq, *of_groups(K, dk, dv)
