"""The chunk loop of linear_cross_entropy and linear_log_prob.

The logits of a few thousand tokens are computed and turned, in place, into their own gradient.

Legend: N tokens, M tokens kept (label is not ignore_index), C rows of one chunk, D hidden,
V vocabulary.

A sweep allocates: one logits buffer [C, V], reused by every chunk; dX [N, D], unless it overwrites
hidden; where ignored tokens are dropped, the gathered rows [C, D] and their dX; dW. All of it comes
from aten calls in this file, so a TorchDispatchMode that follows allocations sees it, also over
fake tensors.

dW: with one chunk, one matmul in the weight's dtype. With several, a float32 sum, rounded once at
the end. On CUDA the matmul adds to the sum in its epilogue; elsewhere the operands are upcast a
slice at a time. The sum is held as two slabs of half the vocabulary each. The first slab has
exactly the bytes of the rounded dW, so rounded rows overwrite float32 rows that were already read,
and the second slab is freed. The sum and the rounded dW never exist side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hfpatch.compat import assert_async, is_fake
from hfpatch.ops._library import wide_dtype
from hfpatch.ops._linear_ce_chunk import cross_entropy_chunk_, cross_entropy_chunk_bwd_, whole_lse
from hfpatch.ops._linear_ce_shards import VocabShard
from hfpatch.ops._wide_sums import into, on_cuda, sums_in_matmul

ROWS = 128  # chunks are multiples of this many tokens, the row tile of the matmuls
# Of the workspace, per token: loss, lse in two numbers, best, label, sort key and order.
BYTES_PER_TOKEN = 56
# Besides, for entropy and related values: three numbers, twice, and the factors of the backward.
STATS_BYTES_PER_TOKEN = 56
COLUMNS = 256  # a matmul's tile has ROWS rows and COLUMNS columns
# A pass over the float32 sum of dW takes as long as dX of this many rows. By data-sheet rates it is
# 428 on an A100 and 827 on an H100.
ROWS_OF_A_PASS = 512


class Options(NamedTuple):
    """The options of a loss.

    softcap 0 means none; dtype is the logits'. SCHEMA is the same for the dispatcher.
    """

    ignore_index: int
    reduction: str
    num_valid: int | None
    smoothing: float
    scale: float
    softcap: float
    temperature: float
    z_loss: float
    workspace_bytes: int
    dtype: torch.dtype

    @property
    def inner(self) -> float:
        """z = outer * u with u = tanh(inner * logit), or u = logit where inner is 0."""
        return self.scale / self.softcap if self.softcap else 0.0

    @property
    def outer(self) -> float:
        return (self.softcap or self.scale) / self.temperature


SCHEMA = (
    "int ignore_index, str reduction, int? num_valid, float smoothing, float scale, float softcap, "
    "float temperature,"
    " float z_loss, int workspace_bytes, ScalarType dtype"
)


class Forward(NamedTuple):
    """Returned by forward_pass. best_N and stats_3N are empty where not asked for."""

    total: Tensor  # scale * sum of token_loss
    token_loss_N: Tensor
    lse_2N: Tensor  # in two numbers, see `whole_lse`
    best_N: Tensor  # int32, -1 where ignored
    stats_3N: Tensor  # entropy, mean logit, sum of squared probabilities
    scale: Tensor
    grads: tuple[Tensor | None, Tensor | None, Tensor | None]  # dX, dW, dbias of total


def readable(x: Tensor) -> bool:
    """Whether a value of x can be read without waiting for a device."""
    return x.device.type == "cpu" and not is_fake(x)


def chunk_bounds(
    tokens: int, row_bytes: int, workspace_bytes: int, best=None
) -> list[tuple[int, int]]:
    """Cuts the tokens into as few chunks of equal length as workspace_bytes allows.

    Lengths are multiples of 128 rows, or less where the budget holds fewer. The last chunk may be
    longer by what the budget leaves over, so one token more than a round number does not cost a
    further chunk.

    Args:
        tokens: how many rows there are.
        row_bytes: the bytes of one row of logits and its buffers.
        workspace_bytes: the budget.
        best: a function (the longest chunk that fits) -> the length to use; None uses the longest.

    Returns:
        [start, end) of each chunk.

    Raises:
        ValueError: the budget holds no row.
    """
    most = workspace_bytes // row_bytes
    if most < 1:
        raise ValueError(
            f"hfpatch: expected at least {row_bytes:,} bytes for the logits of one token, "
            "workspace_bytes "
            f"leaves {max(0, workspace_bytes):,}; raise it."
        )
    size = most // ROWS * ROWS or most
    if best is not None and tokens > most and size > ROWS:
        size = best(size)
    count = max(1, -(-(tokens - (most - size)) // size)) if tokens else 0
    if count > 1 and size > ROWS:
        size = min(size, -(-tokens // (count * ROWS)) * ROWS)
    return [(i * size, tokens if i == count - 1 else (i + 1) * size) for i in range(count)]


def rows_that_fill(
    most: int, tokens: int, hidden_size: int, processors: int, pass_rows: int = 0
) -> int:
    """The chunk length, a multiple of 128 rows up to `most`, for which all dX matmuls take the
    least time.

    dX [C, D] has few tiles. At 2,048 x 4,096 they fill an A100's 108 processors 2.37 times and take
    3 rounds; at 1,664 x 4,096 they fill them 1.93 times and take 2.

    Args:
        most: the longest chunk; returned where no other length saves a sixteenth.
        tokens: how many rows there are in all.
        hidden_size: D.
        processors: how many the GPU has.
        pass_rows: a chunk's fixed cost, in rows of dX that take as long.
    """
    across = -(-hidden_size // COLUMNS)

    def cost(rows: int) -> float:
        rounds = -(-(-(-rows // ROWS) * across) // processors)
        return rounds * processors / across * ROWS + pass_rows

    def whole(size: int) -> float:
        full, last = divmod(tokens, size)
        return full * cost(size) + (cost(last) if last else 0.0)

    best = min(range(most, 0, -ROWS), key=whole)
    return best if 16 * whole(best) < 15 * whole(most) else most


def processors_of(x: Tensor) -> int | None:
    """The number of processors of x's GPU; None on a CPU and for fake tensors."""
    from hfpatch.kernels._launch import sm_count

    return sm_count(x.device) if x.is_cuda and not is_fake(x) else None


def check_labels(labels_N: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Checks that every label is ignore_index or in [0, vocab_size).

    Raises:
        ValueError: on the CPU. On other devices a device-side assertion fails instead.
    """
    if is_fake(labels_N):
        return
    ok_N = ((labels_N >= 0) & (labels_N < vocab_size)) | (labels_N == ignore_index)
    expected = f"labels must lie in [0, {vocab_size}) or be ignore_index={ignore_index}"
    if not readable(labels_N):
        assert_async(
            ok_N.all(), f"hfpatch: {expected}; check the tokenizer against the model's vocabulary."
        )
    elif not ok_N.all():
        raise ValueError(
            f"hfpatch: {expected}, {int(labels_N[~ok_N][0])} came; check the tokenizer against the "
            "model's vocabulary."
        )


def kept_tokens(labels_N: Tensor, opts: Options) -> tuple[Tensor | None, int]:
    """Which tokens go through the matmuls.

    Returns:
        (order, M): the first M entries of order [N] are the tokens to keep. order is None where all
        are kept, which includes the case that less than 1/32 would be dropped: gathering costs
        more. M comes from the host (num_valid, or a count of labels on the CPU), so nothing waits
        for the device.

    Raises:
        ValueError: num_valid is smaller than the number of labels.
    """
    tokens, num_valid = labels_N.numel(), opts.num_valid
    ignored_N = labels_N == opts.ignore_index
    message = (
        "hfpatch: num_valid must be at least the number of labels (after the shift) that are not "
        "ignore_index"
    )
    if readable(labels_N):
        count = tokens - int(ignored_N.sum())
        if num_valid is None:
            num_valid = count
        elif num_valid < count:
            raise ValueError(
                f"{message}, {num_valid} came for {count}; count the labels that the op gets."
            )
    elif num_valid is not None and not is_fake(labels_N):
        assert_async(
            ignored_N.sum() >= tokens - num_valid, f"{message}; count the labels that the op gets."
        )
    if num_valid is None or tokens - num_valid <= tokens // 32:
        return None, tokens
    return torch.argsort(ignored_N.to(torch.uint8), stable=True), num_valid


class WeightGrad:
    """dW = sum over chunks of d_logits^T hidden; see the top of this file."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype, chunks: int, scratch_bytes: int):
        self.weight, self.dtype, self.single, self.scratch_bytes = (
            weight_VD,
            dtype,
            chunks == 1,
            scratch_bytes,
        )
        self.empty = True
        vocab_size, hidden_size = weight_VD.shape
        wide = wide_dtype(dtype)
        self.direct = self.single or wide == weight_VD.dtype
        if self.direct:
            sizes, out_dtype = [vocab_size], weight_VD.dtype
        else:
            sizes, out_dtype = [vocab_size - vocab_size // 2, vocab_size // 2], wide
        self.slabs = [
            torch.empty(rows, hidden_size, dtype=out_dtype, device=weight_VD.device)
            for rows in sizes
        ]

    def add(self, d_logits_CV: Tensor, hidden_CD: Tensor) -> None:
        start = 0
        for slab_RD in self.slabs:
            self._matmul(slab_RD, d_logits_CV[:, start : start + slab_RD.shape[0]], hidden_CD)
            start += slab_RD.shape[0]
        self.empty = False

    def _matmul(self, out_RD: Tensor, d_logits_CR: Tensor, hidden_CD: Tensor) -> None:
        if out_RD.numel() == 0:
            return
        same = out_RD.dtype == d_logits_CR.dtype
        if same and self.empty:
            torch.mm(d_logits_CR.t(), hidden_CD, out=out_RD)
        elif same:
            out_RD.addmm_(d_logits_CR.t(), hidden_CD)
        elif self.single and wide_dtype(out_RD.dtype) != out_RD.dtype:
            # Autocast to one 16-bit dtype, with weights of the other.
            out_RD.copy_(torch.mm(d_logits_CR.t(), hidden_CD))
        elif sums_in_matmul(out_RD, d_logits_CR.dtype):
            into(out_RD, d_logits_CR.t(), hidden_CD, self.empty)
        else:
            hidden_CD = hidden_CD.to(out_RD.dtype)
            rows = max(
                1, self.scratch_bytes // (out_RD.element_size() * max(1, d_logits_CR.shape[0]))
            )
            for start in range(0, out_RD.shape[0], rows):
                d_RC = d_logits_CR[:, start : start + rows].to(out_RD.dtype).t()
                part_RD = out_RD[start : start + rows]
                torch.mm(d_RC, hidden_CD, out=part_RD) if self.empty else part_RD.addmm_(
                    d_RC, hidden_CD
                )

    def finish(self) -> Tensor:
        """dW [V, D]. Call once, after the logits buffer was freed."""
        if self.empty:
            return torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        if self.direct:
            return self.slabs.pop()
        (first_RD, second_RD), dtype = self.slabs, self.weight.dtype
        self.slabs = []
        vocab_size, hidden_size = self.weight.shape
        if dtype.itemsize * 2 != first_RD.element_size():
            return torch.cat([first_RD, second_RD]).to(dtype)
        out_VD = (
            first_RD.view(dtype).view(-1)[: vocab_size * hidden_size].view(vocab_size, hidden_size)
        )
        step = max(1, self.scratch_bytes // max(1, hidden_size * dtype.itemsize))
        for start in range(0, first_RD.shape[0], step):
            rows = slice(start, min(start + step, first_RD.shape[0]))
            out_VD[rows] = first_RD[rows].to(dtype)  # row r lands on float32 row r/2, read before
        out_VD[first_RD.shape[0] :] = second_RD
        return out_VD


def sweep(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    opts: Options,
    kept: tuple[Tensor | None, int],
    step: Callable[[Tensor, int, int], None],
    needs: tuple[bool, bool, bool],
    overwrite: bool = False,
    extra_bytes_per_token: int = 0,
    shard: VocabShard | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Runs `step` over chunks of the kept tokens and collects the gradients.

    Args:
        hidden_ND, weight_VD, bias_V: the inputs of the head.
        opts: the options of the loss.
        kept: from kept_tokens.
        step: step(logits_CV, start, end) turns the logits of kept tokens [start, end) into their
            gradient, in place.
        needs: which of hidden, weight and bias need a gradient.
        overwrite: write dX over hidden_ND, which has the logits' dtype.
        extra_bytes_per_token: workspace that the caller uses per token, besides BYTES_PER_TOKEN.
        shard: weight_VD and bias_V are this rank's rows. All ranks use the same chunks and get the
            sum of their dX.

    Returns:
        (dX, dW, dbias), None where not needed.
    """
    need_dx, need_dw, need_db = needs
    order, kept_count = kept
    dtype, device = opts.dtype, hidden_ND.device
    (tokens, hidden_size), vocab_size = hidden_ND.shape, weight_VD.shape[0]
    cuda = on_cuda(hidden_ND)
    # Row strides that are multiples of 16 bytes allow the fast matmuls for any vocabulary.
    stride = -(-vocab_size // 8) * 8 if cuda else vocab_size
    widest = stride if shard is None else -(-shard.widest // 8) * 8
    gather, scatter = (
        order is not None or hidden_ND.dtype != dtype,
        order is not None or hidden_ND.dtype != dtype,
    )
    upcast = need_dw and not sums_in_matmul(hidden_ND, dtype) and wide_dtype(dtype) != dtype
    row_bytes = max(1, widest) * dtype.itemsize
    row_bytes += hidden_size * (
        (gather + (scatter and need_dx)) * dtype.itemsize + upcast * wide_dtype(dtype).itemsize
    )
    scratch_bytes = opts.workspace_bytes // 16
    room = (
        opts.workspace_bytes
        - tokens * (BYTES_PER_TOKEN + extra_bytes_per_token)
        - upcast * scratch_bytes
    )
    # Ranks that share the vocabulary have the same chunks, whatever their devices.
    processors = processors_of(hidden_ND) if shard is None and need_dx else None
    pass_rows = need_dw * ROWS_OF_A_PASS

    def best(size):
        return rows_that_fill(size, kept_count, hidden_size, processors, pass_rows)

    bounds = chunk_bounds(kept_count, row_bytes, room, best if processors else None)

    weight_work_VD, bias_work_V = weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
    rows = max((end - start for start, end in bounds), default=0)
    buffer_CV = torch.empty(rows, stride, dtype=dtype, device=device)[:, :vocab_size]
    if not need_dx:
        dx_ND = None
    elif overwrite:
        dx_ND = hidden_ND
    else:
        dx_ND = (torch.empty if order is None and bounds else torch.zeros)(
            tokens, hidden_size, dtype=hidden_ND.dtype, device=device
        )
    dw = WeightGrad(weight_VD, dtype, len(bounds), scratch_bytes) if need_dw else None
    db_V = torch.zeros(vocab_size, dtype=wide_dtype(dtype), device=device) if need_db else None

    for start, end in bounds:
        index_C = None if order is None else order[start:end]
        hidden_CD = (
            hidden_ND[start:end] if index_C is None else hidden_ND.index_select(0, index_C)
        ).to(dtype)
        logits_CV = buffer_CV[: end - start]
        if bias_work_V is None:
            torch.mm(hidden_CD, weight_work_VD.t(), out=logits_CV)
        else:
            torch.addmm(bias_work_V, hidden_CD, weight_work_VD.t(), out=logits_CV)
        step(logits_CV, start, end)
        if dw is not None:
            dw.add(logits_CV, hidden_CD)
        if db_V is not None:
            db_V += logits_CV.sum(0, dtype=db_V.dtype)
        if dx_ND is None:
            continue
        if not scatter:
            torch.mm(logits_CV, weight_work_VD, out=dx_ND[start:end])
        elif index_C is None:
            dx_ND[start:end] = logits_CV @ weight_work_VD
        else:
            dx_ND.index_copy_(0, index_C, (logits_CV @ weight_work_VD).to(dx_ND.dtype))
    if overwrite and order is not None:
        dx_ND.index_fill_(0, order[kept_count:], 0)
    logits_CV = buffer_CV = hidden_CD = weight_work_VD = None
    dx_ND = dx_ND if shard is None else shard.summed(dx_ND)
    return (
        dx_ND,
        None if dw is None else dw.finish(),
        None if db_V is None else db_V.to(bias_V.dtype),
    )


def divisor(
    labels_N: Tensor,
    class_weight_V: Tensor | None,
    num_items: Tensor | None,
    opts: Options,
    device: torch.device,
) -> Tensor:
    """What the sum of the token losses is divided by, a scalar on the device, not
    differentiable."""
    wide = wide_dtype(opts.dtype)
    if num_items is not None:
        return num_items.detach().to(device=device, dtype=wide, non_blocking=True).reshape(())
    if opts.reduction != "mean":
        return torch.ones((), dtype=wide, device=device)
    if class_weight_V is None:
        return (labels_N != opts.ignore_index).sum().to(wide)
    safe_N = labels_N.clamp(0, class_weight_V.shape[0] - 1)
    return class_weight_V[safe_N].masked_fill_(labels_N == opts.ignore_index, 0.0).sum()


def forward_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    class_weight_V: Tensor | None,
    num_items: Tensor | None,
    opts: Options,
    needs: tuple[bool, bool, bool] = (False,) * 3,
    *,
    best: bool = False,
    stats: bool = False,
    overwrite: bool = False,
    shard: VocabShard | None = None,
) -> Forward:
    """The loss and other outputs from logits computed once, with the gradients of the total if
    needed.

    Args:
        hidden_ND, weight_VD, bias_V, labels_N, class_weight_V, num_items, opts: as in
            linear_cross_entropy.
        needs: which of hidden, weight and bias get a gradient of the total now.
        best: also find the word with the largest logit.
        stats: also compute entropy, mean logit and the sum of squared probabilities.
        overwrite: write dX over hidden_ND.
        shard: weight_VD and bias_V are this rank's rows; everything else is of the whole
            vocabulary.
    """
    check_labels(labels_N, weight_VD.shape[0] if shard is None else shard.size, opts.ignore_index)
    device, wide, tokens = hidden_ND.device, wide_dtype(opts.dtype), labels_N.numel()
    total_by = divisor(labels_N, class_weight_V, num_items, opts, device)
    scale = total_by.reciprocal()

    order, _ = kept = kept_tokens(labels_N, opts)
    loss_N, lse_2N = (
        torch.zeros(size, dtype=wide, device=device) for size in (tokens, (2, tokens))
    )
    best_N = torch.full((tokens if best else 0,), -1, dtype=torch.int32, device=device)
    stats_3N = torch.zeros(3, tokens if stats else 0, dtype=wide, device=device)
    # Written in the order of the kept tokens; moved to their places once, at the end.
    outputs = [loss_N, lse_2N, best_N, stats_3N]
    written = outputs if order is None else [t.clone() for t in outputs]
    labels_M = labels_N if order is None else labels_N[order]

    def step(logits_CV, start, end):
        loss, lse, best_C, stats_3C = (t[..., start:end] for t in written)
        row = (
            labels_M[start:end],
            scale,
            class_weight_V,
            loss,
            lse,
            best_C if best else None,
            stats_3C if stats else None,
        )
        if shard is not None:
            return shard.chunk_(logits_CV, *row, opts, loss_factors if any(needs) else None)
        options = opts.ignore_index, opts.smoothing, opts.inner, opts.outer, opts.z_loss, any(needs)
        cross_entropy_chunk_(logits_CV, *row, *options)

    extra = STATS_BYTES_PER_TOKEN if stats else 0
    grads = sweep(hidden_ND, weight_VD, bias_V, opts, kept, step, needs, overwrite, extra, shard)
    if order is not None:
        for out, values in zip(outputs, written):
            if out.numel():
                out.index_copy_(-1, order, values)
    return Forward(loss_N.sum() / total_by, loss_N, lse_2N, best_N, stats_3N, scale, grads)


def share(lse_2N: Tensor) -> Tensor:
    """The largest probability of each token; a word's is this times exp(z - largest z)."""
    return lse_2N[1].neg().exp_()


def loss_factors(
    dloss_N: Tensor,
    labels_N: Tensor,
    lse_2N: Tensor,
    class_weight_V: Tensor | None,
    vocab_size: int,
    opts: Options,
) -> Tensor:
    """The factors rows_KN of backward_pass, from the upstream gradient of each token's loss."""
    y_N = dloss_N * (1.0 - opts.smoothing)
    if class_weight_V is not None:
        y_N = y_N * class_weight_V[labels_N.clamp(0, vocab_size - 1)]
    p_N = y_N + dloss_N * (2.0 * opts.z_loss * whole_lse(lse_2N, opts.outer))
    if not opts.smoothing:
        return torch.stack([lse_2N[0], p_N * share(lse_2N), y_N])
    u_N = dloss_N * (opts.smoothing / vocab_size)
    p_N = p_N + u_N * (vocab_size if class_weight_V is None else class_weight_V.sum())
    return torch.stack([lse_2N[0], p_N * share(lse_2N), y_N, u_N])


def backward_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    class_weight_V: Tensor | None,
    rows_KN: Tensor,
    opts: Options,
    needs: tuple[bool, bool, bool],
    overwrite: bool = False,
    shard: VocabShard | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dX, dW, dbias) from logits computed a second time.

    rows_KN: factors of `cross_entropy_chunk_bwd_`.
    """
    order, _ = kept = kept_tokens(labels_N, opts)
    labels_M = labels_N if order is None else labels_N[order]
    rows_KM = rows_KN if order is None else rows_KN.index_select(1, order)

    def step(logits_CV, start, end):
        rows = rows_KM[:, start:end]
        if shard is not None:
            return shard.chunk_bwd_(logits_CV, labels_M[start:end], rows, class_weight_V, opts)
        cross_entropy_chunk_bwd_(
            logits_CV,
            labels_M[start:end],
            rows,
            class_weight_V,
            opts.ignore_index,
            opts.inner,
            opts.outer,
        )

    extra = STATS_BYTES_PER_TOKEN if rows_KN.shape[0] > 4 else 0
    return sweep(hidden_ND, weight_VD, bias_V, opts, kept, step, needs, overwrite, extra, shard)
