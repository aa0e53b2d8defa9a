"""Modules whose output nobody reads: in a backward that runs a layer again, some values only lead to gradients of others.

The last projection's output in `post` is added to the residual and no gradient asks for the sum; a q, k or v projection's in
`pre` is rotated, and a rotation's backward wants the angles alone. Such a Linear answers with an expanded constant and keeps its
ordinary backward, so every gradient stays as it is, to the bit. Which ones these are is asked (models/verdict.py), not written.
Under LoRA it is the base of such a Linear, to whose value the adapter adds its own; a rotation of such values hands one on.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class _Valueless(torch.autograd.Function):
    """F.linear's backward under a forward without a matmul."""

    @staticmethod
    def forward(ctx, x, weight, bias, value):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return x.new_full((), value).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy_NO, x_NI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dy_NO.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = dy_NO.t().mm(x_NI) if ctx.needs_input_grad[1] else None
        return dx, dw, dy_NO.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None, None


def _valueless_forward(module: nn.Linear, value: float, input: Tensor) -> Tensor:
    """Stands for `module.forward` while its values are not wanted."""
    return _Valueless.apply(input, module.weight, module.bias, value)


class DeadRotation(torch.autograd.Function):
    """The fused rotation's backward under a forward that moves nothing. q_BHTE, k_BKTE: expanded constants."""

    @staticmethod
    def forward(ctx, q_BHTE, k_BKTE, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q_BHTE.dtype
        wide = torch.promote_types(q_BHTE.dtype, cos.dtype)
        return tuple(x.new_zeros((), dtype=wide).expand(x.shape) for x in (q_BHTE, k_BKTE))

    @staticmethod
    def backward(ctx, dq_BHTE, dk_BKTE):
        cos, sin = ctx.saved_tensors
        return *torch.ops.hfpatch.rope(dq_BHTE, dk_BKTE, cos, sin, True, ctx.dtype), None, None


def is_dead(x: Tensor) -> bool:
    """Whether this is a constant that stands for a value nobody reads."""
    return not any(x.stride())


def _idle(module: nn.Module) -> nn.Module | None:
    """The Linear that need not be computed where this module's value is not read."""
    if type(module).__module__ == "peft.tuners.lora.layer" and not module.lora_variant:
        module = module.base_layer
    return module if can_go_without(module) else None


def can_go_without(module: nn.Module) -> bool:
    """Whether this is a plain Linear with a plain weight here and now."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not hasattr(module.weight, "placements")
    )


@contextmanager
def without_values(layer: nn.Module, names, value: float = 0.0, device: str = "cpu"):
    """Within, the named Linears of the layer answer with an expanded `value`. Those that are no plain Linear by now compute."""
    idle = []
    if names and not torch.is_autocast_enabled(device):  # whose casts are F.linear's own
        idle = [m for name in names if (m := _idle(layer.get_submodule(name))) is not None]
    for module in idle:
        module.__dict__["forward"] = partial(_valueless_forward, module, value)
    try:
        yield
    finally:
        for module in idle:
            del module.__dict__["forward"]
