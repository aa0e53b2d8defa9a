"""Per-token log-probabilities, entropies and related values of hidden @ weight.T, without whole
logits.

Preference and policy-gradient losses read these. Legend: N tokens, D hidden size, V vocabulary.

Chunks, dropped tokens, weight gradient and kernels are those of linear_cross_entropy
(_linear_ce_loop.py, _linear_ce_chunk.py). A token's upstream gradient is known only in the
backward. So the forward saves a few numbers per token, and the backward computes the logits a
second time: four matmuls in all.

With z = softcap * tanh(scale * logits / softcap) / temperature (without a cap: scale * logits /
temperature) and p = softmax(z):
    log_prob = z_y - lse        lse = log sum exp z        entropy = - sum p log p
    mean_logit = mean of z over the vocabulary             sum_sq_prob = sum p^2
    is_top1: y has the first largest z
For upstream gradients g of each, the gradient of the logits is
    dz = p (P + H (log p + entropy) + Q p) - Y [y] - U
with Y = -g_log_prob, U = -g_mean_logit / V, H = -g_entropy, Q = 2 g_sum_sq_prob,
P = Y + g_lse - Q sum_sq_prob.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.compat import autocast
from hfpatch.ops._library import no_second_derivative, refuse, wide_dtype
from hfpatch.ops._linear_ce_chunk import whole_lse
from hfpatch.ops._linear_ce_inputs import check, shift_labels
from hfpatch.ops._linear_ce_loop import Options, backward_pass, forward_pass


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
    """The factors that backward_pass takes; see the formula at the top of this file.

    backward_pass multiplies them by p / c, where c is the largest p, so P and H contain c, and Q
    contains c^2. An upstream gradient may be None. The gradient of lse is dlse_2N[1].
    """
    top_N, c_N = lse_2N[0], lse_2N[1].neg().exp()
    y_N = torch.zeros_like(top_N) if dlog_prob_N is None else -dlog_prob_N
    p_N = y_N if dlse_2N is None else y_N + dlse_2N[1]
    if dstats_3N is None or not dstats_3N.numel():
        return torch.stack([top_N, p_N * c_N, y_N])
    (entropy_N, _, square_N), (dentropy_N, dmean_N, dsquare_N) = stats_3N, dstats_3N
    q_N, entropy_N = 2.0 * dsquare_N, entropy_N - lse_2N[1]
    p_N = (p_N - q_N * square_N) * c_N
    return torch.stack(
        [top_N, p_N, y_N, dmean_N / -vocab_size, entropy_N, -dentropy_N * c_N, q_N * c_N.square()]
    )


class _LinearLogProb(torch.autograd.Function):
    """Returns log_prob, lse as two numbers [2, N], stats [3, N] and best (int32).

    stats and best are empty if not requested.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, stats, best, opts):
        ctx.set_materialize_grads(False)
        ctx.opts, ctx.needs = opts, ctx.needs_input_grad[:3]
        with autocast(hidden_ND.device.type, enabled=False):
            out = forward_pass(
                hidden_ND.detach(),
                weight_VD.detach(),
                None if bias_V is None else bias_V.detach(),
                labels_N,
                hidden_ND.new_ones((), dtype=wide_dtype(opts.dtype)),
                opts,
                best=best,
                stats=stats,
            )
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N, out.lse_2N, out.stats_3N)
        ctx.mark_non_differentiable(out.best_N)
        return out.token_loss_N.neg_(), out.lse_2N, out.stats_3N, out.best_N

    @staticmethod
    def backward(ctx, dlog_prob_N, dlse_2N, dstats_3N, _):
        if torch.is_grad_enabled():
            no_second_derivative("linear_log_prob")(ctx)
        hidden_ND, weight_VD, bias_V, labels_N, lse_2N, stats_3N = ctx.saved_tensors
        rows_KN = _factors(dlog_prob_N, dlse_2N, dstats_3N, lse_2N, stats_3N, ctx.opts.vocab_size)
        head = hidden_ND, weight_VD, bias_V
        with autocast(hidden_ND.device.type, enabled=False):
            grads = backward_pass(*head, labels_N, rows_KN, ctx.opts, ctx.needs)
        return *grads, None, None, None, None


# Under torch.compile this runs outside the graph, as linear_cross_entropy does.
_apply = torch.compiler.disable(_LinearLogProb.apply)


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
    op, names = "linear_log_prob", LinearLogProbOutput._fields
    outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = outputs and set(outputs) <= set(names)
    message = "outputs must be among {}, got {}. Name at least one of them"
    refuse(op, (not known, message, ", ".join(names), outputs))
    dtype = check(
        op, hidden, weight, labels, bias, shift,
        softcap=softcap, scale=scale, temperature=temperature, num_valid=num_valid,
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    inner, outer = scale / softcap if softcap else 0.0, (softcap or scale) / temperature
    opts = Options(
        ignore_index, 0.0, inner, outer, 0.0, weight.shape[0], dtype, num_valid=num_valid,
        workspace_bytes=workspace_bytes,
    )  # fmt: skip
    stats = not {"entropy", "mean_logit", "sum_sq_prob"}.isdisjoint(outputs)
    best, labels_N = "is_top1" in outputs, labels.reshape(-1)
    log_prob_N, lse_2N, stats_3N, best_N = _apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels_N, stats, best, opts
    )
    entropy_N, mean_N, square_N = stats_3N
    is_top1_N = (best_N == labels_N) & (labels_N != ignore_index) if best else None
    values = log_prob_N, entropy_N, whole_lse(lse_2N, outer), mean_N, square_N, is_top1_N
    return LinearLogProbOutput(
        *(v.view(labels.shape) if n in outputs else None for n, v in zip(names, values))
    )
