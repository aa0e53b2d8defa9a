"""Cross-entropy and log-probabilities of hidden @ weight.T, without whole logits: a language
model's head and its loss in one op.

The logits of a few thousand tokens are computed and turned, in place, into their own gradient:

    for each chunk of the kept tokens:
        logits = hidden[chunk] @ weight.T + bias
        step(logits): writes loss and lse of the chunk, overwrites logits with their gradient
        dW += logits.T @ hidden[chunk],  dbias += sum of logits,  dX[chunk] = logits @ weight

Legend: B batch, T tokens, N = B*T tokens, M tokens kept (label is not ignore_index), C rows of one
chunk, D hidden size, V vocabulary.

A sweep allocates: one logits buffer [C, V], reused by every chunk; dX [N, D]; the gathered rows
[C, D] and their dX, where ignored tokens are dropped; dW (_linear_ce_weight.py). All of it comes
from aten calls and small in-place ops (_linear_ce_chunk.py, kernels/cross_entropy.py), so a
TorchDispatchMode that follows allocations sees it, also over fake tensors. Under torch.compile the
ops run outside the graph.

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
For upstream gradients g of each, the gradient of the logits is
    dz = p (P + H (log p + entropy) + Q p) - Y [y] - U
with Y = -g_log_prob, U = -g_mean_logit / V, H = -g_entropy, Q = 2 g_sum_sq_prob,
P = Y + g_lse - Q sum_sq_prob.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.budget.cuts import LOSS_BYTES_PER_TOKEN, chunk_bounds
from hfpatch.compat import assert_async, autocast, autocast_dtype, is_fake, keeps_graph
from hfpatch.ops._library import no_second_derivative, refuse, wide_dtype
from hfpatch.ops._linear_ce_chunk import (
    cross_entropy_chunk_,
    cross_entropy_chunk_bwd_,
    scale_,
    whole_lse,
)
from hfpatch.ops._linear_ce_weight import WeightGrad
from hfpatch.ops._wide_sums import on_cuda, sums_in_matmul

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # dX, dW, dbias
# More workspace bytes per token for entropy and related values: three numbers, twice, and the
# backward's factors.
STATS_BYTES_PER_TOKEN = 56


class Options(NamedTuple):
    """The options of a loss.

    z = outer * u with u = tanh(inner * logit), or u = logit if inner is 0. dtype is the logits'.
    """

    ignore_index: int
    smoothing: float
    inner: float
    outer: float
    z_loss: float
    vocab_size: int
    dtype: torch.dtype
    num_valid: int | None = None
    workspace_bytes: int = 0


class Forward(NamedTuple):
    """The result of forward_pass. best_N and stats_3N are empty if not requested."""

    total: Tensor  # sum of token_loss / total_by
    token_loss_N: Tensor
    lse_2N: Tensor  # in two numbers, see `whole_lse`
    best_N: Tensor  # int32, -1 where ignored
    stats_3N: Tensor  # entropy, mean logit, sum of squared probabilities
    grads: Grads  # of total


def _check_labels(labels_N: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Checks that every label is ignore_index or in [0, vocab_size).

    Raises:
        ValueError: on the CPU. On other devices a device-side assertion fails instead.
    """
    if is_fake(labels_N):
        return
    ok_N = ((labels_N >= 0) & (labels_N < vocab_size)) | (labels_N == ignore_index)
    expected = f"hfpatch: labels must lie in [0, {vocab_size}) or be ignore_index={ignore_index}"
    advice = "Check the tokenizer against the model's vocabulary."
    if labels_N.device.type != "cpu":
        assert_async(ok_N.all(), f"{expected}. {advice}")
    elif not ok_N.all():
        raise ValueError(f"{expected}, got {int(labels_N[~ok_N][0])}. {advice}")


def kept_tokens(labels_N: Tensor, opts: Options) -> tuple[Tensor | None, int]:
    """Which tokens go through the matmuls.

    Returns:
        (order, M): the first M entries of order [N] are the tokens to keep. order is None where all
        are kept. If less than 1/32 could be dropped, all are kept: gathering costs more. M comes
        from the host (num_valid, or a count of labels on the CPU), so nothing waits for the device.

    Raises:
        ValueError: num_valid is smaller than the number of labels.
    """
    tokens, num_valid = labels_N.numel(), opts.num_valid
    ignored_N = labels_N == opts.ignore_index
    message = (
        "hfpatch: num_valid must be at least the number of labels (after the shift) that are not "
        "ignore_index"
    )
    advice = "Count the labels that the op gets."
    if is_fake(labels_N):
        pass
    elif labels_N.device.type == "cpu":
        count = tokens - int(ignored_N.sum())
        if num_valid is None:
            num_valid = count
        elif num_valid < count:
            raise ValueError(f"{message}, got {num_valid} for {count}. {advice}")
    elif num_valid is not None:
        assert_async(ignored_N.sum() >= tokens - num_valid, f"{message}. {advice}")
    if num_valid is None or tokens - num_valid <= tokens // 32:
        return None, tokens
    return torch.argsort(ignored_N.to(torch.uint8), stable=True), num_valid


def _chunks(
    hidden_ND: Tensor,
    width: int,
    opts: Options,
    kept: tuple[Tensor | None, int],
    needs: tuple[bool, bool, bool],
    upcast: bool,
    stats: bool,
) -> tuple[tuple[int, int], ...]:
    """[start, end) of the chunks of kept tokens that the workspace holds.

    width: columns of the logits' buffer. upcast: whether dW upcasts its operands. stats: whether
    entropy and related values are computed.
    """
    (order, count), (tokens, hidden_size), dtype = kept, hidden_ND.shape, opts.dtype
    wide = wide_dtype(dtype)
    copies = order is not None or hidden_ND.dtype != dtype
    row_bytes = max(1, width) * dtype.itemsize
    row_bytes += hidden_size * copies * (1 + needs[0]) * dtype.itemsize
    row_bytes += hidden_size * upcast * wide.itemsize
    token_bytes = LOSS_BYTES_PER_TOKEN + stats * STATS_BYTES_PER_TOKEN
    room = opts.workspace_bytes - tokens * token_bytes - upcast * (opts.workspace_bytes // 16)
    return chunk_bounds(count, row_bytes, room)


def sweep(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    opts: Options,
    kept: tuple[Tensor | None, int],
    step: Callable[[Tensor, int, int], None],
    needs: tuple[bool, bool, bool],
    stats: bool = False,
) -> Grads:
    """Runs `step` over chunks of the kept tokens and collects the gradients.

    Args:
        hidden_ND, weight_VD, bias_V: the inputs of the head.
        opts: the options of the loss.
        kept: from kept_tokens.
        step: step(logits_CV, start, end) turns the logits of kept tokens [start, end) into their
            gradient, in place.
        needs: which of hidden, weight and bias need a gradient.
        stats: whether entropy and related values take workspace.

    Returns:
        (dX, dW, dbias), None where not needed.
    """
    (order, _), vocab_size, dtype = kept, weight_VD.shape[0], opts.dtype
    wide, need_dx = wide_dtype(dtype), needs[0]
    # Row strides that are multiples of 16 bytes allow the fast matmuls for any vocabulary.
    width = -(-vocab_size // 8) * 8 if on_cuda(hidden_ND) else vocab_size
    upcast = needs[1] and wide != dtype and not sums_in_matmul(hidden_ND, dtype)
    bounds = _chunks(hidden_ND, width, opts, kept, needs, upcast, stats)

    weight_work_VD, bias_work_V = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
    # Only the last chunk differs in length.
    rows = max(bounds[0][1], bounds[-1][1] - bounds[-1][0]) if bounds else 0
    buffer_CV = hidden_ND.new_empty(rows, width, dtype=dtype)[:, :vocab_size]
    dx_ND = dw = db_V = None
    if need_dx:
        written = order is None and bounds  # the loop writes every row
        make = torch.empty_like if written else torch.zeros_like
        dx_ND = make(hidden_ND, memory_format=torch.contiguous_format)
    if needs[1]:
        dw = WeightGrad(weight_VD, dtype, len(bounds), opts.workspace_bytes // 16)
    if needs[2]:
        db_V = hidden_ND.new_zeros(vocab_size, dtype=wide)

    for start, end in bounds:
        index_C = None if order is None else order[start:end]
        hidden_CD = hidden_ND[start:end] if order is None else hidden_ND.index_select(0, index_C)
        hidden_CD = hidden_CD.to(dtype)
        logits_CV = buffer_CV[: end - start]
        if bias_work_V is None:
            torch.mm(hidden_CD, weight_work_VD.t(), out=logits_CV)
        else:
            torch.addmm(bias_work_V, hidden_CD, weight_work_VD.t(), out=logits_CV)
        step(logits_CV, start, end)
        if dw is not None:
            dw.add(logits_CV, hidden_CD)
        if db_V is not None:
            db_V += logits_CV.sum(0, dtype=wide)
        if need_dx:
            where = slice(start, end) if index_C is None else index_C
            _write_product(dx_ND, where, logits_CV, weight_work_VD)
    logits_CV = buffer_CV = hidden_CD = weight_work_VD = None
    db_V = None if db_V is None else db_V.to(bias_V.dtype)
    return dx_ND, None if dw is None else dw.finish(), db_V


def _write_product(
    dx_ND: Tensor, where: "slice | Tensor", logits_CV: Tensor, weight_VD: Tensor
) -> None:
    """Rows `where` of dX, from the gradient of their logits."""
    if isinstance(where, Tensor):
        dx_ND.index_copy_(0, where, (logits_CV @ weight_VD).to(dx_ND.dtype))
    elif dx_ND.dtype == weight_VD.dtype:
        torch.mm(logits_CV, weight_VD, out=dx_ND[where])
    else:
        dx_ND[where] = logits_CV @ weight_VD


def forward_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    total_by: Tensor,
    opts: Options,
    needs: tuple[bool, bool, bool] = (False,) * 3,
    *,
    best: bool = False,
    stats: bool = False,
) -> Forward:
    """The loss and other outputs from logits computed once.

    Args:
        hidden_ND, weight_VD, bias_V, labels_N, opts: as in linear_cross_entropy.
        total_by: the divisor of the sum of the losses, a scalar on the device.
        needs: which of hidden, weight and bias get a gradient of the total now.
        best: also find the word with the largest logit.
        stats: also compute entropy, mean logit and the sum of squared probabilities.
    """
    _check_labels(labels_N, opts.vocab_size, opts.ignore_index)
    device, wide, tokens = hidden_ND.device, wide_dtype(opts.dtype), labels_N.numel()
    scale, grad = total_by.reciprocal(), any(needs)

    order, _ = kept = kept_tokens(labels_N, opts)
    loss_N = torch.zeros(tokens, dtype=wide, device=device)
    lse_2N = torch.zeros(2, tokens, dtype=wide, device=device)
    best_N = torch.full((tokens if best else 0,), -1, dtype=torch.int32, device=device)
    stats_3N = torch.zeros(3, tokens if stats else 0, dtype=wide, device=device)
    # Written in the order of the kept tokens; one index_copy_ at the end restores the order.
    written = outputs = loss_N, lse_2N, best_N, stats_3N
    labels_M = labels_N
    if order is not None:
        written, labels_M = [t.clone() for t in outputs], labels_N[order]
    loss_M, lse_2M, best_M, stats_3M = written

    def step(logits_CV, start, end):
        head = logits_CV, labels_M[start:end], scale
        row = (
            loss_M[start:end], lse_2M[:, start:end],
            best_M[start:end] if best else None, stats_3M[:, start:end] if stats else None,
        )  # fmt: skip
        options = opts.ignore_index, opts.smoothing, opts.inner, opts.outer, opts.z_loss, grad
        cross_entropy_chunk_(*head, *row, *options)

    grads = sweep(hidden_ND, weight_VD, bias_V, opts, kept, step, needs, stats)
    if order is not None:
        for out, values in zip(outputs, written):
            if out.numel():
                out.index_copy_(-1, order, values)
    return Forward(loss_N.sum() / total_by, loss_N, lse_2N, best_N, stats_3N, grads)


def backward_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    rows_KN: Tensor,
    opts: Options,
    needs: tuple[bool, bool, bool],
) -> Grads:
    """(dX, dW, dbias) from logits computed a second time.

    rows_KN: factors of `cross_entropy_chunk_bwd_`.
    """
    order, _ = kept = kept_tokens(labels_N, opts)
    labels_M = labels_N if order is None else labels_N[order]
    rows_KM = rows_KN if order is None else rows_KN.index_select(1, order)

    def step(logits_CV, start, end):
        labels_C, rows_KC = labels_M[start:end], rows_KM[:, start:end]
        options = opts.ignore_index, opts.inner, opts.outer
        cross_entropy_chunk_bwd_(logits_CV, labels_C, rows_KC, *options)

    stats = rows_KN.shape[0] > 4
    return sweep(hidden_ND, weight_VD, bias_V, opts, kept, step, needs, stats)


# --- arguments ------------------------------------------------------------------------------------


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


# --- per token ------------------------------------------------------------------------------------


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
            no_second_derivative("linear_log_prob", "linear_cross_entropy")(ctx)
        hidden_ND, weight_VD, bias_V, labels_N, lse_2N, stats_3N = ctx.saved_tensors
        rows_KN = _factors(dlog_prob_N, dlse_2N, dstats_3N, lse_2N, stats_3N, ctx.opts.vocab_size)
        head = hidden_ND, weight_VD, bias_V
        with autocast(hidden_ND.device.type, enabled=False):
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
    log_prob_N, lse_2N, stats_3N, best_N = _per_token(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels_N, stats, best, opts
    )
    entropy_N, mean_N, square_N = stats_3N
    is_top1_N = (best_N == labels_N) & (labels_N != ignore_index) if best else None
    values = log_prob_N, entropy_N, whole_lse(lse_2N, outer), mean_N, square_N, is_top1_N
    return LinearLogProbOutput(
        *(v.view(labels.shape) if n in outputs else None for n, v in zip(names, values))
    )


# --- the loss -------------------------------------------------------------------------------------


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
    return _total(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), total_by, opts,
        torch.is_grad_enabled(),
    )  # fmt: skip
