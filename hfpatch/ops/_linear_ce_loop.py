"""The loop that cross-entropy and log-probabilities of hidden @ weight.T share, and the check of
their arguments. Whole logits never exist.

The logits of a few thousand tokens are computed and turned, in place, into their own gradient:

    for each chunk of the kept tokens:
        logits = hidden[chunk] @ weight.T + bias
        op(logits): writes loss and lse of the chunk, overwrites logits with their gradient
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
from hfpatch.ops._linear_ce_chunk import cross_entropy_chunk_
from hfpatch.ops._linear_ce_weight import WeightGrad
from hfpatch.ops._wide_sums import on_cuda, sums_in_matmul

HeadTensors = tuple | list  # hidden_ND, weight_VD, bias_V
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # dX, dW, dbias
KeptTokens = tuple[Tensor | None, int]  # see kept_tokens
# More workspace bytes per token for entropy and related values: three numbers, twice, and the
# backward's factors.
STATS_BYTES_PER_TOKEN = 56


class Options(NamedTuple):
    """The options of a loss.

    z = outer * u with u = tanh(inner * logit), or u = logit if inner is 0. dtype is the logits'.
    """

    ignore_index: int
    inner: float
    outer: float
    dtype: torch.dtype
    num_valid: int | None
    workspace_bytes: int


def _count_labels(labels_N: Tensor, ignored_N: Tensor, vocab_size: int, opts: Options):
    """Checks the labels. Returns num_valid, or the number of labels if the host can count them.

    Raises:
        ValueError: a label is neither ignore_index nor in [0, vocab_size), or num_valid is smaller
            than the number of labels. On devices other than the CPU an assertion fails there.
    """
    num_valid = opts.num_valid
    valid_N = ((labels_N >= 0) & (labels_N < vocab_size)) | ignored_N
    in_range = (
        f"hfpatch: labels must lie in [0, {vocab_size}) or be ignore_index={opts.ignore_index}{{}}. "
        "Check the tokenizer against the model's vocabulary."
    )
    enough = (
        "hfpatch: num_valid must be at least the number of labels (after the shift) that are not "
        "ignore_index{}. Count the labels that the op gets."
    )
    if labels_N.device.type != "cpu":
        assert_async(valid_N.all(), in_range.format(""))
        if num_valid is not None:
            assert_async(ignored_N.sum() >= len(labels_N) - num_valid, enough.format(""))
        return num_valid
    if not valid_N.all():
        raise ValueError(in_range.format(f", got {int(labels_N[~valid_N][0])}"))
    count = len(labels_N) - int(ignored_N.sum())
    if num_valid is None:
        return count
    if num_valid < count:
        raise ValueError(enough.format(f", got {num_valid} for {count}"))
    return num_valid


def kept_tokens(labels_N: Tensor, vocab_size: int, opts: Options) -> KeptTokens:
    """Which tokens go through the matmuls.

    Returns:
        (order_M, M): the tokens to keep. order_M is None where all are kept. If less than 1/32
        could be dropped, all are kept: gathering costs more. M comes from the host (num_valid, or a
        count of labels on the CPU), so nothing waits for the device.
    """
    tokens = len(labels_N)
    ignored_N = labels_N == opts.ignore_index
    num_valid = opts.num_valid
    if not is_fake(labels_N):
        num_valid = _count_labels(labels_N, ignored_N, vocab_size, opts)
    if num_valid is None or tokens - num_valid <= tokens // 32:
        return None, tokens
    return torch.argsort(ignored_N.to(torch.uint8), stable=True)[:num_valid], num_valid


def sweep(
    head: HeadTensors,
    labels_N: Tensor,
    rows_KM: Tensor,
    kept: KeptTokens,
    opts: Options,
    needs: tuple[bool, ...],
    op: Callable,
    *options,
) -> Grads:
    """Runs `op` over chunks of the kept tokens and collects the gradients.

    Args:
        head: the inputs of the head.
        rows_KM: what op reads or writes per token.
        kept: from kept_tokens.
        needs: which of hidden, weight and bias need a gradient.
        op: op(logits_CV, labels_C, rows_KC, ignore_index, inner, outer, *options), one of
            _linear_ce_chunk.py. It overwrites the logits with their gradient.

    Returns:
        (dX, dW, dbias), None where not needed.
    """
    hidden_ND, weight_VD, bias_V = head
    order_M, count = kept
    need_dx, need_dw, need_db = needs
    vocab_size, hidden_size = weight_VD.shape
    dtype = opts.dtype
    wide = wide_dtype(dtype)

    # [Step 1] The chunks that the workspace holds.
    # Row strides that are multiples of 16 bytes allow the fast matmuls for any vocabulary.
    width = -(-vocab_size // 8) * 8 if on_cuda(hidden_ND) else vocab_size
    row_bytes = max(1, width) * dtype.itemsize
    token_bytes = LOSS_BYTES_PER_TOKEN
    scratch_bytes = opts.workspace_bytes // 16
    workspace = opts.workspace_bytes
    if order_M is not None or hidden_ND.dtype != dtype:  # copies of rows and of their dX
        row_bytes += hidden_size * (1 + need_dx) * dtype.itemsize
    if need_dw and wide != dtype and not sums_in_matmul(hidden_ND, dtype):  # dW upcasts
        row_bytes += hidden_size * wide.itemsize
        workspace -= scratch_bytes
    if len(rows_KM) > 4:
        token_bytes += STATS_BYTES_PER_TOKEN
    bounds = chunk_bounds(count, row_bytes, workspace - len(labels_N) * token_bytes)

    # [Step 2] The operands in the logits' dtype, the logits' buffer, the gradients.
    weight_work_VD = weight_VD.to(dtype)
    bias_work_V = None if bias_V is None else bias_V.to(dtype)
    # Only the last chunk differs in length.
    longest = max(bounds[0][1], count - bounds[-1][0]) if bounds else 0
    buffer_CV = hidden_ND.new_empty(longest, width, dtype=dtype)[:, :vocab_size]
    dx_ND = dw = db_V = None
    if need_dx:  # the loop writes every row that is kept
        make = torch.empty_like if order_M is None else torch.zeros_like
        dx_ND = make(hidden_ND, memory_format=torch.contiguous_format)
    if need_dw:
        dw = WeightGrad(weight_VD, dtype, len(bounds), scratch_bytes)
    if need_db:
        db_V = hidden_ND.new_zeros(vocab_size, dtype=wide)

    # [Step 3] The loop.
    labels_M = labels_N if order_M is None else labels_N[order_M]
    for start, end in bounds:
        if order_M is None:
            hidden_CD = hidden_ND[start:end].to(dtype)
        else:
            hidden_CD = hidden_ND.index_select(0, order_M[start:end]).to(dtype)
        logits_CV = buffer_CV[: end - start]
        if bias_work_V is None:
            torch.mm(hidden_CD, weight_work_VD.t(), out=logits_CV)
        else:
            torch.addmm(bias_work_V, hidden_CD, weight_work_VD.t(), out=logits_CV)
        labels_C = labels_M[start:end]
        rows_KC = rows_KM[:, start:end]
        op(logits_CV, labels_C, rows_KC, opts.ignore_index, opts.inner, opts.outer, *options)
        if dw is not None:
            dw.add(logits_CV, hidden_CD)
        if db_V is not None:
            db_V += logits_CV.sum(0, dtype=wide)
        if dx_ND is None:
            continue
        if order_M is not None:
            dx_ND.index_copy_(0, order_M[start:end], (logits_CV @ weight_work_VD).to(dx_ND.dtype))
        elif dx_ND.dtype == dtype:
            torch.mm(logits_CV, weight_work_VD, out=dx_ND[start:end])
        else:
            dx_ND[start:end] = logits_CV @ weight_work_VD

    # [Step 4] dW is rounded once the logits are freed.
    logits_CV = buffer_CV = hidden_CD = weight_work_VD = None
    if db_V is not None:
        db_V = db_V.to(bias_V.dtype)
    return dx_ND, None if dw is None else dw.finish(), db_V


def forward_pass(
    head: HeadTensors,
    labels_N: Tensor,
    scale: Tensor,
    opts: Options,
    needs: tuple[bool, ...] = (False,) * 3,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    stats: bool = False,
    best: bool = False,
) -> tuple[Tensor, KeptTokens, Grads]:
    """The loss and other outputs from logits computed once.

    Args:
        scale: the factor of each loss in the total, a scalar on the device.
        needs: which of hidden, weight and bias get a gradient of the total now.
        stats: also compute entropy, mean logit and the sum of squared probabilities.
        best: also find the word with the largest logit.

    Returns:
        outs_KN (see the top of _linear_ce_chunk.py), the kept tokens, and the gradients.
    """
    kept = kept_tokens(labels_N, head[1].shape[0], opts)
    order_M, count = kept
    K = 3 + 3 * stats + best
    outs_KM = scale.new_empty(K, count)
    options = scale, smoothing, z_loss, best, any(needs)
    grads = sweep(head, labels_N, outs_KM, kept, opts, needs, cross_entropy_chunk_, *options)
    if order_M is None:
        return outs_KM, kept, grads
    return scale.new_zeros(K, len(labels_N)).index_copy_(1, order_M, outs_KM), kept, grads


# --- arguments ------------------------------------------------------------------------------------


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels [..., T] moved one to the left, so position t predicts token t + 1.

    The last is ignored.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def prepare(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    shift: bool,
    softcap: float | None,
    num_valid: int | None,
    workspace_bytes: int,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Options]:
    """Checks the inputs of a head, its labels and how its logits are changed.

    Args:
        op: the name for messages.
        hidden, weight, bias: [..., D], [V, D], [V].
        labels: [...].

    Returns:
        (hidden_ND, labels_N, opts). The logits' dtype is that of F.linear under the current
        autocast.
    """
    expected = tuple(hidden.shape[:-1])
    shape = tuple(labels.shape)
    b = weight if bias is None else bias
    dtypes = hidden.dtype, weight.dtype, b.dtype
    cast = None if torch.float64 in dtypes[:2] else autocast_dtype(hidden.device.type)
    inf = float("inf")
    fits = hidden.is_floating_point() and weight.is_floating_point() and b.is_floating_point()
    if cast is None and len(set(dtypes)) > 1:
        fits = False
    refuse(
        op,
        (weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:],
         "hidden must be [..., D] and weight [V, D], got {} and {}. Check the head",
         tuple(hidden.shape), tuple(weight.shape)),
        (bias is not None and bias.shape != weight.shape[:1],
         "bias must have shape {}, got {}. Check the head", tuple(weight.shape[:1]), tuple(b.shape)),
        (not fits,
         "hidden, weight and bias must have one dtype, a floating-point one, got {}. Dequantise or "
         "cast them, or use torch.autocast", dtypes),
        (shape != expected, "labels must have shape {}, got {}. Give one label for each row",
         expected, shape),
        (labels.dtype not in (torch.int64, torch.int32),
         "labels must be int64 or int32, got {}. For class probabilities use "
         "torch.nn.functional.cross_entropy", labels.dtype),
        (shift and not expected, "shift needs labels [..., T], got a scalar. Leave shift out"),
        (num_valid is not None and num_valid < 0,
         "num_valid must be 0 or more, got {}. Count the labels that are not ignore_index",
         num_valid),
        (not (0.0 < scale < inf and 0.0 < temperature < inf),
         "scale and temperature must be finite and more than 0, got {} and {}. 1 leaves the logits "
         "unscaled", scale, temperature),
        (softcap is not None and not softcap > 0.0,
         "softcap must be more than 0 or None, got {}. None turns it off", softcap),
    )  # fmt: skip
    if shift:
        labels = shift_labels(labels, ignore_index)
    inner = scale / softcap if softcap else 0.0
    outer = (softcap or scale) / temperature
    opts = Options(ignore_index, inner, outer, cast or hidden.dtype, num_valid, workspace_bytes)
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), opts
