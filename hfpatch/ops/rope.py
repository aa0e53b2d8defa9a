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

from hfpatch.ops._library import as_dtype, define, expect_floating, use_kernel, wide_dtype


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """rope in plain torch, differentiable in all four arguments. float64 stays float64."""
    parts = _angles(cos, sin, wide_dtype(q.dtype, k.dtype, cos.dtype))
    dtypes = _dtypes(q, k, cos, None)
    return tuple(
        as_dtype(torch.cat(_halves(x, *parts), -1), dtype) for x, dtype in zip((q, k), dtypes)
    )


def _angles(cos, sin, wide):
    """cos [B, 1, T, E] and the halves of sin [B, 1, T, E/2], in the wide dtype."""
    return as_dtype(cos, wide).unsqueeze(1), as_dtype(sin, wide).unsqueeze(1).chunk(2, -1)


def _halves(x, cos, sins):
    """The two halves of the rotated x, in new tensors."""
    x = as_dtype(x, cos.dtype)
    (y1, y2), (x1, x2) = (x * cos).chunk(2, -1), x.chunk(2, -1)
    return torch.addcmul(y1, x2, sins[0], value=-1), torch.addcmul(y2, x1, sins[1])


def _rotate_into(out, x, cos, sins, transpose):
    sign, sins = (1, sins[::-1]) if transpose else (-1, sins)
    x = as_dtype(x, cos.dtype)
    # All products of x are computed before out is written, because out may be x.
    y = torch.mul(x, cos, out=out) if out is not x and out.dtype == cos.dtype else x * cos
    (y1, y2), (x1, x2) = y.chunk(2, -1), x.chunk(2, -1)
    y1.addcmul_(x2, sins[0], value=sign)
    y2.addcmul_(x1, sins[1], value=-sign)
    if y is not out:
        out.copy_(y)


def _dtypes(q, k, cos, dtype):
    if dtype is None and q.dtype == k.dtype == cos.dtype:
        dtype = cos.dtype
    return (
        (dtype, dtype) if dtype else tuple(torch.promote_types(x.dtype, cos.dtype) for x in (q, k))
    )


def _kernel_serves(q, k, cos, sin):
    return use_kernel(q, k, cos, sin) and q.numel() + k.numel() > 0


# Results have the strides of their inputs: a [B, T, H, E] projection viewed as [B, H, T, E] keeps
# its layout.


def _rope(q, k, cos, sin, transpose, dtype):
    outs = _rope_fake(q, k, cos, sin, transpose, dtype)
    if _kernel_serves(q, k, cos, sin):
        from hfpatch.kernels import rope as kernels

        kernels.rope((q, k), outs, cos, sin, transpose)
    else:
        angles = _angles(cos, sin, wide_dtype(q.dtype, k.dtype, cos.dtype))
        for x, out in zip((q, k), outs):
            _rotate_into(out, x, *angles, transpose)
    return outs


def _rope_fake(q, k, cos, sin, transpose, dtype):
    q_dtype, k_dtype = _dtypes(q, k, cos, dtype)
    return torch.empty_like(q, dtype=q_dtype), torch.empty_like(k, dtype=k_dtype)


def _rope_inplace(q, k, cos, sin):
    if _kernel_serves(q, k, cos, sin):
        from hfpatch.kernels import rope as kernels

        kernels.rope((q, k), (q, k), cos, sin, False)
    else:
        angles = _angles(cos, sin, wide_dtype(q.dtype, k.dtype, cos.dtype))
        for x in (q, k):
            _rotate_into(x, x, *angles, False)


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, ctx.transpose, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *(out for out, needs in zip(output, ctx.needs_input_grad) if not needs)
    )
    ctx.dtypes = q.dtype, k.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    if dq is None and dk is None:
        return (None,) * 6
    # A side without a gradient goes in with zero heads.
    q_in = dk[:, :0] if dq is None else dq
    k_in = dq[:, :0] if dk is None else dk
    dtype = ctx.dtypes[0] if ctx.dtypes[0] == ctx.dtypes[1] else None
    q_out, k_out = ROPE(q_in, k_in, cos, sin, not ctx.transpose, dtype)
    return (
        None if dq is None else q_out.to(ctx.dtypes[0]),
        None if dk is None else k_out.to(ctx.dtypes[1]),
        None,
        None,
        None,
        None,
    )


ROPE = define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool transpose, ScalarType? dtype) -> "
    "(Tensor, Tensor)",
    _rope,
    _rope_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_INPLACE = define(
    "rope_inplace(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()",
    _rope_inplace,
    lambda q, k, cos, sin: None,
)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    inplace: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k rotated as by transformers' apply_rotary_pos_emb, in float32 and rounded once.

    Args:
        q: [B, H, T, E], E even, any strides. The result has the same layout.
        k: [B, K, T, E].
        cos, sin: [1 or B, T, E], as transformers' rotary_emb returns them.
        inplace: q and k may be overwritten. They are, and are returned, where autograd records
            nothing and the result has their dtype.
        dtype: of the results; by default the promoted dtype of q and cos, which under autocast is
            float32 where transformers' is.

    Returns:
        (q, k), rotated.

    Raises:
        ValueError: for other shapes or integers.

    Example:
        q, k = rope(q, k, *rotary_emb(x, position_ids))
    """
    expect_floating("rope", q)
    batch, _, tokens, width = q.shape if q.dim() == 4 else (0, 0, 0, 1)  # odd, which is refused
    same = (k.shape[0], *k.shape[2:]) == (batch, tokens, width) and cos.shape == sin.shape
    if not same or width % 2 or cos.shape[1:] != (tokens, width) or cos.shape[0] not in (1, batch):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, cos, sin))
        raise ValueError(
            "hfpatch: rope expects q [B,H,T,E], k [B,K,T,E], cos and sin [1 or B,T,E] with even "
            f"E, came {shapes}; "
            "pass HF's rotary_emb output as it is."
        )
    if torch.is_grad_enabled():
        if cos.requires_grad or sin.requires_grad:
            # transformers makes cos and sin without gradients; a learned rotation takes the plain
            # version.
            outs = rope_ref(q, k, cos, sin)
            return outs if dtype is None else tuple(x.to(dtype) for x in outs)
        inplace = inplace and not (q.requires_grad or k.requires_grad)
    if inplace and _dtypes(q, k, cos, dtype) == (q.dtype, k.dtype):
        _INPLACE(q, k, cos, sin)
        return q, k
    return ROPE(q, k, cos, sin, False, dtype)
