"""Torch's memory-efficient attention (Rabe and Staats, 2021; xFormers' kernel).

It takes any dtype but float64, and head dims that are multiples of 8. All tensors are [B, heads, T,
E] views.
"""

import torch

from hfpatch.compat import aten


def for_each_head(H: int, x_BKTE):
    """k or v repeated to H query heads, for kernels without grouped heads."""
    repeat = H // x_BKTE.shape[1]
    return x_BKTE if repeat == 1 else x_BKTE.repeat_interleave(repeat, 1)


def of_groups(K: int, dx_BHTE):
    """dk or dv of K heads, summed over the copies that for_each_head made."""
    return dx_BHTE if dx_BHTE.shape[1] == K else dx_BHTE.unflatten(1, (K, -1)).sum(2)


def efficient_forward(q, k, v, scale):
    k = for_each_head(q.shape[1], k)
    v = for_each_head(q.shape[1], v)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True, scale=scale
    )
    return out, lse, (seed, offset)


def efficient_backward(dout, q, k, v, out, lse, state, scale):
    K = k.shape[1]
    k = for_each_head(q.shape[1], k)
    v = for_each_head(q.shape[1], v)
    # The kernel pads its lse to blocks of 32 tokens; the lse of a document is not padded.
    missing = -lse.shape[2] % 32
    lse = torch.nn.functional.pad(lse, (0, missing), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], True, scale=scale
    )
    return dq, of_groups(K, dk), of_groups(K, dv)
