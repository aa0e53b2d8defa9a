"""Cross-entropy of hidden @ weight.T without the logits: the last matmul of a language model and its loss in one op.

Legend: B batch, T tokens, N = B*T tokens, D hidden size, V vocabulary. Logits exist for a few thousand tokens at a time
(_linear_ce_loop.py), where a small in-place op makes them their own gradient (_linear_ce_chunk.py,
kernels/cross_entropy.py).

When the gradients are computed. A scalar loss: in the forward, while the logits are hot, so that the logits are
computed once; the backward multiplies them by the upstream scalar, which costs no memory pass where it is 1 (three
matmuls in all). Anything whose upstream gradient is known only later, token by token (reduction="none",
return_token_loss, return_lse) or in float16, where the upstream gradient carries the GradScaler's factor without which
small gradients vanish: lse is saved and the logits are computed again in the backward (four matmuls; under and overflow
then are those of the stock loss).

Two ways in, one code. Eager calls run an autograd Function whose body is aten calls and the in-place ops, so a follower
of allocations sees every buffer, also over fake tensors. Under torch.compile the same body hides in
`hfpatch::linear_cross_entropy`, one node in the graph instead of one per chunk and matmul.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.compat import autocast, keeps_graph
from hfpatch.ops._library import define, no_second_derivative, one_gradient, wide_dtype
from hfpatch.ops._linear_ce_chunk import scale_, whole_lse
from hfpatch.ops._linear_ce_inputs import (
    as_class_weight,
    as_num_items,
    check_head,
    check_loss,
    check_options,
    check_shard,
    logits_dtype,
    shift_labels,
)
from hfpatch.ops._linear_ce_loop import (
    SCHEMA,
    Options,
    backward_pass,
    empty_grads,
    forward_pass,
    loss_factors,
    or_empty,
    readable,
)
from hfpatch.ops._linear_ce_shards import VocabShard
from hfpatch.ops.cross_entropy import CrossEntropyOutput, cross_entropy_ref


def linear_cross_entropy_ref(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options
) -> CrossEntropyOutput:
    """The same in plain torch with whole logits, differentiable as often as asked; the oracle in float64."""
    return cross_entropy_ref(F.linear(hidden, weight, bias), labels, **options)


def _upstream_per_token(dtotal, dtoken_N, scale, lse_2N) -> Tensor:
    """The gradient that reaches each token's loss, from the total and from the token losses (None: nothing)."""
    lse_N = lse_2N[0]
    dloss_N = torch.zeros_like(lse_N) if dtotal is None else (dtotal * scale).to(lse_N.dtype).expand_as(lse_N)
    return (dloss_N if dtoken_N is None else dloss_N + dtoken_N).contiguous()


def _scaled(grad: Tensor | None, factor: Tensor, keep: bool) -> Tensor | None:
    """grad * factor with the product in float32, in place unless the graph is kept for another backward."""
    if grad is None:
        return None
    if readable(grad) and factor == 1.0 and not keep:
        return grad
    grad = grad.clone() if keep else grad
    scale_(grad, factor)
    return grad


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _LinearCrossEntropy(torch.autograd.Function):
    """Eager route. settings: (opts, needs, best, per_token, overwrite, shard), see linear_cross_entropy."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, class_weight_V, num_items, settings):
        opts, needs, best, per_token, overwrite, shard = settings
        ctx.set_materialize_grads(False)
        ctx.opts, ctx.needs, ctx.now, ctx.shard = opts, needs, _in_forward(opts, needs), shard
        with autocast(hidden_ND.device.type, enabled=False):
            out = forward_pass(
                *(None if t is None else t.detach() for t in (hidden_ND, weight_VD, bias_V)),
                labels_N,
                class_weight_V,
                num_items,
                opts,
                needs if ctx.now else (False,) * 3,
                best=best,
                overwrite=overwrite and ctx.now and not per_token,
                shard=shard,
            )
        ctx.again = any(needs) and (per_token or not ctx.now)
        inputs = (hidden_ND, weight_VD, bias_V, labels_N, class_weight_V, out.lse_2N, out.scale)
        ctx.save_for_backward(*(inputs if ctx.again else (None,) * 7), *out.grads)
        ctx.mark_non_differentiable(out.best_N, *(() if per_token else (out.token_loss_N, out.lse_2N)))
        return out.total, out.token_loss_N, out.lse_2N, out.best_N

    @staticmethod
    @one_gradient
    def backward(ctx, dtotal, dtoken_N, dlse_2N, _):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        *inputs, dx, dw, db = ctx.saved_tensors
        grads = None, None, None
        if ctx.now and dtotal is not None:
            keep = keeps_graph()
            grads = tuple(_scaled(g, dtotal, keep) for g in (dx, dw, db))
            dtotal = None
        if ctx.again and not (dtotal is None and dtoken_N is None and dlse_2N is None):
            more = _backward_again(dtotal, dtoken_N, dlse_2N, *inputs, ctx.opts, ctx.needs, ctx.shard)
            grads = tuple(map(_add, grads, more))
        return *grads, None, None, None, None


def _backward_again(
    dtotal, dtoken, dlse, hidden, weight, bias, labels, class_weight, lse, scale, opts, needs, shard=None
):
    dloss = _upstream_per_token(dtotal, dtoken, scale, lse)
    vocab_size = weight.shape[0] if shard is None else shard.size
    rows = loss_factors(dloss, dlse, labels, lse, class_weight, vocab_size, opts)
    with autocast(hidden.device.type, enabled=False):
        return backward_pass(hidden, weight, bias, labels, class_weight, rows, opts, needs, shard=shard)


def _in_forward(opts: Options, needs: tuple[bool, bool, bool]) -> bool:
    return any(needs) and opts.reduction != "none" and opts.dtype != torch.float16


# The compiled route: the same passes behind two ops. Outputs that are absent are empty tensors.


def _op(hidden, weight, bias, labels, class_weight, num_items, need_dx, need_dw, need_db, best, *options):
    opts, needs = Options(*options), (need_dx, need_dw, need_db)
    needs = needs if _in_forward(opts, needs) else (False,) * 3
    with autocast(hidden.device.type, enabled=False):
        out = forward_pass(hidden, weight, bias, labels, class_weight, num_items, opts, needs, best=best)
    return out.total, out.token_loss_N, out.lse_2N, out.best_N, out.scale, *or_empty(out.grads, hidden)


def _op_fake(hidden, weight, bias, labels, class_weight, num_items, need_dx, need_dw, need_db, best, *options):
    opts = Options(*options)
    now = _in_forward(opts, (need_dx, need_dw, need_db))
    total = hidden.new_empty((), dtype=wide_dtype(opts.dtype))
    token_loss, lse = total.new_empty(labels.shape), total.new_empty(2, *labels.shape)
    best_N = labels.new_empty(labels.shape if best else 0, dtype=torch.int32)
    grads = empty_grads((hidden, weight, bias), (now and need_dx, now and need_dw, now and need_db))
    return total, token_loss, lse, best_N, torch.empty_like(total), *or_empty(grads, hidden)


def _op_bwd(dtotal, dtoken, dlse, hidden, *others):
    *tensors, need_dx, need_dw, need_db = others[:9]
    opts, needs = Options(*others[9:]), (need_dx, need_dw, need_db)
    return or_empty(_backward_again(dtotal, dtoken, dlse, hidden, *tensors, opts, needs), hidden)


def _op_bwd_fake(dtotal, dtoken, dlse, hidden, weight, bias, *others):
    return or_empty(empty_grads((hidden, weight, bias), others[4:7]), hidden)


def _op_setup(ctx, inputs, output):
    total, token_loss, lse, best, scale, *grads = output
    ctx.needs, ctx.options = tuple(inputs[6:9]), inputs[10:]
    ctx.now = _in_forward(Options(*ctx.options), ctx.needs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(best, scale, *grads)
    ctx.save_for_backward(*inputs[:5], lse, scale, *grads)


def _op_backward(ctx, dtotal, dtoken, dlse, *_):
    *inputs, dx, dw, db = ctx.saved_tensors
    grads = None, None, None
    if ctx.now and dtotal is not None:
        grads = tuple(_scaled_op(g, dtotal) if need else None for g, need in zip((dx, dw, db), ctx.needs))
        dtotal = None
    if any(ctx.needs) and not (dtotal is None and dtoken is None and dlse is None):
        more = _bwd(dtotal, dtoken, dlse, *inputs, *ctx.needs, *ctx.options)
        grads = tuple(_add(g, m if need else None) for g, m, need in zip(grads, more, ctx.needs))
    return *grads, *[None] * (7 + len(ctx.options))


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight"
_NEEDS = "bool need_dx, bool need_dw, bool need_db"
_bwd = define(
    f"linear_cross_entropy_bwd(Tensor? dtotal, Tensor? dtoken, Tensor? dlse, {_TENSORS}, Tensor lse, Tensor scale,"
    f" {_NEEDS}, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _op_bwd,
    _op_bwd_fake,
    backward=no_second_derivative("linear_cross_entropy"),
)
_scaled_op = define(
    "scaled(Tensor x, Tensor factor) -> Tensor",
    lambda x, factor: _scaled(x, factor, keep=True),
    lambda x, factor: torch.empty_like(x),
    backward=no_second_derivative("linear_cross_entropy"),
)
_fwd = define(
    f"linear_cross_entropy({_TENSORS}, Tensor? num_items, {_NEEDS}, bool best, {SCHEMA})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op,
    _op_fake,
    backward=_op_backward,
    setup_context=_op_setup,
)


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
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    shift: bool = False,
    workspace_bytes: int = 512 << 20,
    return_token_loss: bool = False,
    return_lse: bool = False,
    return_accuracy: bool = False,
    return_predicted: bool = False,
    inplace_hidden: bool = False,
    shard: VocabShard | None = None,
) -> Tensor | CrossEntropyOutput:
    """cross_entropy(hidden @ weight.T + bias, labels) with gradients for hidden, weight and bias, without whole logits.

    hidden [..., D], weight [V, D], bias [V]: one floating dtype (under autocast any, computed in autocast's). labels
    [...], int64 or int32, in [0, V) or ignore_index. Returns the loss, a float32 scalar (float64 for float64 inputs;
    like labels for reduction="none"), or a CrossEntropyOutput where one of the return_* options is set. The
    values are those of a Linear head followed by transformers' `ForCausalLMLoss`, which takes the softmax of the bf16
    logits in float32.

    reduction, num_items: "mean" divides the sum of the token losses by the number of labels that are not ignored;
        num_items (an int, or a tensor with one element, on any device) divides it instead, as transformers'
        num_items_in_batch does, also for "sum". With no label left the mean is nan and with num_items the loss is 0, as
        in transformers; the gradients are exactly zero in both cases.
    num_valid: an int known on the host, at least the number of labels (after the shift) that are not ignore_index;
        tokens beyond it are dropped before the matmuls. Without it labels on the CPU are counted, and on a GPU no token
        is dropped, since counting would wait for the device. Giving fewer than there are is an error (an assertion on a
        GPU).
    class_weight, label_smoothing: as weight and label_smoothing of torch.nn.functional.cross_entropy; class_weight [V]
        carries no gradient, and the mean divides by the weights of the labels. scale, softcap: logits are multiplied by
        scale (Cohere's logit_scale, 1 / Granite's logits_scaling), then become softcap * tanh(logits / softcap), both
        in float32. z_loss: adds z_loss * lse^2 to each token's loss.
    shift: labels are those of the input tokens; position t is asked for labels[..., t + 1], each row's last for
    nothing. workspace_bytes: what may be allocated beyond the gradients; sets the number of tokens whose logits exist
        at a time. While the weight gradient of a 16-bit weight is summed over chunks it is float32. Under autocast a
        copy of the weight in autocast's dtype comes on top, as it does for the stock head.
    return_token_loss, return_lse: like labels, differentiable. A backward through them, reduction="none", or float16
        computes the logits a second time (head of this file). return_accuracy: like labels, bool.
        return_predicted: like labels, the word with the first largest logit, -1 where ignored.
    inplace_hidden: hidden may be overwritten by its gradient: for a caller who made it, hands it to nobody else, and
        whose producer does not need it in its backward (autograd raises if it does). Has no effect where the
        overwriting is not possible: a leaf, a non-contiguous tensor, another dtype than the logits', return_token_loss
        or return_lse.
    shard: hfpatch.ops.VocabShard(group, V): weight and bias are this rank's rows of V, as the vocabulary is split over the
        group (tensor parallelism); hidden, labels and class_weight [V] are the same on every rank, and so are the results
        and hidden's gradient. Two small all-reduces a chunk of logits, one of hidden's gradient. Not under torch.compile.

    Raises ValueError for a label out of range (on a GPU: a device-side assertion), for shapes, dtypes or options that
    do not fit. There is no second derivative: create_graph=True raises in the backward; use linear_cross_entropy_ref.

    torch.nn.functional.linear_cross_entropy (torch 2.13) chunks in the same manner. Prefer it for class
    probabilities, several label dimensions, or (with options=None) second derivatives and torch.func transforms. It has
    no num_items, softcap, z-loss, shift or per-token outputs, sends ignored tokens through every matmul, goes back to
    whole logits for label smoothing, refuses a second backward unless asked, and breaks the graph under torch.compile;
    by default it adds the weight gradient of 16-bit weights up in 16 bits on CUDA.
    """
    op = "linear_cross_entropy"
    check_head(op, hidden, weight, bias, labels, shift)
    vocab_size = check_shard(op, weight, shard)
    check_options(op, scale=scale, softcap=softcap, num_valid=num_valid)
    check_loss(op, vocab_size, class_weight, reduction, num_items, label_smoothing, z_loss)
    dtype = logits_dtype(op, hidden, weight, bias)
    labels = shift_labels(labels, ignore_index) if shift else labels
    num_items = as_num_items(num_items, hidden, dtype)
    class_weight = as_class_weight(class_weight, hidden, dtype)
    grad = torch.is_grad_enabled()
    needs = tuple(grad and t is not None and t.requires_grad for t in (hidden, weight, bias))
    opts = (ignore_index, reduction, num_valid, label_smoothing, scale, softcap or 0.0, 1.0, z_loss, workspace_bytes)
    opts = Options(*opts, dtype)
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), class_weight, num_items
    best = return_accuracy or return_predicted
    if torch.compiler.is_compiling():
        total, token_loss_N, lse_2N, best_N, *_ = torch.ops.hfpatch.linear_cross_entropy(*tensors, *needs, best, *opts)
    else:
        per_token = reduction == "none" or return_token_loss or return_lse
        private = (
            inplace_hidden and needs[0] and not hidden.is_leaf and hidden.is_contiguous() and hidden.dtype == dtype
        )
        settings = (opts, needs, best, per_token, private, shard)
        total, token_loss_N, lse_2N, best_N = _LinearCrossEntropy.apply(*tensors, settings)
    loss = token_loss_N.view(labels.shape) if reduction == "none" else total
    asked = return_token_loss, return_lse, return_accuracy, return_predicted
    if not any(asked):
        return loss
    return CrossEntropyOutput.of(loss, token_loss_N, whole_lse(lse_2N, opts.outer), best_N, labels, ignore_index, asked)
