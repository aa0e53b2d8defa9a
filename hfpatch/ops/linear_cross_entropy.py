"""Cross-entropy and log-probabilities of hidden @ weight.T, without whole logits: a language
model's head and its loss in one op. Their loop is _linear_ce_loop.py.

When the gradients are computed:
- linear_cross_entropy, a scalar loss: in the forward, while the logits exist. The logits are
  computed once, three matmuls in all. The backward multiplies the gradients by the upstream scalar,
  which costs nothing if it is 1.
- linear_log_prob: in the backward, from logits computed a second time (four matmuls). A token's
  upstream gradient is known only there. The forward saves a few numbers per token.
- linear_cross_entropy with reduction="none", or logits in float16: by linear_log_prob. In float16
  the upstream gradient carries the GradScaler's factor, without which small gradients would vanish.

linear_log_prob, with z = softcap * tanh(scale * logits / softcap) / temperature (without a cap:
scale * logits / temperature) and p = softmax(z):
    log_prob = z_y - lse        lse = log sum exp z        entropy = - sum p log p
    mean_logit = mean of z over the vocabulary             sum_sq_prob = sum p^2
    is_top1: y has the first largest z
The gradient of the logits and its factors P, H, Q, Y, U: see the top of _linear_ce_chunk.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.compat import autocast, keeps_graph
from hfpatch.ops._library import no_second_derivative, refuse, wide_dtype
from hfpatch.ops._linear_ce_chunk import scale_, whole_lse
from hfpatch.ops._linear_ce_loop import Options, backward_pass, check, forward_pass, shift_labels


class LinearLogProbOutput(NamedTuple):
    """Each shaped like labels, float32 (float64 for float64 inputs) and differentiable.

    0 where the label is ignored; None if the field was not requested.
    """

    log_prob: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None
    mean_logit: Tensor | None
    sum_sq_prob: Tensor | None
    is_top1: Tensor | None  # bool, False where ignored


def linear_log_prob_ref(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    shift: bool = False,
) -> LinearLogProbOutput:
    """All outputs in plain torch, from whole logits; any number of derivatives.

    The oracle in float64.
    """
    labels = shift_labels(labels, ignore_index) if shift else labels
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype)) * scale
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    keep = labels != ignore_index
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    label = labels.long().where(keep, 0).unsqueeze(-1)
    outputs = (
        log_p.gather(-1, label).squeeze(-1),
        -(p * log_p.masked_fill(p == 0.0, 0.0)).sum(-1),
        z.logsumexp(-1),
        z.mean(-1),
        p.square().sum(-1),
    )
    is_top1 = (z.argmax(-1) == labels) & keep
    return LinearLogProbOutput(*(t.masked_fill(~keep, 0.0) for t in outputs), is_top1)


def _factors(dlog_prob_N, dlse_2N, dstats_3N, lse_2N, stats_3N, vocab_size: int) -> Tensor:
    """The factors that backward_pass takes; see the table at the top of _linear_ce_chunk.py.

    backward_pass multiplies them by p / c, where c = 1 / L is the largest p, so P and H contain c,
    and Q contains c^2. An upstream gradient may be None. The gradient of lse is dlse_2N[1].
    """
    top_N, log_N = lse_2N
    c_N = log_N.neg().exp()
    y_N = torch.zeros_like(top_N) if dlog_prob_N is None else -dlog_prob_N
    p_N = y_N if dlse_2N is None else y_N + dlse_2N[1]
    if dstats_3N is None or not dstats_3N.numel():
        return torch.stack([top_N, p_N * c_N, y_N])
    entropy_N, _, square_N = stats_3N
    dentropy_N, dmean_N, dsquare_N = dstats_3N
    q_N = 2.0 * dsquare_N
    p_N = (p_N - q_N * square_N) * c_N
    return torch.stack(
        [
            top_N,
            p_N,
            y_N,
            dmean_N / -vocab_size,
            entropy_N - log_N,
            -dentropy_N * c_N,
            q_N * c_N.square(),
        ]
    )


class _LinearLogProb(torch.autograd.Function):
    """Returns log_prob, lse as two numbers [2, N], stats [3, N] and best (int32).

    stats and best are empty if not requested.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, stats, best, opts):
        ctx.set_materialize_grads(False)
        ctx.opts = opts
        ctx.needs = ctx.needs_input_grad[:3]
        one = hidden_ND.new_ones((), dtype=wide_dtype(opts.dtype))
        head = (hidden_ND, weight_VD, bias_V)
        with autocast(hidden_ND.device.type):
            out = forward_pass(*head, labels_N, one, opts, best=best, stats=stats)
        ctx.save_for_backward(*head, labels_N, out.lse_2N, out.stats_3N)
        ctx.mark_non_differentiable(out.best_N)
        return out.token_loss_N.neg_(), out.lse_2N, out.stats_3N, out.best_N

    @staticmethod
    def backward(ctx, dlog_prob_N, dlse_2N, dstats_3N, _):
        if torch.is_grad_enabled():
            no_second_derivative("linear_log_prob", "linear_cross_entropy")(ctx)
        *head, labels_N, lse_2N, stats_3N = ctx.saved_tensors
        rows_KN = _factors(dlog_prob_N, dlse_2N, dstats_3N, lse_2N, stats_3N, ctx.opts.vocab_size)
        with autocast(labels_N.device.type):
            grads = backward_pass(*head, labels_N, rows_KN, ctx.opts, ctx.needs)
        return *grads, None, None, None, None


# Under torch.compile it runs outside the graph: its loop over chunks depends on the labels.
_per_token = torch.compiler.disable(_LinearLogProb.apply)


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    num_valid: int | None = None,
    outputs: tuple[str, ...] = ("log_prob",),
    shift: bool = False,
    workspace_bytes: int = 512 << 20,
) -> LinearLogProbOutput:
    """log softmax(hidden @ weight.T + bias) at the labels, and other values per token, without
    whole logits.

    hidden, weight and bias get gradients, for any upstream gradient of every token.

    Args:
        hidden, weight, labels, bias, ignore_index, num_valid, shift, workspace_bytes: as in
            linear_cross_entropy.
        temperature, scale, softcap: logits are multiplied by scale, soft-capped, then divided by
            temperature, in float32.
        outputs: names of the requested fields of LinearLogProbOutput, defined at the top of this
            file. entropy, mean_logit and sum_sq_prob are computed together: one costs as much as
            all three.

    Returns:
        A LinearLogProbOutput. Each requested field is shaped like labels, and 0 (False) where the
        label is ignored. All but is_top1 are differentiable.

    Raises:
        ValueError: a label out of range (on a GPU a device-side assertion), or shapes, dtypes or
            options that do not fit.
        RuntimeError: in the backward, for create_graph=True. There is no second derivative; use
            linear_log_prob_ref.

    Example:
        out = linear_log_prob(hidden_BTD, head.weight, labels_BT, outputs=("log_prob", "entropy"),
        shift=True)
    """
    # 1. The arguments.
    names = LinearLogProbOutput._fields
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    message = "outputs must be among {}, got {}. Name at least one of them"
    unknown = not outputs or set(outputs) - set(names)
    refuse("linear_log_prob", (unknown, message, ", ".join(names), outputs))
    dtype = check(
        "linear_log_prob", hidden, weight, labels, bias, shift,
        softcap=softcap, scale=scale, temperature=temperature, num_valid=num_valid,
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    # 2. What the loop computes. z = outer * tanh(inner * logit), or outer * logit without a cap.
    outer = (softcap or scale) / temperature
    opts = Options(
        ignore_index, smoothing=0.0, inner=scale / softcap if softcap else 0.0, outer=outer,
        z_loss=0.0, vocab_size=weight.shape[0], dtype=dtype, num_valid=num_valid,
        workspace_bytes=workspace_bytes,
    )  # fmt: skip
    stats = not {"entropy", "mean_logit", "sum_sq_prob"}.isdisjoint(outputs)
    best = "is_top1" in outputs
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    labels_N = labels.reshape(-1)
    log_prob_N, lse_2N, stats_3N, best_N = _per_token(
        hidden_ND, weight, bias, labels_N, stats, best, opts
    )
    # 3. The fields that were requested.
    is_top1_N = (best_N == labels_N) & (labels_N != ignore_index) if best else None
    entropy_N, mean_N, square_N = stats_3N
    values = (log_prob_N, entropy_N, whole_lse(lse_2N, outer), mean_N, square_N, is_top1_N)
    return LinearLogProbOutput(
        *(x.view(labels.shape) if n in outputs else None for n, x in zip(names, values))
    )


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
    """linear_cross_entropy in plain torch, with any number of derivatives: the oracle in float64."""
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
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:3] if grad else (False, False, False)
        with autocast(hidden_ND.device.type):
            out = forward_pass(hidden_ND, weight_VD, bias_V, labels_N, total_by, opts, needs)
        ctx.save_for_backward(*out.grads)
        return out.total

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        if dloss is None:
            return (None,) * 7
        grads = []
        for grad in ctx.saved_tensors:
            if grad is not None:
                grad = grad.clone() if keeps_graph() else grad  # another backward may follow
                scale_(grad, dloss)
            grads.append(grad)
        return *grads, None, None, None, None


_total = torch.compiler.disable(_LinearCrossEntropy.apply)


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
    # 1. The arguments.
    dtype = check(
        "linear_cross_entropy", hidden, weight, labels, bias, shift,
        softcap=softcap, num_valid=num_valid, reduction=reduction, num_items=num_items,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    # 2. The divisor, a scalar on the device.
    place = {"dtype": wide_dtype(dtype), "device": hidden.device}
    if isinstance(num_items, Tensor):
        total_by = num_items.detach().to(**place, non_blocking=True).reshape(())
    elif num_items is None and reduction == "mean":
        total_by = (labels != ignore_index).sum().to(**place)
    else:
        total_by = torch.full((), 1 if num_items is None else num_items, **place)
    # 3. A loss per token, or one that the GradScaler multiplies: its gradient waits for backward.
    if reduction == "none" or dtype == torch.float16:
        outputs = ("log_prob", "lse", "mean_logit") if label_smoothing else ("log_prob", "lse")
        out = linear_log_prob(
            hidden, weight, labels, bias=bias, softcap=softcap, ignore_index=ignore_index,
            num_valid=num_valid, outputs=outputs, workspace_bytes=workspace_bytes,
        )  # fmt: skip
        loss = z_loss * out.lse.square() - (1.0 - label_smoothing) * out.log_prob
        if label_smoothing:
            loss = loss + label_smoothing * (out.lse - out.mean_logit)
        return loss if reduction == "none" else loss.sum() / total_by
    # 4. A scalar: its gradients are computed now.
    opts = Options(
        ignore_index, smoothing=label_smoothing, inner=1.0 / softcap if softcap else 0.0,
        outer=softcap or 1.0, z_loss=z_loss, vocab_size=weight.shape[0], dtype=dtype,
        num_valid=num_valid, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    labels_N = labels.reshape(-1)
    return _total(hidden_ND, weight, bias, labels_N, total_by, opts, torch.is_grad_enabled())
