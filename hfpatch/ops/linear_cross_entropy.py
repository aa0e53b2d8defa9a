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

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfpatch.ops._library import define, no_second_derivative, wide_dtype
from hfpatch.ops._linear_ce_chunk import scale_
from hfpatch.ops._linear_ce_loop import Options, backward_pass, forward_pass, readable


class LinearCrossEntropyOutput(NamedTuple):
    """What linear_cross_entropy returns where more than the loss was asked for; fields not asked for are None."""

    loss: Tensor
    token_loss: Tensor | None  # like labels, float32: each token's part of the sum, z-loss included; 0 where ignored
    lse: Tensor | None  # like labels, float32: log sum exp of the (soft-capped) logits; 0 where ignored
    accuracy: Tensor | None  # like labels, bool: the label has the first largest logit; False where ignored


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """labels[..., T] moved one to the left, each row's last position ignored: position t is asked for token t + 1."""
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


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
) -> LinearCrossEntropyOutput:
    """The same in plain torch with whole logits, differentiable as often as asked; the oracle in float64."""
    labels = shift_labels(labels, ignore_index) if shift else labels
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype)).reshape(-1, weight.shape[0])
    z = softcap * torch.tanh(z / softcap) if softcap else z
    labels_N = labels.reshape(-1).long()
    keep_N = labels_N != ignore_index
    lse_N = z.logsumexp(-1) * keep_N
    token_loss_N = F.cross_entropy(
        z, labels_N, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    token_loss_N = token_loss_N + z_loss * lse_N.square()
    correct_N = (z.argmax(-1) == labels_N) & keep_N
    if reduction == "none":
        loss = token_loss_N.reshape(labels.shape)
    elif num_items is not None:
        loss = token_loss_N.sum() / num_items
    else:
        loss = token_loss_N.sum() / keep_N.sum() if reduction == "mean" else token_loss_N.sum()
    return LinearCrossEntropyOutput(loss, *(t.reshape(labels.shape) for t in (token_loss_N, lse_N, correct_N)))


def _upstream_per_token(dtotal, dtoken_N, scale, lse_N) -> Tensor:
    """The gradient that reaches each token's loss, from the total and from the token losses (None: nothing)."""
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
    """Eager route. settings: (opts, needs, accuracy, per_token, overwrite), see linear_cross_entropy."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, labels_N, num_items, settings):
        opts, needs, accuracy, per_token, overwrite = settings
        ctx.set_materialize_grads(False)
        ctx.opts, ctx.needs, ctx.now = opts, needs, _in_forward(opts, needs)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            total, token_loss_N, lse_N, correct_N, scale, grads = forward_pass(
                *(None if t is None else t.detach() for t in (hidden_ND, weight_VD, bias_V)),
                labels_N,
                num_items,
                opts,
                needs if ctx.now else (False,) * 3,
                accuracy,
                overwrite and ctx.now and not per_token,
            )
        ctx.again = any(needs) and (per_token or not ctx.now)
        inputs = (hidden_ND, weight_VD, bias_V, labels_N, lse_N, scale) if ctx.again else (None,) * 6
        ctx.save_for_backward(*inputs, *grads)
        ctx.mark_non_differentiable(correct_N, *(() if per_token else (token_loss_N, lse_N)))
        return total, token_loss_N, lse_N, correct_N

    @staticmethod
    def backward(ctx, dtotal, dtoken_N, dlse_N, _):
        if torch.is_grad_enabled():
            no_second_derivative("linear_cross_entropy")(ctx)
        *inputs, dx, dw, db = ctx.saved_tensors
        grads = None, None, None
        if ctx.now and dtotal is not None:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            grads = tuple(_scaled(g, dtotal, keep) for g in (dx, dw, db))
            dtotal = None
        if ctx.again and not (dtotal is None and dtoken_N is None and dlse_N is None):
            hidden_ND, weight_VD, bias_V, labels_N, lse_N, scale = inputs
            dloss_N = _upstream_per_token(dtotal, dtoken_N, scale, lse_N)
            with torch.autocast(hidden_ND.device.type, enabled=False):
                more = backward_pass(
                    hidden_ND, weight_VD, bias_V, labels_N, lse_N, dloss_N, dlse_N, ctx.opts, ctx.needs
                )
            grads = tuple(map(_add, grads, more))
        return *grads, None, None, None


def _in_forward(opts: Options, needs: tuple[bool, bool, bool]) -> bool:
    return any(needs) and opts.reduction != "none" and opts.dtype != torch.float16


# The compiled route: the same passes behind two ops. Outputs that are absent are empty tensors.
_OPTIONS = (
    "int ignore_index, str reduction, int? num_valid, float smoothing, float softcap, float z_loss,"
    " int workspace_bytes, ScalarType dtype"
)


def _or_empty(tensors, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


def _op(hidden, weight, bias, labels, num_items, need_dx, need_dw, need_db, accuracy, *options):
    opts, needs = Options(*options), (need_dx, need_dw, need_db)
    with torch.autocast(hidden.device.type, enabled=False):
        *outputs, grads = forward_pass(
            hidden, weight, bias, labels, num_items, opts, needs if _in_forward(opts, needs) else (False,) * 3, accuracy
        )
    return *outputs, *_or_empty(grads, hidden)


def _op_fake(hidden, weight, bias, labels, num_items, need_dx, need_dw, need_db, accuracy, *options):
    opts = Options(*options)
    now = _in_forward(opts, (need_dx, need_dw, need_db))
    total = hidden.new_empty((), dtype=wide_dtype(opts.dtype))
    token_loss, lse = (total.new_empty(labels.shape) for _ in range(2))
    correct = labels.new_empty(labels.shape if accuracy else 0, dtype=torch.bool)
    dx, dw, db = (
        torch.empty_like(t, memory_format=torch.contiguous_format) if now and need else None
        for t, need in ((hidden, need_dx), (weight, need_dw), (bias, need_db))
    )
    return total, token_loss, lse, correct, torch.empty_like(total), *_or_empty((dx, dw, db), hidden)


def _op_bwd(dtotal, dtoken, dlse, hidden, weight, bias, labels, lse, scale, need_dx, need_dw, need_db, *options):
    dloss = _upstream_per_token(dtotal, dtoken, scale, lse)
    with torch.autocast(hidden.device.type, enabled=False):
        needs = need_dx, need_dw, need_db
        grads = backward_pass(hidden, weight, bias, labels, lse, dloss, dlse, Options(*options), needs)
    return _or_empty(grads, hidden)


def _op_bwd_fake(dtotal, dtoken, dlse, hidden, weight, bias, labels, lse, scale, need_dx, need_dw, need_db, *options):
    grads = (
        torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
        for t, need in ((hidden, need_dx), (weight, need_dw), (bias, need_db))
    )
    return _or_empty(grads, hidden)


def _op_setup(ctx, inputs, output):
    hidden, weight, bias, labels = inputs[:4]
    total, token_loss, lse, correct, scale, *grads = output
    ctx.needs, ctx.options = tuple(inputs[5:8]), inputs[9:]
    ctx.now = _in_forward(Options(*ctx.options), ctx.needs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(correct, scale, *grads)
    ctx.save_for_backward(hidden, weight, bias, labels, lse, scale, *grads)


def _op_backward(ctx, dtotal, dtoken, dlse, *_):
    *inputs, dx, dw, db = ctx.saved_tensors
    grads = None, None, None
    if ctx.now and dtotal is not None:
        grads = tuple(_scaled_op(g, dtotal) if need else None for g, need in zip((dx, dw, db), ctx.needs))
        dtotal = None
    if any(ctx.needs) and not (dtotal is None and dtoken is None and dlse is None):
        more = _bwd(dtotal, dtoken, dlse, *inputs, *ctx.needs, *ctx.options)
        grads = tuple(_add(g, m if need else None) for g, m, need in zip(grads, more, ctx.needs))
    return *grads, *[None] * 14


_TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_NEEDS = "bool need_dx, bool need_dw, bool need_db"
_bwd = define(
    f"linear_cross_entropy_bwd(Tensor? dtotal, Tensor? dtoken, Tensor? dlse, {_TENSORS}, Tensor lse, Tensor scale,"
    f" {_NEEDS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
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
    f"linear_cross_entropy({_TENSORS}, Tensor? num_items, {_NEEDS}, bool accuracy, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op,
    _op_fake,
    backward=_op_backward,
    setup_context=_op_setup,
)


def _logits_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype in which F.linear would return the logits, here and now."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(dtypes) > 1:
        raise ValueError(
            f"hfpatch: linear_cross_entropy expected hidden, weight and bias of one dtype, "
            f"{hidden.dtype}, {weight.dtype}"
            f"{'' if bias is None else f', {bias.dtype}'} came; cast them or use torch.autocast."
        )
    return hidden.dtype


def _check(hidden, weight, labels, bias, reduction, num_items, num_valid, label_smoothing, softcap, z_loss):
    def refuse(expected, came, advice):
        raise ValueError(f"hfpatch: linear_cross_entropy expected {expected}, {came} came; {advice}.")

    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        refuse(
            "hidden [..., D] and weight [V, D]", f"{tuple(hidden.shape)} and {tuple(weight.shape)}", "check the head"
        )
    if labels.shape != hidden.shape[:-1]:
        refuse(
            f"labels of shape {tuple(hidden.shape[:-1])}",
            f"{tuple(labels.shape)}",
            "give one label for each hidden row",
        )
    if labels.dtype not in (torch.int64, torch.int32):
        refuse("int64 or int32 labels", f"{labels.dtype}", "class probabilities need torch.nn.functional.cross_entropy")
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(f"a bias of shape {tuple(weight.shape[:1])}", f"{tuple(bias.shape)}", "check the head")
    if not all(t is None or t.is_floating_point() for t in (hidden, weight, bias)):
        refuse("floating-point hidden, weight and bias", f"{hidden.dtype} and {weight.dtype}", "dequantise first")
    if reduction not in ("mean", "sum", "none"):
        refuse('reduction "mean", "sum" or "none"', repr(reduction), "choose one")
    if num_items is not None and reduction == "none":
        refuse('no num_items with reduction="none"', "both", "divide the result, or ask for a sum")
    if num_valid is not None and num_valid < 0:
        refuse("num_valid >= 0", f"{num_valid}", "count the labels that are not ignore_index")
    if not 0.0 <= label_smoothing <= 1.0:
        refuse("label_smoothing in [0, 1]", f"{label_smoothing}", "0 turns it off")
    if softcap is not None and not softcap > 0.0:
        refuse("softcap > 0 or None", f"{softcap}", "None turns it off")
    if not z_loss >= 0.0:
        refuse("z_loss >= 0", f"{z_loss}", "0 turns it off")


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
    return_token_loss: bool = False,
    return_lse: bool = False,
    return_accuracy: bool = False,
    inplace_hidden: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """cross_entropy(hidden @ weight.T + bias, labels) with gradients for hidden, weight and bias, without whole logits.

    hidden [..., D], weight [V, D], bias [V]: one floating dtype (under autocast any, computed in autocast's). labels
    [...], int64 or int32, in [0, V) or ignore_index. Returns the loss, a float32 scalar (float64 for float64 inputs;
    like labels for reduction="none"), or a LinearCrossEntropyOutput where one of the return_* options is set. The
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
    label_smoothing: as in torch.nn.functional.cross_entropy. softcap: logits become softcap * tanh(logits / softcap),
        in float32. z_loss: adds z_loss * lse^2 to each token's loss.
    shift: labels are those of the input tokens; position t is asked for labels[..., t + 1], each row's last for
    nothing. workspace_bytes: what may be allocated beyond the gradients; sets the number of tokens whose logits exist
        at a time. While the weight gradient of a 16-bit weight is summed over chunks it is float32. Under autocast a
        copy of the weight in autocast's dtype comes on top, as it does for the stock head.
    return_token_loss, return_lse: like labels, differentiable. A backward through them, reduction="none", or float16
        computes the logits a second time (head of this file). return_accuracy: like labels, bool.
    inplace_hidden: hidden may be overwritten by its gradient: for a caller who made it, hands it to nobody else, and
        whose producer does not need it in its backward (autograd raises if it does). Has no effect where the
        overwriting is not possible: a leaf, a non-contiguous tensor, another dtype than the logits', return_token_loss
        or return_lse.

    Raises ValueError for a label out of range (on a GPU: a device-side assertion), for shapes, dtypes or options that
    do not fit. There is no second derivative: create_graph=True raises in the backward; use linear_cross_entropy_ref.

    torch.nn.functional.linear_cross_entropy (torch 2.13) chunks in the same manner. Prefer it for class weights, class
    probabilities, several label dimensions, or (with options=None) second derivatives and torch.func transforms. It has
    no num_items, softcap, z-loss, shift or per-token outputs, sends ignored tokens through every matmul, goes back to
    whole logits for label smoothing, refuses a second backward unless asked, and breaks the graph under torch.compile;
    by default it adds the weight gradient of 16-bit weights up in 16 bits on CUDA.
    """
    _check(hidden, weight, labels, bias, reduction, num_items, num_valid, label_smoothing, softcap, z_loss)
    dtype = _logits_dtype(hidden, weight, bias)
    if shift:
        if labels.dim() == 0:
            raise ValueError(
                "hfpatch: linear_cross_entropy expected labels [..., T] for shift, a scalar came; drop it."
            )
        labels = shift_labels(labels, ignore_index)
    if num_items is not None and not isinstance(num_items, Tensor):
        num_items = torch.full((), num_items, dtype=wide_dtype(dtype), device=hidden.device)
    grad = torch.is_grad_enabled()
    needs = tuple(grad and t is not None and t.requires_grad for t in (hidden, weight, bias))
    opts = Options(ignore_index, reduction, num_valid, label_smoothing, softcap or 0.0, z_loss, workspace_bytes, dtype)
    hidden_ND, labels_N = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if torch.compiler.is_compiling():
        options = (opts.ignore_index, opts.reduction, opts.num_valid, opts.smoothing, opts.softcap, opts.z_loss)
        total, token_loss_N, lse_N, correct_N, *_ = torch.ops.hfpatch.linear_cross_entropy(
            hidden_ND, weight, bias, labels_N, num_items, *needs, return_accuracy, *options, workspace_bytes, dtype
        )
    else:
        per_token = reduction == "none" or return_token_loss or return_lse
        private = (
            inplace_hidden and needs[0] and not hidden.is_leaf and hidden.is_contiguous() and hidden.dtype == dtype
        )
        settings = (opts, needs, return_accuracy, per_token, private)
        total, token_loss_N, lse_N, correct_N = _LinearCrossEntropy.apply(
            hidden_ND, weight, bias, labels_N, num_items, settings
        )
    loss = token_loss_N.view(labels.shape) if reduction == "none" else total
    if not (return_token_loss or return_lse or return_accuracy):
        return loss
    return LinearCrossEntropyOutput(
        loss,
        token_loss_N.view(labels.shape) if return_token_loss else None,
        lse_N.view(labels.shape) if return_lse else None,
        correct_N.view(labels.shape) if return_accuracy else None,
    )
