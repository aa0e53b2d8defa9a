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
  matmuls). With "none" each token has its own upstream gradient. In float16 the upstream gradient
  carries the GradScaler's factor, without which small gradients would vanish.

Under torch.compile the op runs outside the graph. Its body is aten calls and in-place ops, so a
simulator that follows allocations sees every buffer, also over fake tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.compat import autocast, is_fake, keeps_graph
from hfpatch.ops._library import no_second_derivative, one_gradient, refuse, wide_dtype
from hfpatch.ops._linear_ce_chunk import scale_
from hfpatch.ops._linear_ce_inputs import check_head, check_loss, shift_labels
from hfpatch.ops._linear_ce_loop import Options, backward_pass, forward_pass, loss_factors
from hfpatch.ops._linear_ce_shards import VocabShard
from hfpatch.ops.cross_entropy import CrossEntropyOutput, cross_entropy_ref


def linear_cross_entropy_ref(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options
) -> CrossEntropyOutput:
    """linear_cross_entropy in plain torch, from whole logits, with any number of derivatives.

    The oracle in float64.
    """
    return cross_entropy_ref(F.linear(hidden, weight, bias), labels, **options)


class _LinearCrossEntropy(torch.autograd.Function):
    """settings: (opts, grad, best, inplace_hidden), see linear_cross_entropy.

    grad: whether autograd records. Returns the loss (a scalar, or one per token for
    reduction="none") and best_N.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, class_weight_V, num_items, settings):
        opts, grad, best, inplace_hidden = settings
        needs = none = (False,) * 3
        if grad:
            needs = ctx.needs_input_grad[:3]
        ctx.set_materialize_grads(False)
        ctx.opts, ctx.needs = opts, needs
        # float16 waits for the GradScaler's factor, see the top of this file.
        ctx.now = any(needs) and opts.reduction != "none" and opts.dtype != torch.float16
        fits = hidden_ND.is_contiguous() and hidden_ND.dtype == opts.dtype
        inputs = hidden_ND, weight_VD, bias_V, labels_N, class_weight_V
        with autocast(hidden_ND.device.type, enabled=False):
            out = forward_pass(
                hidden_ND.detach(),
                weight_VD.detach(),
                None if bias_V is None else bias_V.detach(),
                labels_N,
                class_weight_V,
                num_items,
                opts,
                needs if ctx.now else none,
                best=best,
                overwrite=inplace_hidden and ctx.now and needs[0] and fits,
            )
        again = any(needs) and not ctx.now
        ctx.save_for_backward(*((*inputs, out.lse_2N, out.scale) if again else out.grads))
        ctx.mark_non_differentiable(out.best_N)
        return out.token_loss_N if opts.reduction == "none" else out.total, out.best_N

    @staticmethod
    @one_gradient
    def backward(ctx, dloss, _):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        grads = [None] * 3
        if dloss is not None and not ctx.now:
            grads = _backward_again(dloss, *ctx.saved_tensors, ctx.opts, ctx.needs)
        elif dloss is not None:
            keep = keeps_graph()
            one = dloss.device.type == "cpu" and not is_fake(dloss) and bool(dloss == 1.0)
            for i, grad in enumerate(ctx.saved_tensors):
                if grad is not None:
                    grads[i] = grad.clone() if keep else grad  # another backward may follow
                    if not one:
                        scale_(grads[i], dloss)
        return *grads, None, None, None, None


def _backward_again(dloss, hidden, weight, bias, labels, class_weight, lse, scale, opts, needs):
    if opts.reduction != "none":
        dloss = (dloss * scale).to(lse.dtype).expand_as(lse[0])
    rows = loss_factors(dloss.contiguous(), labels, lse, class_weight, opts)
    with autocast(hidden.device.type, enabled=False):
        return backward_pass(hidden, weight, bias, labels, class_weight, rows, opts, needs)


# Under torch.compile the loss runs outside the graph: its loop over chunks depends on the labels.
_apply = torch.compiler.disable(_LinearCrossEntropy.apply)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    workspace_bytes: int = 512 << 20,
    return_accuracy: bool = False,
    return_predicted: bool = False,
    inplace_hidden: bool = False,
    shard: VocabShard | None = None,
) -> Tensor | CrossEntropyOutput:
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
        class_weight: [V], without a gradient; as `weight` of torch.nn.functional.cross_entropy. The
            mean divides by the weights of the labels.
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
        z_loss: adds z_loss * lse^2 to each token's loss.
        shift: position t is scored against labels[..., t + 1]; the last position of a row is
            ignored.
        workspace_bytes: how much may be allocated beyond the gradients; limits the number of tokens
            whose logits exist at a time. If a 16-bit weight's gradient is summed over several
            chunks, the sum is float32.
        return_accuracy, return_predicted: return a CrossEntropyOutput with these fields.
        inplace_hidden: the gradient of hidden may overwrite hidden. For a caller that made hidden
            and does not share it, if the op that produced hidden does not need it in its backward
            (autograd raises if it does). Ignored if hidden is a leaf, not contiguous or of another
            dtype than the logits, and for reduction="none".
        shard: hfpatch.ops.VocabShard(group, V), for a vocabulary split over the ranks of a group
            (tensor parallelism), without label_smoothing and class_weight. weight and bias are then
            this rank's rows. hidden and labels are the same on every rank, and so are the results
            and hidden's gradient. Costs two small all-reduces per chunk of logits and one of
            hidden's gradient.

    Returns:
        The loss: a float32 scalar (float64 for float64 inputs), or shaped like labels for
        reduction="none". A CrossEntropyOutput where return_accuracy or return_predicted is set.
        Log-probabilities, entropies and lse per token come from linear_log_prob.

    Raises:
        ValueError: a label out of range (on a GPU a device-side assertion), or shapes, dtypes or
            options that do not fit.
        RuntimeError: in the backward, for create_graph=True. There is no second derivative; use
            linear_cross_entropy_ref.

    torch.nn.functional.linear_cross_entropy (torch 2.13) also works in chunks. Prefer it for class
    probabilities, several label dimensions, or (with options=None) second derivatives and
    torch.func. It has no num_items, softcap, z_loss or shift, sends ignored tokens through every
    matmul, returns to whole logits for label smoothing, refuses a second backward unless asked, and
    by default sums the gradient of a 16-bit weight in 16 bits on CUDA.

    Example:
        loss = linear_cross_entropy(hidden_BTD, head.weight, labels_BT, shift=True)
    """
    op = "linear_cross_entropy"
    dtype = check_head(op, hidden, weight, bias, shard)
    vocab_size = weight.shape[0] if shard is None else shard.size
    check_loss(
        op, hidden, vocab_size, labels, shift, softcap=softcap, num_valid=num_valid,
        class_weight=class_weight, reduction=reduction, num_items=num_items,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    weighted = label_smoothing > 0.0 or class_weight is not None
    message = "no label_smoothing and no class_weight beside a shard, one came; leave it out"
    refuse(op, (shard is not None and weighted, message))
    if shift:
        labels = shift_labels(labels, ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(hidden.device, wide_dtype(dtype)).contiguous()
    opts = Options(
        ignore_index, label_smoothing, 1.0 / softcap if softcap else 0.0, softcap or 1.0, z_loss,
        vocab_size, dtype, reduction, num_valid, workspace_bytes, shard,
    )  # fmt: skip
    best, rows = return_accuracy or return_predicted, hidden.reshape(-1, hidden.shape[-1])
    settings = opts, torch.is_grad_enabled(), best, inplace_hidden and not hidden.is_leaf
    loss, best_N = _apply(rows, weight, bias, labels.reshape(-1), class_weight, num_items, settings)
    loss = loss.view(labels.shape) if reduction == "none" else loss
    if not best:
        return loss
    return CrossEntropyOutput.of(
        loss, best_N, labels, ignore_index, return_accuracy, return_predicted
    )
