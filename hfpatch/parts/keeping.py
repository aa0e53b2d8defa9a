"""Values inside a layer that are kept from its forward for its backward, so they are not computed
again.

Fused MLPs and the common block store and look up such values by name (budget/policy.py: KEEPABLE).
In the backward a kept value replaces the recomputed one. Its gradient goes to the tensors it was
computed from; the values of these tensors are unread.
"""

import threading
from contextlib import contextmanager

import torch
from torch import Tensor


class _Here(threading.local):  # a second thread may run another model meanwhile
    noted, known = {}, {}


_here = _Here()


@contextmanager
def keeping(noted: dict, known: dict):
    """A context for one run of a layer's part.

    Args:
        noted: a dict whose keys are the names to record. It receives the values.
        known: name -> values recorded earlier, which replace the computed ones.
    """
    before = _here.noted, _here.known
    _here.noted, _here.known = noted, known
    try:
        yield
    finally:
        _here.noted, _here.known = before


class _InPlaceOf(torch.autograd.Function):
    """Returns `value`.

    Its gradient goes unchanged to each of `parts`, the terms of the sum that it is.
    """

    @staticmethod
    def forward(ctx, value, *parts):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dy):
        return None, *(dy,) * (len(ctx.needs_input_grad) - 1)


_in_place_of = _InPlaceOf.apply


def known_sum(name: str, *parts: Tensor) -> Tensor | None:
    """The kept sum of `parts` by that name, or None. Gradients go to the parts."""
    value = _here.known.get(name)
    return None if value is None else _in_place_of(value[0], *parts)


def unread_sum(*parts: Tensor) -> Tensor:
    """Replaces the sum of `parts` where its value is unread: costs no memory traffic."""
    return _in_place_of(parts[0], *parts)


def note(name: str, *values: Tensor) -> None:
    if name in _here.noted:
        _here.noted[name] = values


def kept(name: str, *values: Tensor) -> tuple[Tensor, ...]:
    """Records `values` if keeping() wants them. Returns them, or the kept values of that name."""
    note(name, *values)
    known = _here.known.get(name)
    return (
        values
        if known is None
        else tuple(_in_place_of(k, v) for k, v in zip(known, values, strict=True))
    )
