"""Values inside a layer that may wait for its backward: noted where they are made, given back where they are wanted.

Fused MLPs and the common block meet them by name (memory/policy.py: KEEPABLE). A value that is known stands for what would be
computed again: its gradient goes to what it was made of, whose own values nobody reads then.
"""

import threading
from contextlib import contextmanager

import torch
from torch import Tensor

from hfpatch.compat import applying


class _Here(threading.local):
    noted, known = {}, {}


_here = _Here()


@contextmanager
def keeping(noted: dict, known: dict):
    """Within, values are written down under the names that `noted` has, and those in `known` are given back."""
    before = _here.noted, _here.known
    _here.noted, _here.known = noted, known
    try:
        yield
    finally:
        _here.noted, _here.known = before


class _InPlaceOf(torch.autograd.Function):
    """A value, whose gradient goes to each of the tensors that it is the sum of."""

    @staticmethod
    def forward(ctx, value, *parts):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dy):
        return None, *(dy if wanted else None for wanted in ctx.needs_input_grad[1:])


_in_place_of = applying(_InPlaceOf)


def known_value(name: str) -> tuple[Tensor, ...] | None:
    """What is known under that name, None where nothing is."""
    return _here.known.get(name)


def known_sum(name: str, *parts: Tensor) -> Tensor | None:
    """The sum of the parts where it is known, else None."""
    value = known_value(name)
    return None if value is None else _in_place_of(value[0], *parts)


def unread_sum(*parts: Tensor) -> Tensor:
    """What stands for the sum of the parts where nobody reads its value: nothing is moved."""
    return _in_place_of(parts[0], *parts)


def note(name: str, *values: Tensor) -> None:
    if name in _here.noted:
        _here.noted[name] = values


def kept(name: str, *values: Tensor) -> tuple[Tensor, ...]:
    """The values, or what is known in their place."""
    note(name, *values)
    known = known_value(name)
    return values if known is None else tuple(_in_place_of(k, v) for k, v in zip(known, values, strict=True))
