"""The chunk loop of linear_cross_entropy and linear_log_prob: logits of a few thousand tokens, turned in place into their gradient.

Legend: N tokens, M tokens kept (label is not ignore_index), C rows of one chunk, D hidden, V vocabulary.

What a sweep allocates, all of it by aten calls in this file, so that whoever follows allocations (a TorchDispatchMode,
over real or fake tensors) sees them: one logits buffer [C, V] reused by every chunk; dX [N, D], unless it overwrites
hidden; the gathered rows [C, D] and their dX where ignored tokens are dropped; dW.

dW: with one chunk, one matmul in the weight's dtype. With more, a float32 sum that the matmul adds to in its epilogue
(CUDA; elsewhere the operands are upcast a slice at a time), rounded once at the end. That sum is held as two slabs of
half the vocabulary each: the first slab has exactly the bytes of the rounded dW, so the rounded rows are written over
the float32 rows already read, and the second slab is freed. No moment holds the sum and the rounded dW side by side.
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
BYTES_PER_TOKEN = 56  # loss, lse in two numbers, best, label, sort key and order of every token, from the workspace
STATS_BYTES_PER_TOKEN = 56  # where entropy and its kin are asked for: three numbers, twice, and the backward's factors
COLUMNS = 256  # of a matmul's tile, beside ROWS rows
# A chunk's pass over the float32 sums of dW takes as long as dX of this many rows: 428 at an A100's rates, 827 at an H100's.
ROWS_OF_A_PASS = 512


class Options(NamedTuple):
    """What the caller asked for; softcap 0 means none; dtype is that of the logits. SCHEMA says it to the dispatcher."""

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
        """z = outer * u with u = tanh(inner * x), or x where inner is 0."""
        return self.scale / self.softcap if self.softcap else 0.0

    @property
    def outer(self) -> float:
        return (self.softcap or self.scale) / self.temperature


SCHEMA = (
    "int ignore_index, str reduction, int? num_valid, float smoothing, float scale, float softcap, float temperature,"
    " float z_loss, int workspace_bytes, ScalarType dtype"
)


class Forward(NamedTuple):
    """What forward_pass returns; best_N and stats_3N are empty where not asked for."""

    total: Tensor  # scale * sum of token_loss
    token_loss_N: Tensor
    lse_2N: Tensor  # in two numbers, see `whole_lse`
    best_N: Tensor  # int32, -1 where ignored
    stats_3N: Tensor  # entropy, mean logit, sum of squared probabilities
    scale: Tensor
    grads: tuple[Tensor | None, Tensor | None, Tensor | None]  # dX, dW, dbias of total


def readable(x: Tensor) -> bool:
    """True where a value of x can be looked at without waiting for a device."""
    return x.device.type == "cpu" and not is_fake(x)


def chunk_bounds(tokens: int, row_bytes: int, workspace_bytes: int, best=None) -> list[tuple[int, int]]:
    """[start, end) of each chunk: multiples of 128 rows that fit workspace_bytes, as few as that allows, of one length.

    A last chunk may exceed the others by what the budget leaves over, so that one token more than a round number
    does not cost one chunk more. A budget of less than 128 rows gives chunks as long as it allows. best: a
    function giving the length of several chunks from the most that fits; None: that.
    """
    most = workspace_bytes // row_bytes
    if most < 1:
        raise ValueError(
            f"hfpatch: expected at least {row_bytes:,} bytes for the logits of one token, workspace_bytes "
            f"leaves {max(0, workspace_bytes):,}; raise it."
        )
    size = most // ROWS * ROWS or most
    if best is not None and tokens > most and size > ROWS:
        size = best(size)
    count = max(1, -(-(tokens - (most - size)) // size)) if tokens else 0
    if count > 1 and size > ROWS:
        size = min(size, -(-tokens // (count * ROWS)) * ROWS)
    return [(i * size, tokens if i == count - 1 else (i + 1) * size) for i in range(count)]


def rows_that_fill(most: int, tokens: int, hidden_size: int, processors: int, pass_rows: int = 0) -> int:
    """Of the multiples of 128 rows up to `most` the length of a chunk with which dX takes the least time in all; `most` where no
    other saves a sixteenth.

    dX [C, D] is the one product of few tiles: at 2,048 x 4,096 they fill an A100's 108 processors 2.37 times, and take 3 rounds,
    at 1,664 x 4,096 1.93 times. pass_rows: rows of dX in whose time a chunk does what it does once.
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
    """Of the GPU that x lies on; None on a CPU, and for a tensor of a simulation."""
    from hfpatch.kernels._launch import sm_count

    return sm_count(x.device) if x.is_cuda and not is_fake(x) else None


def check_labels(labels_N: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Every label is ignore_index or in [0, vocab_size): ValueError on the CPU, elsewhere a device-side assertion."""
    if is_fake(labels_N):
        return
    ok_N = ((labels_N >= 0) & (labels_N < vocab_size)) | (labels_N == ignore_index)
    expected = f"labels must lie in [0, {vocab_size}) or be ignore_index={ignore_index}"
    if not readable(labels_N):
        assert_async(ok_N.all(), f"hfpatch: {expected}; check the tokenizer against the model's vocabulary.")
    elif not ok_N.all():
        raise ValueError(
            f"hfpatch: {expected}, {int(labels_N[~ok_N][0])} came; check the tokenizer against the model's vocabulary."
        )


def kept_tokens(labels_N: Tensor, opts: Options) -> tuple[Tensor | None, int]:
    """(order, M): the first M entries of order [N] are the tokens to keep, the rest may be dropped; None keeps all.

    The size M comes from the host (num_valid, or a count where labels are on the CPU), so nothing waits for the device.
    Where less than 1/32 would be dropped, gathering costs more than it saves and all tokens are kept.
    """
    tokens, num_valid = labels_N.numel(), opts.num_valid
    ignored_N = labels_N == opts.ignore_index
    message = "hfpatch: num_valid must be at least the number of labels (after the shift) that are not ignore_index"
    if readable(labels_N):
        count = tokens - int(ignored_N.sum())
        if num_valid is None:
            num_valid = count
        elif num_valid < count:
            raise ValueError(f"{message}, {num_valid} came for {count}; count the labels that the op gets.")
    elif num_valid is not None and not is_fake(labels_N):
        assert_async(ignored_N.sum() >= tokens - num_valid, f"{message}; count the labels that the op gets.")
    if num_valid is None or tokens - num_valid <= tokens // 32:
        return None, tokens
    return torch.argsort(ignored_N.to(torch.uint8), stable=True), num_valid


class WeightGrad:
    """dW = sum over chunks of d_logits^T hidden, in the weight's dtype, as the head of this file says."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype, chunks: int, scratch_bytes: int):
        self.weight, self.dtype, self.single, self.scratch_bytes = weight_VD, dtype, chunks == 1, scratch_bytes
        self.empty = True
        vocab_size, hidden_size = weight_VD.shape
        wide = wide_dtype(dtype)
        self.direct = self.single or wide == weight_VD.dtype
        if self.direct:
            sizes, out_dtype = [vocab_size], weight_VD.dtype
        else:
            sizes, out_dtype = [vocab_size - vocab_size // 2, vocab_size // 2], wide
        self.slabs = [torch.empty(rows, hidden_size, dtype=out_dtype, device=weight_VD.device) for rows in sizes]

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
            # Autocast in one 16-bit dtype over weights of the other.
            out_RD.copy_(torch.mm(d_logits_CR.t(), hidden_CD))
        elif sums_in_matmul(out_RD, d_logits_CR.dtype):
            into(out_RD, d_logits_CR.t(), hidden_CD, self.empty)
        else:
            hidden_CD = hidden_CD.to(out_RD.dtype)
            rows = max(1, self.scratch_bytes // (out_RD.element_size() * max(1, d_logits_CR.shape[0])))
            for start in range(0, out_RD.shape[0], rows):
                d_RC = d_logits_CR[:, start : start + rows].to(out_RD.dtype).t()
                part_RD = out_RD[start : start + rows]
                torch.mm(d_RC, hidden_CD, out=part_RD) if self.empty else part_RD.addmm_(d_RC, hidden_CD)

    def finish(self) -> Tensor:
        """dW [V, D]; call once, after the logits buffer is gone."""
        if self.empty:
            return torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        if self.direct:
            return self.slabs.pop()
        (first_RD, second_RD), dtype = self.slabs, self.weight.dtype
        self.slabs = []
        vocab_size, hidden_size = self.weight.shape
        if dtype.itemsize * 2 != first_RD.element_size():
            return torch.cat([first_RD, second_RD]).to(dtype)
        out_VD = first_RD.view(dtype).view(-1)[: vocab_size * hidden_size].view(vocab_size, hidden_size)
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
    """(dX, dW, dbias), each None where `needs` says so, over chunks of the kept tokens.

    step(logits_CV, start, end) turns the logits of kept tokens [start, end) into their gradient, in place.
    overwrite: dX is written over hidden_ND (of the logits' dtype). shard: weight_VD and bias_V are this rank's part; all ranks
    have the same chunks, and the sum of their dX.
    """
    need_dx, need_dw, need_db = needs
    order, kept_count = kept
    dtype, device = opts.dtype, hidden_ND.device
    (tokens, hidden_size), vocab_size = hidden_ND.shape, weight_VD.shape[0]
    cuda = on_cuda(hidden_ND)
    # A row stride of 16 bytes keeps the fast matmuls for vocabularies that are no multiple of 8.
    stride = -(-vocab_size // 8) * 8 if cuda else vocab_size
    widest = stride if shard is None else -(-shard.widest // 8) * 8
    gather, scatter = order is not None or hidden_ND.dtype != dtype, order is not None or hidden_ND.dtype != dtype
    upcast = need_dw and not sums_in_matmul(hidden_ND, dtype) and wide_dtype(dtype) != dtype
    row_bytes = max(1, widest) * dtype.itemsize
    row_bytes += hidden_size * ((gather + (scatter and need_dx)) * dtype.itemsize + upcast * wide_dtype(dtype).itemsize)
    scratch_bytes = opts.workspace_bytes // 16
    room = opts.workspace_bytes - tokens * (BYTES_PER_TOKEN + extra_bytes_per_token) - upcast * scratch_bytes
    # Ranks that share the vocabulary have the same chunks, whatever their devices.
    processors = processors_of(hidden_ND) if shard is None and need_dx else None
    best = lambda size: rows_that_fill(size, kept_count, hidden_size, processors, need_dw * ROWS_OF_A_PASS)  # noqa: E731
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
        hidden_CD = (hidden_ND[start:end] if index_C is None else hidden_ND.index_select(0, index_C)).to(dtype)
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
    return dx_ND, None if dw is None else dw.finish(), None if db_V is None else db_V.to(bias_V.dtype)


def divisor(
    labels_N: Tensor, class_weight_V: Tensor | None, num_items: Tensor | None, opts: Options, device: torch.device
) -> Tensor:
    """What the sum of the token losses is divided by, a scalar on the device, not differentiable."""
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
    """The loss and what else is asked for, from logits computed once; with `needs` the gradients of the total as well,
    folded into the logits' gradient. shard: of which words weight_VD and bias_V are; the rest is of all."""
    check_labels(labels_N, weight_VD.shape[0] if shard is None else shard.size, opts.ignore_index)
    device, wide, tokens = hidden_ND.device, wide_dtype(opts.dtype), labels_N.numel()
    total_by = divisor(labels_N, class_weight_V, num_items, opts, device)
    scale = total_by.reciprocal()

    order, _ = kept = kept_tokens(labels_N, opts)
    loss_N, lse_2N = (torch.zeros(size, dtype=wide, device=device) for size in (tokens, (2, tokens)))
    best_N = torch.full((tokens if best else 0,), -1, dtype=torch.int32, device=device)
    stats_3N = torch.zeros(3, tokens if stats else 0, dtype=wide, device=device)
    # Written in order of the kept tokens, moved to their places once at the end.
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
    """The largest probability of each token: p of a word is that times exp(z - largest z)."""
    return lse_2N[1].neg().exp_()


def loss_factors(
    dloss_N: Tensor,
    dlse_2N: Tensor | None,
    labels_N: Tensor,
    lse_2N: Tensor,
    class_weight_V: Tensor | None,
    vocab_size: int,
    opts: Options,
) -> Tensor:
    """The rows of backward_pass for an upstream gradient per token loss and, where given, per lse (dlse_2N[1])."""
    y_N = dloss_N * (1.0 - opts.smoothing)
    if class_weight_V is not None:
        y_N = y_N * class_weight_V[labels_N.clamp(0, vocab_size - 1)]
    p_N = y_N + dloss_N * (2.0 * opts.z_loss * whole_lse(lse_2N, opts.outer))
    if dlse_2N is not None:
        p_N = p_N + dlse_2N[1]
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
    """(dX, dW, dbias) from logits computed again; rows_KN are the factors of `cross_entropy_chunk_bwd_`."""
    order, _ = kept = kept_tokens(labels_N, opts)
    labels_M = labels_N if order is None else labels_N[order]
    rows_KM = rows_KN if order is None else rows_KN.index_select(1, order)

    def step(logits_CV, start, end):
        rows = rows_KM[:, start:end]
        if shard is not None:
            return shard.chunk_bwd_(logits_CV, labels_M[start:end], rows, class_weight_V, opts)
        cross_entropy_chunk_bwd_(
            logits_CV, labels_M[start:end], rows, class_weight_V, opts.ignore_index, opts.inner, opts.outer
        )

    extra = STATS_BYTES_PER_TOKEN if rows_KN.shape[0] > 4 else 0
    return sweep(hidden_ND, weight_VD, bias_V, opts, kept, step, needs, overwrite, extra, shard)


def or_empty(tensors, like: Tensor) -> tuple[Tensor, ...]:
    """An op returns tensors alone: what is absent is empty."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


def empty_grads(tensors, needs) -> tuple[Tensor | None, ...]:
    """What the gradients of tensors look like, None where not needed."""
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if need else None for t, need in zip(tensors, needs)
    )
