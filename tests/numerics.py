"""Error budgets derived from the data: a result may err at most twice what plain PyTorch errs in
the same dtype.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from hfpatch.lab.budget import allowed_error


def budget(
    plain: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype | None = None,
    largest: float | None = None,
) -> float:
    """Twice the sum of what plain PyTorch loses in the working dtype and one rounding step of the
    largest value.

    plain: the plain result in the working dtype; exact: the same in float64; dtype: the working
    dtype where it is not plain's own (a float32 gradient of a bfloat16 computation, say). largest:
    the largest value, where it is not exact's own: of the terms of a difference, which may be 0.
    """
    exact = exact.double()
    lost = (plain.double() - exact).abs().max().item() if exact.numel() else 0.0
    if largest is None:
        largest = exact.abs().max().item() if exact.numel() else 0.0
    return allowed_error(lost, torch.finfo(dtype or plain.dtype).eps * largest)


def assert_close(
    got: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    what: str = "result",
    dtype=None,
    largest: float | None = None,
) -> None:
    """got against exact (float64), within budget(plain, exact). NaN never passes; shape must
    match.
    """
    assert got.shape == exact.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    )
    allowed = budget(plain, exact, dtype, largest)
    error = (got.double() - exact.double()).abs().max().item() if exact.numel() else 0.0
    assert error <= allowed, f"{what}: error {error:.3e} exceeds the budget {allowed:.3e}"


@contextmanager
def lifted():
    """Within, modeling files cast to float64 where they cast to float32, in backward too."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
