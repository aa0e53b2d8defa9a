"""Cross-entropy of existing logits: one pass for the loss, one for the gradient, no float32 copy.

Legend: N tokens, V vocabulary. Arithmetic and kernels are those of linear_cross_entropy
(_linear_ce_chunk.py). The backward reads the logits and writes a gradient of their dtype. If the
logits need not exist, use linear_cross_entropy.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.ops._library import define, no_second_derivative, refuse, use_kernel, wide_dtype
from hfpatch.ops._linear_ce_chunk import cross_entropy_chunk_bwd_plain_, cross_entropy_chunk_plain_
from hfpatch.ops._linear_ce_inputs import check_loss, shift_labels
from hfpatch.ops._linear_ce_loop import Options, check_labels, divisor, loss_factors

SCHEMA = "int ignore_index, float smoothing, float inner, float outer, float z_loss"


class CrossEntropyOutput(NamedTuple):
    """The loss with further outputs. Fields that were not requested are None."""

    loss: Tensor
    accuracy: (
        Tensor | None
    )  # like labels, bool: the label has the first largest logit; False where ignored
    predicted: Tensor | None  # like labels: the word with the first largest logit; -1 where ignored

    @classmethod
    def of(
        cls, loss, best_N, labels, ignore_index, accuracy: bool = True, predicted: bool = True
    ) -> "CrossEntropyOutput":
        """best_N: int32, -1 where ignored. accuracy, predicted: whether to return each field."""
        best = best_N.view(labels.shape)
        return cls(
            loss,
            (best == labels) & (labels != ignore_index) if accuracy else None,
            best.to(labels.dtype) if predicted else None,
        )


def cross_entropy_ref(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
) -> CrossEntropyOutput:
    """cross_entropy in plain torch, with any number of derivatives. The oracle in float64."""
    labels = shift_labels(labels, ignore_index) if shift else labels
    z = logits.to(wide_dtype(logits.dtype)).reshape(-1, logits.shape[-1])
    z = softcap * torch.tanh(z / softcap) if softcap else z
    if class_weight is not None:
        class_weight = class_weight.to(z.device, z.dtype)
    labels_N = labels.reshape(-1).long()
    keep_N = labels_N != ignore_index
    lse_N = z.logsumexp(-1) * keep_N
    token_loss_N = F.cross_entropy(
        z,
        labels_N,
        class_weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    token_loss_N = token_loss_N + z_loss * lse_N.square()
    best_N = z.argmax(-1).masked_fill(~keep_N, -1)
    if reduction == "none":
        loss = token_loss_N.reshape(labels.shape)
    elif num_items is not None:
        loss = token_loss_N.sum() / num_items
    else:
        share_N = keep_N if class_weight is None else class_weight[labels_N * keep_N] * keep_N
        loss = token_loss_N.sum() / share_N.sum() if reduction == "mean" else token_loss_N.sum()
    return CrossEntropyOutput.of(loss, best_N, labels, ignore_index)


# The op, its backward op and their fakes: one loss per token. Absent outputs are empty tensors.


def _op(logits, labels, class_weight, best, ignore_index, *options):
    check_labels(labels, logits.shape[1], ignore_index)
    loss_N = logits.new_zeros(labels.shape, dtype=wide_dtype(logits.dtype))
    lse_2N = loss_N.new_zeros(2, *labels.shape)
    best_N = labels.new_full(labels.shape if best else (0,), -1, dtype=torch.int32)
    run = cross_entropy_chunk_plain_
    if use_kernel(logits):
        from hfpatch.kernels.cross_entropy import cross_entropy_fwd as run
    outputs = loss_N, lse_2N, best_N if best else None, None
    scale = loss_N.new_ones(())  # the gradient is computed in the backward
    run(logits, labels, scale, class_weight, *outputs, ignore_index, *options, False)
    return loss_N, lse_2N, best_N


def _op_fake(logits, labels, class_weight, best, *options):
    loss_N = logits.new_empty(labels.shape, dtype=wide_dtype(logits.dtype))
    return (
        loss_N,
        loss_N.new_empty(2, *labels.shape),
        labels.new_empty(labels.shape if best else 0, dtype=torch.int32),
    )


def _op_bwd(dloss, logits, labels, class_weight, lse, *options):
    opts = Options(*options, logits.shape[1], logits.dtype)
    rows = loss_factors(dloss, labels, lse, class_weight, opts)
    settings = labels, rows, class_weight, opts.ignore_index, opts.inner, opts.outer
    if use_kernel(logits):
        from hfpatch.kernels.cross_entropy import cross_entropy_bwd

        d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        cross_entropy_bwd(logits, d_logits, *settings)
    else:
        d_logits = logits.clone(memory_format=torch.contiguous_format)
        cross_entropy_chunk_bwd_plain_(d_logits, *settings)
    return d_logits


def _op_setup(ctx, inputs, output):
    logits, labels, class_weight, _, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, labels, class_weight, output[1])


def _op_backward(ctx, dloss, *_):
    d_logits = None if dloss is None else _bwd(dloss, *ctx.saved_tensors, *ctx.options)
    return d_logits, *[None] * (3 + len(ctx.options))


_bwd = define(
    "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor labels, Tensor? class_weight,"
    f" Tensor lse, {SCHEMA}) -> Tensor",
    _op_bwd,
    lambda dloss, logits, *others: torch.empty_like(logits, memory_format=torch.contiguous_format),
    backward=no_second_derivative("cross_entropy"),
)
_fwd = define(
    f"cross_entropy(Tensor logits, Tensor labels, Tensor? class_weight, bool best, {SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    _op,
    _op_fake,
    backward=_op_backward,
    setup_context=_op_setup,
)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    return_accuracy: bool = False,
    return_predicted: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy of logits and labels, computed in float32.

    Args:
        logits: [..., V], bf16, fp16 or fp32 (fp64 on the plain path).
        labels: [...], int64 or int32, in [0, V) or ignore_index.
        class_weight, ignore_index, reduction, num_items, label_smoothing, softcap, z_loss, shift,
            return_accuracy, return_predicted: as in linear_cross_entropy.

    Returns:
        As linear_cross_entropy. The gradient is a new tensor of the logits' dtype.

    Raises:
        ValueError: as linear_cross_entropy.
        RuntimeError: for a second derivative; use cross_entropy_ref.

    Example:
        loss = cross_entropy(logits_BTV, labels_BT, shift=True)
    """
    op, dtype, came = "cross_entropy", logits.dtype, tuple(logits.shape)
    floating = dtype.is_floating_point and bool(came)
    message = "floating-point logits [..., V], {} {} came; check the head"
    refuse(op, (not floating, message, dtype, came))
    vocab_size = came[-1]
    check_loss(
        op, logits, vocab_size, labels, shift, softcap=softcap, class_weight=class_weight,
        reduction=reduction, num_items=num_items, label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(logits.device, wide_dtype(dtype)).contiguous()
    inner, outer = 1.0 / softcap if softcap else 0.0, softcap or 1.0
    options = ignore_index, label_smoothing, inner, outer, z_loss
    logits_NV, labels_N = logits.reshape(-1, vocab_size), labels.reshape(-1)
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    best = return_accuracy or return_predicted
    token_loss_N, _, best_N = _fwd(logits_NV, labels_N, class_weight, best, *options)
    if reduction == "none":
        loss = token_loss_N.view(labels.shape)
    else:
        opts = Options(*options, vocab_size, dtype, reduction)
        loss = token_loss_N.sum() / divisor(labels_N, class_weight, num_items, opts, logits.device)
    if not best:
        return loss
    return CrossEntropyOutput.of(
        loss, best_N, labels, ignore_index, return_accuracy, return_predicted
    )
