"""The error that `verify`, `prove` and the tests allow."""

import math

import torch
from torch import Tensor


def allowed_error(lost: float, step: float) -> float:
    """Twice the sum of what plain PyTorch loses in the same dtype and of one rounding step."""
    return 2.0 * (lost + step)


def share_of_allowed(got: Tensor, baseline: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The error of a result over the allowed one: above 1 it fails, and NaN is infinite.

    baseline: what plain PyTorch computes in the same dtype; its error counts up to a quarter of the
    largest value, so that zeros do not excuse zeros. exact: in float64. An exact result of zeros
    is infinite too: it shows nothing, and a device that computes nothing gives it.
    """
    exact = exact.to(got.device)
    largest = exact.abs().max().item()
    if largest == 0:
        return math.inf
    error = (got.double() - exact).abs().max().item()
    lost = (baseline.double() - exact).abs().max().item()
    share = error / allowed_error(min(lost, largest / 4), torch.finfo(dtype).eps * largest)
    return math.inf if math.isnan(share) else share
