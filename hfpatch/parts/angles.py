"""Rotary angles in float64, for positions at which float32 no longer tells fractions of a turn.

transformers multiplies positions and frequencies in float32: at position 2^20 an angle is off by up
to 0.03, at 2^23 by 0.25, where bfloat16 rounds cos and sin by 0.002. Frequencies stay float32: the
model was trained with their rounding, which is the same at all positions.
"""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hfpatch.context.classes import is_mixed, swap


class _Wide(TorchFunctionMode):
    """A mode in which casts to float32 give float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        if function is torch.Tensor.to:
            wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
            args, kwargs = tuple(map(wide, args)), {n: wide(x) for n, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


class WideRotary:
    """Mixed over a rotary embedding's class: its forward in float64, its results in x's dtype."""

    def forward(self, x, *args, **kwargs):
        if torch.compiler.is_compiling():
            return super().forward(x, *args, **kwargs)
        with _Wide():
            found = super().forward(x, *args, **kwargs)
        return tuple(y.to(x.dtype) for y in found) if isinstance(found, tuple) else found


def narrow(stack: nn.Module) -> list[nn.Module]:
    """The stack's rotary embeddings without float64 angles."""
    return [
        m
        for m in stack.modules()
        if type(m).__name__.endswith("RotaryEmbedding") and not is_mixed(m)
    ]


def widen(stack: nn.Module) -> list[nn.Module]:
    """Gives every rotary embedding float64 angles; returns them."""
    done = narrow(stack)
    for module in done:
        swap(module, WideRotary)
    return done
