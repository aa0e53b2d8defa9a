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
from hfpatch.ops._linear_ce_chunk import cross_entropy_chunk_bwd_, scale_, whole_lse
from hfpatch.ops._linear_ce_loop import forward_pass, prepare, shift_labels, sweep


class LinearLogProbOutput(NamedTuple):
    """Each shaped like labels, float32 (float64 for float64 inputs) and differentiable.

    0 where the label is ignored; None if the field was not requested.
    """

    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logit: Tensor | None = None
    sum_sq_prob: Tensor | None = None
    is_top1: Tensor | None = None  # bool, False where ignored


STATS = ("entropy", "mean_logit", "sum_sq_prob")  # computed together


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
    if shift:
        labels = shift_labels(labels, ignore_index)
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype)) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    ignored = labels == ignore_index
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    label = labels.long().masked_fill(ignored, 0).unsqueeze(-1)
    outputs = {
        "log_prob": log_p.gather(-1, label).squeeze(-1),
        "entropy": -(p * log_p.masked_fill(p == 0.0, 0.0)).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logit": z.mean(-1),
        "sum_sq_prob": p.square().sum(-1),
        "is_top1": z.argmax(-1) == labels,
    }
    return LinearLogProbOutput(**{n: x.masked_fill(ignored, 0) for n, x in outputs.items()})


def _factors(
    dlog_prob_N: Tensor | None, douts_KN: Tensor | None, outs_KN: Tensor, V: int
) -> Tensor:
    """The factors_KN of the gradient; see the table at the top of _linear_ce_chunk.py.

    The op multiplies them by p / c, where c = 1 / L is the largest p, so P and H contain c,
    and Q contains c^2. An upstream gradient is None if nobody used the output. lse = top + log L;
    its gradient arrives at log L.
    """
    top_N, log_N = outs_KN[1:3]
    c_N = log_N.neg().exp()
    y_N = torch.zeros_like(top_N) if dlog_prob_N is None else -dlog_prob_N
    if douts_KN is None:
        return torch.stack([top_N, y_N * c_N, y_N])
    p_N = y_N + douts_KN[2]
    if len(outs_KN) < 6:
        return torch.stack([top_N, p_N * c_N, y_N])
    entropy_N, _, square_N = outs_KN[3:6]
    dentropy_N, dmean_N, dsquare_N = douts_KN[3:6]
    q_N = 2.0 * dsquare_N
    factors = [top_N, (p_N - q_N * square_N) * c_N, y_N, dmean_N / -V]
    factors += [entropy_N - log_N, -dentropy_N * c_N, q_N * c_N.square()]
    return torch.stack(factors)


class _LinearLogProb(torch.autograd.Function):
    """Returns log_prob and outs_KN, see the top of _linear_ce_chunk.py."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, stats, best, opts):
        ctx.set_materialize_grads(False)
        ctx.opts = opts
        one = hidden_ND.new_ones((), dtype=wide_dtype(opts.dtype))
        head = hidden_ND, weight_VD, bias_V
        with autocast(hidden_ND.device.type):
            outs_KN, (order_M, ctx.count), _ = forward_pass(
                head, labels_N, one, opts, stats=stats, best=best
            )
        ctx.save_for_backward(*head, labels_N, order_M, outs_KN)
        return -outs_KN[0], outs_KN

    @staticmethod
    def backward(ctx, dlog_prob_N, douts_KN):
        if torch.is_grad_enabled():
            no_second_derivative("linear_log_prob", "linear_cross_entropy")(ctx)
        *head, labels_N, order_M, outs_KN = ctx.saved_tensors
        factors_KM = _factors(dlog_prob_N, douts_KN, outs_KN, len(head[1]))
        if order_M is not None:
            factors_KM = factors_KM.index_select(1, order_M)
        tokens = labels_N, factors_KM, (order_M, ctx.count)
        needs = ctx.needs_input_grad[:3]
        with autocast(labels_N.device.type):
            grads = sweep(head, *tokens, ctx.opts, needs, cross_entropy_chunk_bwd_)
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
    # [Step 1] Check the arguments.
    names = LinearLogProbOutput._fields
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = not outputs or set(outputs) - set(names)
    message = "outputs must be among {}, got {}. Name at least one of them"
    refuse("linear_log_prob", (unknown, message, ", ".join(names), outputs))
    hidden_ND, labels_N, opts = prepare(
        "linear_log_prob", hidden, weight, labels, bias, ignore_index=ignore_index, shift=shift,
        softcap=softcap, num_valid=num_valid, workspace_bytes=workspace_bytes, scale=scale,
        temperature=temperature,
    )  # fmt: skip
    # [Step 2] Compute what the outputs need.
    stats = not set(outputs).isdisjoint(STATS)
    best = "is_top1" in outputs
    log_prob_N, outs_KN = _per_token(hidden_ND, weight, bias, labels_N, stats, best, opts)
    # [Step 3] Return the requested fields.
    values = {"log_prob": log_prob_N, "lse": whole_lse(outs_KN[1:3], opts.outer)}
    if stats:
        values |= zip(STATS, outs_KN[3:6])
    if best:
        values["is_top1"] = (outs_KN[-1] == labels_N) & (labels_N != ignore_index)
    return LinearLogProbOutput(**{n: values[n].view(labels.shape) for n in outputs})


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
    if shift:
        labels = shift_labels(labels, ignore_index)
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype)).reshape(-1, z.shape[-1])
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    labels_N = labels.reshape(-1).long()
    keep_N = labels_N != ignore_index
    token_loss_N = F.cross_entropy(
        z, labels_N, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    token_loss_N = token_loss_N + z_loss * (z.logsumexp(-1) * keep_N).square()
    if reduction == "none":
        return token_loss_N.reshape(labels.shape)
    total = token_loss_N.sum()
    if num_items is not None:
        return total / num_items
    return total / keep_N.sum() if reduction == "mean" else total


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the token losses over total_by. grad: whether autograd records."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, total_by, opts, numbers, grad):
        head = hidden_ND, weight_VD, bias_V
        needs = ctx.needs_input_grad[:3] if grad else (False, False, False)
        with autocast(hidden_ND.device.type):
            outs_KN, _, grads = forward_pass(
                head, labels_N, total_by.reciprocal(), opts, needs, **numbers
            )
        ctx.save_for_backward(*grads)
        return outs_KN[0].sum() / total_by

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        grads = []
        for grad in ctx.saved_tensors:
            if grad is not None:
                if keeps_graph():  # another backward may follow
                    grad = grad.clone()
                scale_(grad, dloss)
            grads.append(grad)
        return *grads, None, None, None, None, None


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
    # [Step 1] Check the arguments.
    refuse(
        "linear_cross_entropy",
        (reduction not in ("mean", "sum", "none"),
         'reduction must be "mean", "sum" or "none", got {!r}. Choose one', reduction),
        (num_items is not None and reduction == "none",
         'num_items does not go with reduction="none". Divide the result, or ask for a sum'),
        (not 0.0 <= label_smoothing <= 1.0,
         "label_smoothing must be from 0 to 1, got {}. 0 turns it off", label_smoothing),
        (not z_loss >= 0.0, "z_loss must be 0 or more, got {}. 0 turns it off", z_loss),
    )  # fmt: skip
    options: dict = {
        "softcap": softcap, "ignore_index": ignore_index, "num_valid": num_valid, "shift": shift,
        "workspace_bytes": workspace_bytes,
    }  # fmt: skip
    hidden_ND, labels_N, opts = prepare(
        "linear_cross_entropy", hidden, weight, labels, bias, **options
    )
    # [Step 2] Make the divisor, a scalar on the device.
    place: dict = {"dtype": wide_dtype(opts.dtype), "device": hidden.device}
    if isinstance(num_items, Tensor):
        total_by = num_items.detach().to(**place, non_blocking=True).reshape(())
    elif num_items is None and reduction == "mean":
        total_by = (labels_N != ignore_index).sum().to(**place)
    else:
        total_by = torch.full((), 1 if num_items is None else num_items, **place)
    # [Step 3] A loss per token, and one that the GradScaler multiplies, get their gradient in the
    # backward.
    if reduction == "none" or opts.dtype == torch.float16:
        outputs = ("log_prob", "lse", "mean_logit") if label_smoothing else ("log_prob", "lse")
        out = linear_log_prob(hidden, weight, labels, bias=bias, outputs=outputs, **options)
        loss = z_loss * out.lse.square() - (1.0 - label_smoothing) * out.log_prob
        if label_smoothing:
            loss = loss + label_smoothing * (out.lse - out.mean_logit)
        return loss if reduction == "none" else loss.sum() / total_by
    # [Step 4] Any other scalar gets its gradients now.
    numbers = {"smoothing": label_smoothing, "z_loss": z_loss}
    return _total(
        hidden_ND, weight, bias, labels_N, total_by, opts, numbers, torch.is_grad_enabled()
    )
