"""RMSNorm, alone or with the residual sum before it.

Legend: B batch, T tokens, N = all leading dims together, D hidden.

    rstd = 1 / sqrt(mean(x^2) + eps)        x_hat = x * rstd        g = dy * (offset + weight)
    offset 0 (Llama):  y = weight * x_hat.to(x.dtype)               result: promote(x, weight), as HF's module gives
    offset 1 (Gemma):  y = (x_hat * (1 + weight)).to(x.dtype)       result: x.dtype
    dx = rstd * (g - x_hat * mean(g * x_hat))                       dweight = sum over N of dy * x_hat
Only rstd is saved beside the inputs.
"""

import torch
from torch import Tensor

from hfpatch.ops._library import define, no_second_derivative, use_kernel, wide_dtype

MAX_KERNEL_WIDTH = 16384  # a row lives in one program's registers; wider rows take the plain path


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Plain torch, differentiable any number of times; float64 stays float64."""
    return _plain_fwd(x, weight, eps, offset)[0]


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_ref(total, weight, eps, offset=offset), total


def _plain_fwd(x, weight, eps, offset):
    x_wide = x.to(wide_dtype(x.dtype))
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    x_hat = x_wide * rstd
    if offset:
        y = (x_hat * (offset + weight.to(x_hat.dtype))).to(x.dtype)
    else:
        y = weight * x_hat.to(x.dtype)
    return y, rstd.squeeze(-1)


def _plain_bwd(dy, dsum, x, weight, rstd, offset, need_dx, need_dw):
    wide = wide_dtype(x.dtype, weight.dtype)
    dy, rstd = dy.to(wide), rstd.to(wide).unsqueeze(-1)
    x_hat = x.to(wide) * rstd
    dx = dw = None
    if need_dw:
        dw = (dy * x_hat).flatten(0, -2).sum(0).to(weight.dtype) if x.dim() > 1 else (dy * x_hat).to(weight.dtype)
    if need_dx:
        g = dy * (offset + weight.to(wide))
        dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        dx = (dx if dsum is None else dx + dsum).to(x.dtype)
    return dx, dw


def _y_dtype(x, weight, offset):
    return x.dtype if offset else torch.promote_types(x.dtype, weight.dtype)


def _kernel_serves(x, weight, *others):
    return 0 < x.shape[-1] <= MAX_KERNEL_WIDTH and x.numel() > 0 and use_kernel(x, weight, *others)


# The op, its backward op, their fakes. A gradient that nobody needs is an empty tensor.


def _rms_norm(x, weight, eps, offset):
    if _kernel_serves(x, weight):
        from hfpatch.kernels import rms_norm as kernels

        return kernels.rms_norm_fwd(x, None, weight, eps, offset, _y_dtype(x, weight, offset))[:2]
    y, rstd = _plain_fwd(x, weight, eps, offset)
    return y.contiguous(), rstd.contiguous()


def _rms_norm_fake(x, weight, eps, offset):
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=_y_dtype(x, weight, offset)), rstd


def _add_rms_norm(x, residual, weight, eps, offset):
    if _kernel_serves(x, weight, residual):
        from hfpatch.kernels import rms_norm as kernels

        dtype = torch.promote_types(x.dtype, residual.dtype)
        y_dtype = dtype if offset else torch.promote_types(dtype, weight.dtype)
        return kernels.rms_norm_fwd(x, residual, weight, eps, offset, y_dtype)
    total = (x + residual).contiguous()
    y, rstd = _plain_fwd(total, weight, eps, offset)
    return y, rstd, total


def _add_rms_norm_fake(x, residual, weight, eps, offset):
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return (*_rms_norm_fake(total, weight, eps, offset), total)


def _rms_norm_bwd(dy, dsum, x, weight, rstd, offset, need_dx, need_dw):
    if _kernel_serves(x, weight, dy, dsum):
        from hfpatch.kernels import rms_norm as kernels

        dx, dw = kernels.rms_norm_bwd(dy, dsum, x, weight, rstd, offset, need_dx, need_dw)
    else:
        dx, dw = _plain_bwd(dy, dsum, x, weight, rstd, offset, need_dx, need_dw)
    dx = x.new_empty(0) if dx is None else dx.contiguous()
    return dx, weight.new_empty(0) if dw is None else dw


def _rms_norm_bwd_fake(dy, dsum, x, weight, rstd, offset, need_dx, need_dw):
    return x.new_empty(x.shape if need_dx else 0), weight.new_empty(weight.shape if need_dw else 0)


_BWD = define(
    "rms_norm_bwd(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor rstd, float offset, "
    "bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    _rms_norm_bwd,
    _rms_norm_bwd_fake,
    backward=no_second_derivative("rms_norm"),
)


def _setup_context(ctx, inputs, output):
    x, weight, _, ctx.offset = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _):
    if dy is None:
        return None, None, None, None
    need_dx, need_dw, *_ = ctx.needs_input_grad
    dx, dw = _BWD(dy, None, *ctx.saved_tensors, ctx.offset, need_dx, need_dw)
    return dx if need_dx else None, dw if need_dw else None, None, None


def _add_setup_context(ctx, inputs, output):
    x, residual, weight, _, ctx.offset = inputs
    ctx.set_materialize_grads(False)
    # The sum carries a gradient only where a term does.
    ctx.mark_non_differentiable(*(output[1:] if not any(ctx.needs_input_grad[:2]) else output[1:2]))
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(output[2], weight, output[1])


def _add_backward(ctx, dy, _, dsum):
    need_x, need_residual, need_dw, *_ = ctx.needs_input_grad
    need_dx = need_x or need_residual
    dx, dw = dsum, None
    if dy is not None:
        dx, dw = _BWD(dy, dsum, *ctx.saved_tensors, ctx.offset, need_dx, need_dw)
    need_dx, need_dw = need_dx and dx is not None, need_dw and dw is not None
    return (
        dx.to(ctx.dtypes[0]) if need_x and need_dx else None,
        dx.to(ctx.dtypes[1]) if need_residual and need_dx else None,
        dw if need_dw else None,
        None,
        None,
    )


_FWD = define(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor y, Tensor rstd)",
    _rms_norm,
    _rms_norm_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_ADD = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) "
    "-> (Tensor y, Tensor rstd, Tensor total)",
    _add_rms_norm,
    _add_rms_norm_fake,
    backward=_add_backward,
    setup_context=_add_setup_context,
)


def _check(x, weight):
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"hfpatch: rms_norm expects weight [D] for x [..., D], came weight {list(weight.shape)} and x "
            f"{list(x.shape)}; normalise over the last dimension."
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    x: [..., D], bf16/fp16/fp32 (fp64 on the plain path); weight: [D]; offset: 0.0 for Llama's order (x_hat is rounded
    to x.dtype, then multiplied), 1.0 for Gemma's ((1 + weight) in float32, rounded once).
    Returns [..., D] contiguous, of dtype promote(x, weight) at offset 0, else x.dtype. ValueError where D differs.
    Same dtypes and values as transformers' LlamaRMSNorm and GemmaRMSNorm. One derivative.
    """
    _check(x, weight)
    return _FWD(x, weight, eps, offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """total = x + residual and rms_norm(total, weight), in one pass. Returns (normed, total).

    x, residual: [..., D], the same shape; the sum has their promoted dtype. Everything else as rms_norm.
    """
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(
            f"hfpatch: add_rms_norm expects x and residual of one shape, came {list(x.shape)} and "
            f"{list(residual.shape)}; expand the smaller one."
        )
    y, _, total = _ADD(x, residual, weight, eps, offset)
    return y, total
