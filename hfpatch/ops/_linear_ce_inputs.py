"""Checks of the arguments of the losses, and the shift of labels."""

import torch
from torch import Tensor

from hfpatch.compat import autocast_dtype
from hfpatch.ops._library import refuse


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels [..., T] moved one to the left, so position t predicts token t + 1.

    The last is ignored.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def check(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    shift: bool,
    *,
    softcap: float | None,
    scale: float = 1.0,
    temperature: float = 1.0,
    num_valid: int | None = None,
    reduction: str = "none",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.dtype:
    """Checks the inputs of a head, its labels and the options of a loss.

    Args:
        op: the name for messages.
        hidden, weight, bias: [..., D], [V, D], [V].
        labels: [...].

    Returns:
        The dtype of the logits that F.linear would return under the current autocast.
    """
    V, b = tuple(weight.shape[:1]), weight if bias is None else bias
    dtypes = hidden.dtype, weight.dtype, b.dtype
    wanted, found, inf = tuple(hidden.shape[:-1]), tuple(labels.shape), float("inf")
    floating = hidden.is_floating_point() and weight.is_floating_point() and b.is_floating_point()
    cast = None if torch.float64 in dtypes[:2] else autocast_dtype(hidden.device.type)
    refuse(
        op,
        (weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:],
         "hidden must be [..., D] and weight [V, D], got {} and {}. Check the head",
         tuple(hidden.shape), tuple(weight.shape)),
        (bias is not None and bias.shape != V,
         "bias must have shape {}, got {}. Check the head", V, tuple(b.shape)),
        (not floating,
         "hidden, weight and bias must be floating-point, got {}, {} and {}. Dequantise them first",
         *dtypes),
        (cast is None and not hidden.dtype == weight.dtype == b.dtype,
         "hidden, weight and bias must have one dtype, got {}, {} and {}. Cast them or use "
         "torch.autocast", *dtypes),
        (found != wanted, "labels must have shape {}, got {}. Give one label for each row",
         wanted, found),
        (labels.dtype not in (torch.int64, torch.int32),
         "labels must be int64 or int32, got {}. For class probabilities use "
         "torch.nn.functional.cross_entropy", labels.dtype),
        (shift and not wanted, "shift needs labels [..., T], got a scalar. Leave shift out"),
        (not 0.0 < scale < inf,
         "scale must be finite and more than 0, got {}. 1 leaves the logits unscaled", scale),
        (not 0.0 < temperature < inf,
         "temperature must be finite and more than 0, got {}. 1 leaves the logits unscaled",
         temperature),
        (softcap is not None and not softcap > 0.0,
         "softcap must be more than 0 or None, got {}. None turns it off", softcap),
        (num_valid is not None and num_valid < 0,
         "num_valid must be 0 or more, got {}. Count the labels that are not ignore_index",
         num_valid),
        (reduction not in ("mean", "sum", "none"),
         'reduction must be "mean", "sum" or "none", got {!r}. Choose one', reduction),
        (num_items is not None and reduction == "none",
         'num_items does not go with reduction="none". Divide the result, or ask for a sum'),
        (not 0.0 <= label_smoothing <= 1.0,
         "label_smoothing must be from 0 to 1, got {}. 0 turns it off", label_smoothing),
        (not z_loss >= 0.0, "z_loss must be 0 or more, got {}. 0 turns it off", z_loss),
    )  # fmt: skip
    return cast or hidden.dtype
