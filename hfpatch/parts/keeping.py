"""Gate and up, kept from a layer's forward for its backward, so they are not computed again.

A fused MLP passes its gate and up to `kept`. In a backward the kept values replace the recomputed
ones. Their gradients go to the projections, whose values are unread.
"""

import threading
from contextlib import contextmanager

import torch
from torch import Tensor


class _Here(threading.local):  # a second thread may run another model meanwhile
    lists: tuple[list | None, list | None] = (None, None)  # as of keeping: noted, known


_here = _Here()


@contextmanager
def keeping(noted: list | None, known: list | None):
    """A context for one run of a layer's part.

    Args:
        noted: a list that receives gate and up.
        known: gate and up, recorded earlier, which replace the computed ones.
    """
    before = _here.lists
    try:
        _here.lists = noted, known
        yield
    finally:
        _here.lists = before


class _InPlaceOf(torch.autograd.Function):
    """Returns `value`. Its gradient goes unchanged to `computed`."""

    @staticmethod
    def forward(ctx, value, computed):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, dy):
        return None, dy


_in_place_of = _InPlaceOf.apply


def kept(*values: Tensor) -> tuple[Tensor, ...]:
    """Records `values` if keeping() wants them. Returns them, or the kept ones."""
    noted, known = _here.lists
    if noted is not None:
        noted[:] = values
    if not known:
        return values
    return tuple(_in_place_of(k, v) for k, v in zip(known, values, strict=True))
