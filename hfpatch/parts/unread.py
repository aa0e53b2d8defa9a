"""Linears whose output values are unread when a backward runs a layer again, so their matmul is
skipped.

What is skipped is the forward matmul alone: the Linear is called, and its backward runs. When: as a
backward runs `before` or `after` of a tile again (LayerTraits.unread_before, unread_after), and in forward
too where not even the layer's output depends on the values (unread_always). `skippable` finds the
modules, `skipping` makes their forwards for the time.

Two examples. The last projection in `after` is added to the residual, and no gradient reads the sum.
A q or k projection in `before` is rotated, and the rotation's backward reads only the angles. Such a
Linear returns one constant row, expanded over all tokens, and keeps its ordinary backward, so every
gradient stays the same to the bit. decoder/probe.py finds these Linears.

Under LoRA the base Linear is skipped; the adapter's own value is still added. A rotation of
constants returns constants.
"""

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import autocast_dtype, is_fake, modules_in, modules_of
from hfpatch.context.classes import LINEAR, other_forward, package_of
from hfpatch.ops.rope import ROPE
from hfpatch.parts import experts
from hfpatch.parts.quantised import base_of, dense_of


class _Product(torch.autograd.Function):
    """F.linear, or its backward alone, with the gradients that autograd computes.

    weight: a tensor [O, I], or a function (dtype) -> a frozen one. value: returned in `columns`
    columns in place of a matmul, if it is no None. add: receives (dy [N, O], x [N, I]) in place of
    a returned gradient of the weight, or None.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, value, columns, add):
        ctx.add = add
        ctx.make = None if isinstance(weight, Tensor) else weight
        # A frozen weight needs no x; a saved x would live next to its own gradient.
        saved_x = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_x, None if ctx.make else weight)
        if value is None:
            if ctx.make is not None:
                weight = ctx.make(x.dtype)
            return nn.functional.linear(x, weight, bias)
        # A whole row is stored: a rotation in complex numbers (Llama 4) needs contiguous pairs.
        return x.new_full((columns,), value).expand(*x.shape[:-1], columns)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dy_NO = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if needs[0]:
            if weight is None:
                weight = ctx.make(dy.dtype)
            dx = (
                dy_NO.to(weight.dtype).mm(weight).to(dy.dtype).view(*dy.shape[:-1], weight.shape[1])
            )
        if needs[1]:
            x_NI = x.reshape(-1, x.shape[-1])
            dw = dy_NO.t().mm(x_NI) if ctx.add is None else ctx.add(dy_NO, x_NI)
        if needs[2]:
            db = dy_NO.sum(0)
        return dx, dw, db, None, None, None


def _unread_forward(
    module: nn.Linear, dense, value: float, adding, contiguous: bool, input: Tensor
):
    """Replaces `module.forward` while its values are unread. dense: from quantised.dense_of."""
    if not dense and input.dtype != module.weight.dtype:  # autocast casts it inside F.linear
        return LINEAR(module, input)
    add = adding(module.weight) if adding and not dense else None
    y = _Product.apply(input, dense or module.weight, module.bias, value, module.out_features, add)
    return y.contiguous() if contiguous else y


def _adding_forward(module: nn.Linear, adding, input: Tensor) -> Tensor:
    """Replaces `module.forward` while the weight's gradients are summed over tiles."""
    add = adding(module.weight) if input.dtype == module.weight.dtype else None
    if add is None:
        return LINEAR(module, input)
    return _Product.apply(input, module.weight, module.bias, None, 0, add)


class UnreadRotation(torch.autograd.Function):
    """The fused rotation's backward, with a forward that computes nothing.

    q_BHTE, k_BKTE: expanded constants.
    """

    @staticmethod
    def forward(ctx, q_BHTE, k_BKTE, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q_BHTE.dtype
        wide = torch.promote_types(q_BHTE.dtype, cos.dtype)
        return tuple(x.new_zeros((), dtype=wide).expand(x.shape) for x in (q_BHTE, k_BKTE))

    @staticmethod
    def backward(ctx, dq_BHTE, dk_BKTE):
        cos, sin = ctx.saved_tensors
        return *ROPE(dq_BHTE, dk_BKTE, cos, sin, True, ctx.dtype), None, None


def is_unread(x: Tensor) -> bool:
    """Whether x is an expanded constant in place of unread values."""
    return x.stride().count(0) > 1


def can_go_without(module: nn.Module | None) -> bool:
    """Whether this is now a plain Linear with a plain weight, a quantised Linear of a known
    library, or fused experts that run here."""
    if module is None or "forward" in vars(module):
        return False
    if experts.layout_of(module) is not None:
        return True
    if not isinstance(module, nn.Linear) or hasattr(module.weight, "placements"):
        return False
    # torchao's tensors have no mm.
    if hasattr(module.weight, "__tensor_flatten__") and not is_fake(module.weight):
        return False
    return type(module).forward is LINEAR or dense_of(module) is not None


def as_found(layer: nn.Module, name: str) -> bool:
    """Whether no module or forward between the layer and the named module changed since the
    probe."""
    home = package_of(layer)
    *around, last = name.split(".")
    module = layer
    for part in around:
        module = modules_of(module).get(part)
        if module is None or package_of(module) != home or other_forward(module):
            return False
    return modules_of(module).get(last) is not None


def skippable(layer: nn.Module, names) -> list[tuple]:
    """The named modules that can skip their matmul now: (Linear or fused experts, whether it is the
    base of an adapter, the experts' layout).

    Args:
        layer: the decoder layer.
        names: names of Linears in it, or of adapters around Linears.
    """
    modules = []
    for name in dict.fromkeys(names):
        if as_found(layer, name):
            named = layer.get_submodule(name)
            module = base_of(named)
            if can_go_without(module):
                modules.append((module, module is not named, experts.layout_of(module)))
    return modules


def skipping(
    modules: list, device: str = "cpu", value: float = 0.0, adding=None, contiguous=False
) -> list:
    """Forwards that skip the matmul, to replace those of these modules.

    Args:
        modules: those of `skippable`.
        device: the type of the device.
        value: the constant that they return.
        adding: see add_up.
        contiguous: return contiguous tensors. Dropout on a GPU draws by memory layout, so the layout
            must be the usual one. Bases of adapters are excluded: their values enter a sum.

    Returns:
        (module, forward) pairs for `forwards_for_now`.
    """
    cast = autocast_dtype(device)
    pairs = []
    for module, of_adapter, layout in modules:
        if layout is not None:
            run = partial(experts.run, module, layout=layout, value=value, adding=adding)
        elif cast not in (None, module.weight.dtype):  # autocast casts inside F.linear
            continue
        else:
            dense = None if type(module).forward is LINEAR else dense_of(module)
            usual = contiguous and not of_adapter
            run = partial(_unread_forward, module, dense, value, adding, usual)
        pairs.append((module, run))
    return pairs


def add_up(layer: nn.Module, skipped: list, device: str, adding) -> list:
    """(module, forward) pairs of the layer's other plain Linears whose matmul can sum the weight's
    gradient over tiles.

    Args:
        layer: the decoder layer.
        skipped: the pairs that `skipping` returned; these modules are left out.
        device: the type of the device.
        adding: weight -> the function that takes its gradient, or None (WeightGradients.adding).
    """
    cast = autocast_dtype(device)
    taken = {id(m) for m, _ in skipped}
    pairs = []
    for module in modules_in(layer):
        is_linear = isinstance(module, nn.Linear) and type(module).forward is LINEAR
        if not is_linear or id(module) in taken or not can_go_without(module):
            continue
        if cast in (None, module.weight.dtype) and adding(module.weight) is not None:
            pairs.append((module, partial(_adding_forward, module, adding)))
    return pairs
