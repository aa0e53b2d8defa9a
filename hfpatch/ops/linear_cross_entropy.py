"""Cross-entropy of hidden @ weight.T without whole logits: a language model's head and its loss in
one op.

Legend: B batch, T tokens, N = B*T tokens, D hidden size, V vocabulary. Logits exist for a few
thousand tokens at a time (_linear_ce_loop.py). A small in-place op turns them into their own
gradient (_linear_ce_chunk.py, kernels/cross_entropy.py).

When the gradients are computed:
- A scalar loss: in the forward, while the logits exist. The logits are computed once, three matmuls
  in all. The backward multiplies the gradients by the upstream scalar, which costs nothing if it is
  1.
- reduction="none", or logits in float16: in the backward, from logits computed a second time (four
  matmuls), by linear_log_prob. With "none" each token has its own upstream gradient. In float16 the
  upstream gradient carries the GradScaler's factor, without which small gradients would vanish.

Under torch.compile the op runs outside the graph. Its body is aten calls and in-place ops, so a
simulator that follows allocations sees every buffer, also over fake tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.compat import autocast, is_fake, keeps_graph
from hfpatch.ops._library import no_second_derivative, wide_dtype
from hfpatch.ops._linear_ce_chunk import scale_
from hfpatch.ops._linear_ce_inputs import check, shift_labels
from hfpatch.ops._linear_ce_loop import Options, forward_pass
from hfpatch.ops.linear_log_prob import linear_log_prob


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
) -> Tensor:
    """linear_cross_entropy in plain torch, from whole logits, with any number of derivatives.

    The oracle in float64.
    """
    labels = shift_labels(labels, ignore_index) if shift else labels
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype)).reshape(-1, z.shape[-1])
    z = softcap * torch.tanh(z / softcap) if softcap else z
    labels_N = labels.reshape(-1).long()
    keep_N = labels_N != ignore_index
    token_loss_N = F.cross_entropy(
        z,
        labels_N,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    token_loss_N = token_loss_N + z_loss * (z.logsumexp(-1) * keep_N).square()
    if reduction == "none":
        return token_loss_N.reshape(labels.shape)
    if num_items is not None:
        return token_loss_N.sum() / num_items
    return token_loss_N.sum() / keep_N.sum() if reduction == "mean" else token_loss_N.sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the token losses over total_by. grad: whether autograd records."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, total_by, opts, grad):
        needs = ctx.needs_input_grad[:3] if grad else (False,) * 3
        ctx.set_materialize_grads(False)
        with autocast(hidden_ND.device.type, enabled=False):
            out = forward_pass(
                hidden_ND.detach(),
                weight_VD.detach(),
                None if bias_V is None else bias_V.detach(),
                labels_N,
                total_by,
                opts,
                needs,
            )
        ctx.save_for_backward(*out.grads)
        return out.total

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        grads = [None] * 3
        if dloss is not None:
            keep = keeps_graph()
            one = dloss.device.type == "cpu" and not is_fake(dloss) and bool(dloss == 1.0)
            for i, grad in enumerate(ctx.saved_tensors):
                if grad is not None:
                    grads[i] = grad.clone() if keep else grad  # another backward may follow
                    if not one:
                        scale_(grads[i], dloss)
        return *grads, *[None] * 4


# Under torch.compile the loss runs outside the graph: its loop over chunks depends on the labels.
_apply = torch.compiler.disable(_LinearCrossEntropy.apply)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    workspace_bytes: int = 512 << 20,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, labels), without whole logits.

    The values are those of a Linear head followed by transformers' `ForCausalLMLoss`, which takes
    the softmax of the bf16 logits in float32. hidden, weight and bias get gradients.

    Args:
        hidden: [..., D]. hidden, weight and bias share one floating dtype; under autocast they may
            have any and are computed in autocast's. Autocast copies the weight, as it does for the
            stock head.
        weight: [V, D].
        labels: [...], int64 or int32, each in [0, V) or ignore_index.
        bias: [V].
        ignore_index: the label of tokens that have no loss.
        reduction: "mean" divides the sum of the token losses by the number of labels that are not
            ignored, "sum" returns the sum, "none" a loss per token.
        num_items: an int, or a tensor with one element on any device. Divides the sum in place of
            the number of labels, as transformers' num_items_in_batch does; also with "sum". Without
            any label the mean is nan, and the loss with num_items is 0, as in transformers; the
            gradients are zero in both.
        num_valid: an upper bound, known on the host, of the number of labels (after the shift) that
            are not ignored. Tokens beyond it are dropped before the matmuls. Without it labels on
            the CPU are counted; on a GPU every token is kept, because counting would wait for the
            device.
        label_smoothing: as in torch.nn.functional.cross_entropy.
        softcap: logits become softcap * tanh(logits / softcap), in float32.
        z_loss: adds z_loss * lse^2 to each token's loss, as Liger's lse_square_scale.
        shift: position t is scored against labels[..., t + 1]; the last position of a row is
            ignored.
        workspace_bytes: how much may be allocated beyond the gradients; limits the number of tokens
            whose logits exist at a time. If a 16-bit weight's gradient is summed over several
            chunks, the sum is float32.

    Returns:
        The loss: a float32 scalar (float64 for float64 inputs), or shaped like labels for
        reduction="none". Log-probabilities, entropies, lse and whether a label has the largest
        logit come from linear_log_prob, per token.

    Raises:
        ValueError: a label out of range (on a GPU a device-side assertion), or shapes, dtypes or
            options that do not fit.
        RuntimeError: in the backward, for create_graph=True. There is no second derivative; use
            linear_cross_entropy_ref.

    torch.nn.functional.linear_cross_entropy (torch 2.13) also works in chunks. Prefer it for class
    probabilities or weights, several label dimensions, or (with options=None) second derivatives
    and torch.func. It has no num_items, softcap, z_loss or shift, sends ignored tokens through every
    matmul, returns to whole logits for label smoothing, refuses a second backward unless asked, and
    by default sums the gradient of a 16-bit weight in 16 bits on CUDA.

    Example:
        loss = linear_cross_entropy(hidden_BTD, head.weight, labels_BT, shift=True)
    """
    op = "linear_cross_entropy"
    dtype = check(
        op, hidden, weight, labels, bias, shift,
        softcap=softcap, num_valid=num_valid, reduction=reduction, num_items=num_items,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    place = {"dtype": wide_dtype(dtype), "device": hidden.device}
    if isinstance(num_items, Tensor):
        total_by = num_items.detach().to(**place, non_blocking=True).reshape(())
    elif num_items is None and reduction == "mean":
        total_by = (labels != ignore_index).sum().to(**place)
    else:
        total_by = torch.full((), 1 if num_items is None else num_items, **place)
    if reduction == "none" or dtype == torch.float16:
        out = linear_log_prob(
            hidden, weight, labels, bias=bias, softcap=softcap, ignore_index=ignore_index,
            num_valid=num_valid,
            outputs=("log_prob", "lse", "mean_logit") if label_smoothing else ("log_prob", "lse"),
            workspace_bytes=workspace_bytes,
        )  # fmt: skip
        loss = z_loss * out.lse.square() - (1.0 - label_smoothing) * out.log_prob
        if label_smoothing:
            loss = loss + label_smoothing * (out.lse - out.mean_logit)
        return loss if reduction == "none" else loss.sum() / total_by
    opts = Options(
        ignore_index, label_smoothing, 1.0 / softcap if softcap else 0.0, softcap or 1.0, z_loss,
        weight.shape[0], dtype, num_valid, workspace_bytes,
    )  # fmt: skip
    return _apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), total_by, opts,
        torch.is_grad_enabled(),
    )  # fmt: skip
