"""Checks of the arguments of linear_cross_entropy and linear_log_prob, and the shift of labels."""

import torch
from torch import Tensor

from hfpatch.compat import autocast_dtype
from hfpatch.ops._library import wide_dtype


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels [..., T] moved one to the left, so position t predicts token t + 1.

    The last is ignored.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def refuse(op: str, expected: str, came: object, advice: str):
    raise ValueError(f"hfpatch: {op} expected {expected}, {came} came; {advice}.")


def logits_dtype(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype in which F.linear would return the logits under the current autocast."""
    cast = autocast_dtype(hidden.device.type)
    if cast is not None and torch.float64 not in (hidden.dtype, weight.dtype):
        return cast
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if len(set(dtypes)) > 1:
        came = ", ".join(map(str, dtypes))
        refuse(op, "hidden, weight and bias of one dtype", came, "cast them or use torch.autocast")
    return hidden.dtype


def check_head(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
) -> None:
    """Checks shapes and dtypes of the head's inputs, and that each row has a label."""
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        came = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        refuse(op, "hidden [..., D] and weight [V, D]", came, "check the head")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(
            op, f"a bias of shape {tuple(weight.shape[:1])}", tuple(bias.shape), "check the head"
        )
    if not all(t is None or t.is_floating_point() for t in (hidden, weight, bias)):
        refuse(
            op,
            "floating-point hidden, weight and bias",
            f"{hidden.dtype} and {weight.dtype}",
            "dequantise first",
        )
    check_labels_like(op, hidden, labels, shift)


def check_labels_like(op: str, rows: Tensor, labels: Tensor, shift: bool) -> None:
    """Checks that labels has one integer for each row of rows [..., D or V]."""
    if labels.shape != rows.shape[:-1]:
        refuse(
            op,
            f"labels of shape {tuple(rows.shape[:-1])}",
            tuple(labels.shape),
            "give one label for each row",
        )
    if labels.dtype not in (torch.int64, torch.int32):
        advice = "class probabilities need torch.nn.functional.cross_entropy"
        refuse(op, "int64 or int32 labels", labels.dtype, advice)
    if shift and labels.dim() == 0:
        refuse(op, "labels [..., T] for shift", "a scalar", "drop it")


def check_shard(op: str, weight: Tensor, shard) -> int:
    """The size of the vocabulary.

    Checks that weight has this rank's rows; shard: a VocabShard or None.
    """
    if shard is None:
        return weight.shape[0]
    if weight.shape[0] != shard.stop - shard.start:
        advice = "split the vocabulary as torch.chunk does"
        refuse(
            op, f"{shard.stop - shard.start} rows of this rank's weight", weight.shape[0], advice
        )
    return shard.size


def check_options(
    op: str,
    *,
    softcap: float | None,
    scale: float = 1.0,
    temperature: float = 1.0,
    num_valid: int | None = None,
) -> None:
    for name, value in (("scale", scale), ("temperature", temperature)):
        if not 0.0 < value < float("inf"):
            refuse(op, f"a finite {name} > 0", value, "1 leaves the logits as they are")
    if softcap is not None and not softcap > 0.0:
        refuse(op, "softcap > 0 or None", softcap, "None turns it off")
    if num_valid is not None and num_valid < 0:
        refuse(op, "num_valid >= 0", num_valid, "count the labels that are not ignore_index")


def check_loss(
    op: str, vocab_size: int, class_weight, reduction, num_items, label_smoothing, z_loss
) -> None:
    if reduction not in ("mean", "sum", "none"):
        refuse(op, 'reduction "mean", "sum" or "none"', repr(reduction), "choose one")
    if num_items is not None and reduction == "none":
        refuse(
            op, 'no num_items with reduction="none"', "both", "divide the result, or ask for a sum"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        refuse(op, "label_smoothing in [0, 1]", label_smoothing, "0 turns it off")
    if not z_loss >= 0.0:
        refuse(op, "z_loss >= 0", z_loss, "0 turns it off")
    if class_weight is not None and class_weight.shape != (vocab_size,):
        refuse(
            op,
            f"class_weight of shape {(vocab_size,)}",
            tuple(class_weight.shape),
            "give one weight a word",
        )
    if class_weight is not None and class_weight.requires_grad:
        refuse(op, "class_weight without a gradient", "requires_grad=True", "detach it")


def as_class_weight(class_weight: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """class_weight on the device of `like`, contiguous, in the dtype that the loss is computed
    in."""
    return (
        None
        if class_weight is None
        else class_weight.to(like.device, wide_dtype(dtype)).contiguous()
    )


def as_num_items(num_items: int | Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    if num_items is None or isinstance(num_items, Tensor):
        return num_items
    return torch.full((), num_items, dtype=wide_dtype(dtype), device=like.device)
