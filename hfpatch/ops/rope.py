"""Rotary position embedding of queries and keys, both in one launch.

Legend: B batch, T tokens, H query heads, K key heads, E head dim (even). x = [x1, x2], the halves
    of E.

    y1 = x1 * cos1 - x2 * sin1        transposed (backward):  dx1 =  dy1 * cos1 + dy2 * sin2
    y2 = x2 * cos2 + x1 * sin2                                dx2 =  dy2 * cos2 - dy1 * sin1
transformers' cos and sin repeat their first half; the backward is then rope with a negated sine.
The transposed form above is right for any cos and sin. The map is linear, so the op is its own
backward op and has any number of derivatives.
"""

import torch
from torch import Tensor

from hfpatch.ops._library import define, refuse, wide_dtype


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """rope in plain torch, differentiable in all four arguments. float64 stays float64."""
    wide = wide_dtype(q.dtype, k.dtype, cos.dtype)
    outs = []
    cos_B1TE = cos.to(wide).unsqueeze(1)
    sin_B1TE = sin.to(wide).unsqueeze(1)
    sin1, sin2 = sin_B1TE.chunk(2, -1)
    for x in (q, k):
        y1, y2 = (x.to(wide) * cos_B1TE).chunk(2, -1)
        x1, x2 = x.to(wide).chunk(2, -1)
        y1 = torch.addcmul(y1, x2, sin1, value=-1)
        y2 = torch.addcmul(y2, x1, sin2)
        y = torch.cat((y1, y2), -1)
        outs.append(y.to(torch.promote_types(x.dtype, cos.dtype)))
    return tuple(outs)


# Results have the strides of their inputs: a [B, T, H, E] projection viewed as [B, H, T, E] keeps
# its layout. The columns of a head are always adjacent.


def _fake(q, k, cos, sin, transpose, dtype):
    outs = []
    for x in (q, k):
        keeps = torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
        out_dtype = dtype or torch.promote_types(x.dtype, cos.dtype)
        outs.append(torch.empty_like(x, dtype=out_dtype, memory_format=keeps))
    return tuple(outs)


def _rope(q, k, cos, sin, transpose, dtype):
    if transpose:
        # wide: autocast on a CPU rolls no float16
        sin = -sin.to(wide_dtype(q.dtype, sin.dtype)).roll(sin.shape[-1] // 2, -1)
    outs = _fake(q, k, cos, sin, transpose, dtype)
    for out, y in zip(outs, rope_ref(q, k, cos, sin)):
        out.copy_(y)
    return outs


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, ctx.transpose, _ = inputs
    unneeded = [out for out, needs in zip(output, ctx.needs_input_grad) if not needs]
    ctx.mark_non_differentiable(*unneeded)
    ctx.set_materialize_grads(False)
    ctx.dtypes = q.dtype, k.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    q_dtype, k_dtype = ctx.dtypes
    dtype = q_dtype if q_dtype == k_dtype else None
    # The gradient of a result that nobody reads is None, and so is that of its input: with zeros, an
    # optimizer would decay the weights.
    given = dk if dq is None else dq, dq if dk is None else dk
    if given[0] is not None:
        found = ROPE(*given, *ctx.saved_tensors, not ctx.transpose, dtype)
        dq = None if dq is None else found[0].to(q_dtype)
        dk = None if dk is None else found[1].to(k_dtype)
    return dq, dk, None, None, None, None


ROPE = define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool transpose, ScalarType? dtype) -> "
    "(Tensor, Tensor)",
    _rope,
    "rope.rope",
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k rotated as by transformers' apply_rotary_pos_emb, in float32 and rounded once.

    Args:
        q: [B, H, T, E], E even, any strides. The result has the same layout.
        k: [B, K, T, E].
        cos, sin: [1 or B, T, E], as transformers' rotary_emb returns them.

    Returns:
        (q, k), rotated, in the promoted dtype of q and cos: under autocast float32, where
        transformers' are.

    Raises:
        ValueError: for other shapes or integers.

    Example:
        q, k = rope(q, k, *rotary_emb(x, position_ids))
    """
    batch, _, tokens, width = q.shape if q.dim() == 4 else (0, 0, 0, 1)
    angles = (1, tokens, width), (batch, tokens, width)
    fits = width % 2 == 0 and cos.shape == sin.shape and cos.shape in angles
    refuse(
        "rope",
        (not q.dtype.is_floating_point,
         "q must be floating-point, got {}. Cast it first", q.dtype),
        (not fits or (k.shape[0], *k.shape[2:]) != angles[1],
         "q must be [B,H,T,E], k [B,K,T,E], cos and sin [1 or B,T,E] with even E, got {}, {}, {} "
         "and {}. Pass HF's rotary_emb output unchanged", q.shape, k.shape, cos.shape, sin.shape),
    )  # fmt: skip
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        # transformers makes cos and sin without gradients; a learned rotation needs the plain
        # version.
        return rope_ref(q, k, cos, sin)
    return ROPE(q, k, cos, sin, False, None)
