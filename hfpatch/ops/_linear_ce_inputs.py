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
    wanted, came, inf = tuple(hidden.shape[:-1]), tuple(labels.shape), float("inf")
    floating = hidden.is_floating_point() and weight.is_floating_point() and b.is_floating_point()
    cast = None if torch.float64 in dtypes[:2] else autocast_dtype(hidden.device.type)
    refuse(
        op,
        (weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:],
         "hidden [..., D] and weight [V, D], {} and {} came; check the head",
         tuple(hidden.shape), tuple(weight.shape)),
        (bias is not None and bias.shape != V,
         "a bias of shape {}, {} came; check the head", V, tuple(b.shape)),
        (not floating,
         "floating-point hidden, weight and bias, {}, {} and {} came; dequantise first", *dtypes),
        (cast is None and not hidden.dtype == weight.dtype == b.dtype,
         "hidden, weight and bias of one dtype, {}, {} and {} came; cast them or use "
         "torch.autocast", *dtypes),
        (came != wanted, "labels of shape {}, {} came; give one label for each row", wanted, came),
        (labels.dtype not in (torch.int64, torch.int32),
         "int64 or int32 labels, {} came; class probabilities need "
         "torch.nn.functional.cross_entropy", labels.dtype),
        (shift and not wanted, "labels [..., T] for shift, a scalar came; drop it"),
        (not 0.0 < scale < inf,
         "a finite scale > 0, {} came; 1 leaves the logits as they are", scale),
        (not 0.0 < temperature < inf,
         "a finite temperature > 0, {} came; 1 leaves the logits as they are", temperature),
        (softcap is not None and not softcap > 0.0,
         "softcap > 0 or None, {} came; None turns it off", softcap),
        (num_valid is not None and num_valid < 0,
         "num_valid >= 0, {} came; count the labels that are not ignore_index", num_valid),
        (reduction not in ("mean", "sum", "none"),
         'reduction "mean", "sum" or "none", {!r} came; choose one', reduction),
        (num_items is not None and reduction == "none",
         'no num_items with reduction="none", both came; divide the result, or ask for a sum'),
        (not 0.0 <= label_smoothing <= 1.0,
         "label_smoothing in [0, 1], {} came; 0 turns it off", label_smoothing),
        (not z_loss >= 0.0, "z_loss >= 0, {} came; 0 turns it off", z_loss),
    )  # fmt: skip
    return cast or hidden.dtype
