"""RMSNorm, alone or of a residual sum.

Legend: B batch, T tokens, N = all leading dims together, D hidden.

    rstd = 1 / sqrt(mean(x^2) + eps)
    x_hat = x * rstd
    w = offset + weight, or offset + 1 without a weight
    y = w * x_hat
    g = dy * w
    dx = rstd * (g - x_hat * mean(g * x_hat))
    dweight = sum over N of dy * x_hat
Besides the inputs only rstd is saved. Families differ in where they round to 16 bits (`cast`), and
so in the dtype of the result:

    cast      rounds                         result              families
    "before"  x_hat to x.dtype, then weight  promote(x, weight)  Llama, Qwen, Mistral, most others
    "after"   the product, once              x.dtype             Gemma (offset 1), OLMo2, gpt-oss
The backward is the same for both, since a rounding has no derivative.
"""

import torch
from torch import Tensor

from hfpatch.ops._library import define, no_second_derivative, refuse, wide_dtype

CASTS = ("before", "after")


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "before",
) -> Tensor:
    """rms_norm in plain torch, with any number of derivatives. float64 stays float64."""
    return _fwd(x, weight, eps, offset, cast)[0]


def _fwd(x, weight, eps, offset, cast):
    """(y, rstd)."""
    x_wide = x.to(wide_dtype(x.dtype))
    rstd = x_wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = x_wide * rstd
    if cast == "before":
        y = y.to(x.dtype)
    y = y * _factor(weight, offset, x_wide.dtype)
    return y.to(_y_dtype(x.dtype, weight, cast)).contiguous(), rstd.squeeze(-1)


def _factor(weight, offset, wide):
    """The factor of x_hat, in the wide dtype."""
    return 1.0 + offset if weight is None else weight.to(wide) + offset


def _bwd(dy, x, weight, rstd, offset, need_dw):
    wide = wide_dtype(x.dtype, dy.dtype)
    dy = dy.to(wide)
    rstd = rstd.to(wide).unsqueeze(-1)
    x_hat = x.to(wide) * rstd
    dw = x.new_empty(0)
    if need_dw:
        dw = (dy * x_hat).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    g = dy * _factor(weight, offset, wide)
    x_hat *= (g * x_hat).mean(-1, keepdim=True)
    return (g - x_hat).mul_(rstd).to(x.dtype).contiguous(), dw


def _y_dtype(dtype, weight, cast):
    """The dtype of the result for an x of this dtype."""
    if cast == "after" or weight is None:
        return dtype
    return torch.promote_types(dtype, weight.dtype)


# The op, its backward op and the fakes. dw is empty where it is not needed.


def _fake(x, weight, eps, offset, cast):
    y = x.new_empty(x.shape, dtype=_y_dtype(x.dtype, weight, cast))
    return y, x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


def _bwd_fake(dy, x, weight, rstd, offset, need_dw):
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if need_dw else x.new_empty(0)


RMS_NORM_BACK = define(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_dw) "
    "-> (Tensor dx, Tensor dw)",
    _bwd,
    "rms_norm.rms_norm_bwd",
    _bwd_fake,
    backward=no_second_derivative("rms_norm"),
)


def _setup_context(ctx, inputs, output):
    x, weight, _, ctx.offset, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _backward(ctx, dy, _):
    need_x, need_dw, *_ = ctx.needs_input_grad
    dx, dw = RMS_NORM_BACK(dy, *ctx.saved_tensors, ctx.offset, need_dw)
    return dx if need_x else None, dw if need_dw else None, None, None, None


RMS_NORM = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str cast) -> (Tensor y, Tensor rstd)",
    _fwd,
    "rms_norm.rms_norm_fwd",
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "before",
) -> Tensor:
    """(offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    Dtypes and values equal those of the transformers module that rounds in the same place.

    Args:
        x: [..., D], bf16, fp16 or fp32 (fp64 on the plain path).
        weight: [D], or None for 1.
        eps: added to the mean of squares.
        offset: added to the weight in float32; 1.0 for Gemma.
        cast: where the result is rounded to 16 bits, one of CASTS, which also decides the dtype of
            the result (see the top of this file). The default is Llama's; Gemma needs cast="after".

    Returns:
        [..., D], contiguous. It has one derivative.

    Raises:
        ValueError: for integers, where D differs, or for an unknown cast.

    Example:
        y = rms_norm(x, norm.weight, norm.variance_epsilon)
    """
    shape = None if weight is None else tuple(weight.shape)
    refuse(
        "rms_norm",
        (not x.dtype.is_floating_point,
         "x must be floating-point, got {}. Cast it first", x.dtype),
        (x.ndim == 0 or shape not in (None, x.shape[-1:]),
         "weight must be [D] or None for x [..., D], got weight {} and x {}. Normalise over the "
         "last dimension", shape, tuple(x.shape)),
        (cast not in CASTS,
         'cast must be one of {}, got {!r}. Use "before", as Llama does', ", ".join(CASTS), cast),
    )  # fmt: skip
    return RMS_NORM(x, weight, eps, offset, cast)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "before",
) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to their promoted dtype, and rms_norm(total, weight).

    Args:
        x, residual: [..., D].
        weight, eps, offset, cast: as in rms_norm.

    Returns:
        (normed, total), each [..., D].

    Raises:
        ValueError: as rms_norm.
    """
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset, cast=cast), total
