"""The loop that cross-entropy and log-probabilities of hidden @ weight.T share, and the check of
their arguments. Whole logits never exist.

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
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hfpatch.budget.cuts import LOSS_BYTES_PER_TOKEN, chunk_bounds
from hfpatch.compat import assert_async, autocast_dtype, is_fake
from hfpatch.ops._library import refuse, wide_dtype
from hfpatch.ops._linear_ce_chunk import cross_entropy_chunk_, cross_entropy_chunk_bwd_
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
    tokens = labels_N.numel()
    num_valid = opts.num_valid
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
    order, count = kept
    tokens, hidden_size = hidden_ND.shape
    dtype = opts.dtype
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
    order, _ = kept
    vocab_size = weight_VD.shape[0]
    dtype = opts.dtype
    wide = wide_dtype(dtype)
    need_dx = needs[0]
    # Row strides that are multiples of 16 bytes allow the fast matmuls for any vocabulary.
    width = -(-vocab_size // 8) * 8 if on_cuda(hidden_ND) else vocab_size
    upcast = needs[1] and wide != dtype and not sums_in_matmul(hidden_ND, dtype)
    bounds = _chunks(hidden_ND, width, opts, kept, needs, upcast, stats)

    weight_work_VD = weight_VD.to(dtype)
    bias_work_V = None if bias_V is None else bias_V.to(dtype)
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
    device = hidden_ND.device
    wide = wide_dtype(opts.dtype)
    tokens = labels_N.numel()
    scale = total_by.reciprocal()
    grad = any(needs)

    order, _ = kept = kept_tokens(labels_N, opts)
    loss_N = torch.zeros(tokens, dtype=wide, device=device)
    lse_2N = torch.zeros(2, tokens, dtype=wide, device=device)
    best_N = torch.full((tokens if best else 0,), -1, dtype=torch.int32, device=device)
    stats_3N = torch.zeros(3, tokens if stats else 0, dtype=wide, device=device)
    # Written in the order of the kept tokens; one index_copy_ at the end restores the order.
    written = outputs = loss_N, lse_2N, best_N, stats_3N
    labels_M = labels_N
    if order is not None:
        written = [t.clone() for t in outputs]
        labels_M = labels_N[order]
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
        labels_C = labels_M[start:end]
        rows_KC = rows_KM[:, start:end]
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
    V = tuple(weight.shape[:1])
    b = weight if bias is None else bias
    dtypes = hidden.dtype, weight.dtype, b.dtype
    wanted = tuple(hidden.shape[:-1])
    found = tuple(labels.shape)
    inf = float("inf")
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
