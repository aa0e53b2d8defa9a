"""Modules whose output nobody reads: in a backward that runs a layer again, some values only lead to gradients of others.

The last projection's output in `post` is added to the residual and no gradient asks for the sum; a q, k or v projection's in
`pre` is rotated, and a rotation's backward wants the angles alone. Such a Linear answers with an expanded constant and keeps its
ordinary backward, so every gradient stays as it is, to the bit. Which ones these are is asked (models/verdict.py), not written.
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


def can_go_without(module: nn.Module) -> bool:
    """Whether this is a plain Linear with a plain weight here and now."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and not hasattr(module.weight, "placements")
    )


def idle(layer: nn.Module, names, device: str = "cpu", value: float = 0.0) -> list:
    """What `without_values` takes: the named Linears of the layer and the forward that answers with an expanded `value`.

    Those that are no plain Linear here and now are left out, and compute.
    """
    if torch.is_autocast_enabled(device):  # whose casts are F.linear's own
        return []
    modules = (m for m in map(layer.get_submodule, dict.fromkeys(names)) if can_go_without(m))
    return [(vars(m), partial(_valueless_forward, m, value)) for m in modules]


@contextmanager
def without_values(idle: list):
    """Within, the idle Linears compute nothing."""
    for attributes, forward in idle:
        attributes["forward"] = forward
    try:
        yield
    finally:
        for attributes, _ in idle:
            attributes.pop("forward", None)
