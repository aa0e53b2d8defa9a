"""Modules whose output nobody reads: in a backward that runs a layer again, some values only lead to gradients of others.

The last projection's output in `post` is added to the residual and no gradient asks for the sum; a q, k or v projection's in
`pre` is rotated, and a rotation's backward wants the angles alone. Such a Linear answers with one row of a constant for all
tokens and keeps its ordinary backward, so every gradient stays as it is, to the bit. Which ones these are is asked
(models/verdict.py), not written.
Under LoRA it is the base of such a Linear, to whose value the adapter adds its own; a rotation of such values hands one on.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.checkpoint.quantised import base_of, dense_of
from hfpatch.compat import applying, autocast_dtype, is_fake, modules_in, submodule
from hfpatch.models.classes import LINEAR, forward_now, forwards_for_now, other_forward, package_of
from hfpatch.ops.rope import ROPE


def gradients_of_linear(
    dy: Tensor, x: Tensor | None, weight: Tensor, needs: tuple[bool, bool, bool], add=None
) -> tuple:
    """(dx, dweight, dbias) of F.linear as autograd has them, None where not needed; x: where the weight's is;
    add: as of _Valueless."""
    dy_NO, dx, dw = dy.reshape(-1, dy.shape[-1]), None, None
    if needs[0]:
        dx = dy_NO.to(weight.dtype).mm(weight).to(dy.dtype).view(*dy.shape[:-1], weight.shape[1])
    if needs[1]:
        x_NI = x.reshape(-1, x.shape[-1])
        dw = dy_NO.t().mm(x_NI) if add is None else add(dy_NO, x_NI)
    return dx, dw, dy_NO.sum(0) if needs[2] else None


class _Valueless(torch.autograd.Function):
    """F.linear's backward under a forward without a matmul. weight: a tensor, or a function that makes a frozen one; add: where
    the weight's gradient goes, None for autograd."""

    @staticmethod
    def forward(ctx, x, weight, bias, value, columns, add):
        ctx.add, ctx.make = add, None if isinstance(weight, Tensor) else weight
        # A frozen weight needs no x, which would live on beside its own gradient.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, None if ctx.make else weight)
        # One row for all tokens: a rotation in complex numbers (Llama 4) wants neighbours in memory.
        return x.new_full((columns,), value).expand(*x.shape[:-1], columns)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if weight is None and ctx.needs_input_grad[0]:
            weight = ctx.make(dy.dtype)
        return *gradients_of_linear(dy, x, weight, ctx.needs_input_grad[:3], ctx.add), None, None, None


_without_value = applying(_Valueless)


class _AddingUp(torch.autograd.Function):
    """F.linear whose weight's gradient goes to `add`."""

    @staticmethod
    def forward(ctx, x, weight, bias, add):
        ctx.save_for_backward(x, weight)
        ctx.add = add
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        return *gradients_of_linear(dy, *ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.add), None


_adding_up = applying(_AddingUp)


def _valueless_forward(module: nn.Linear, dense, value: float, adding, filled: bool, input: Tensor) -> Tensor:
    """Stands for `module.forward` while its values are not wanted. dense: as quantised.dense_of has it."""
    add = adding and not dense and adding(module.weight) or None
    y = _without_value(input, dense or module.weight, module.bias, value, module.out_features, add)
    return y.contiguous() if filled else y


def _adding_forward(module: nn.Linear, adding, input: Tensor) -> Tensor:
    """Stands for `module.forward` while its weight's gradients add up."""
    add = adding(module.weight) if input.dtype == module.weight.dtype else None
    if add is None:
        return LINEAR(module, input)
    return _adding_up(input, module.weight, module.bias, add)


class DeadRotation(torch.autograd.Function):
    """The fused rotation's backward under a forward that moves nothing. q_BHTE, k_BKTE: expanded constants; dtype: of the rotated,
    None for the wider of theirs and the angles'."""

    @staticmethod
    def forward(ctx, q_BHTE, k_BKTE, cos, sin, dtype):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q_BHTE.dtype
        wide = dtype or torch.promote_types(q_BHTE.dtype, cos.dtype)
        return tuple(x.new_zeros((), dtype=wide).expand(x.shape) for x in (q_BHTE, k_BKTE))

    @staticmethod
    def backward(ctx, dq_BHTE, dk_BKTE):
        cos, sin = ctx.saved_tensors
        return *ROPE(dq_BHTE, dk_BKTE, cos, sin, True, ctx.dtype), None, None, None


rotation_without_values = applying(DeadRotation)


def is_dead(x: Tensor) -> bool:
    """Whether this is a constant that stands for a value nobody reads: one row for all tokens of all sequences."""
    return x.stride().count(0) > 1


def can_go_without(module: nn.Module | None) -> bool:
    """Whether this is a plain Linear with a plain weight, or a quantised one that is known, here and now."""
    return (
        isinstance(module, nn.Linear)
        and (type(module).forward is LINEAR or dense_of(module) is not None)
        and forward_now(module) is None
        and not hasattr(module.weight, "placements")
        and (
            not hasattr(module.weight, "__tensor_flatten__") or is_fake(module.weight)
        )  # torchao's has no mm of its own
    )


def as_found(layer: nn.Module, name: str) -> bool:
    """Whether the named module's value goes where it went when the layer was asked: no other module or forward between them."""
    home, module, parts = package_of(layer), layer, name.split(".")
    for i, part in enumerate(parts, 1):
        try:
            module = submodule(module, part)
        except AttributeError:
            return False
        if i < len(parts) and (package_of(module) != home or other_forward(module)):
            return False
    return True


def idle(
    layer: nn.Module, names, device: str = "cpu", value: float = 0.0, dense_of=dense_of, adding=None, filled=False
) -> list:  # fmt: skip
    """What `without_values` takes: the named Linears of the layer, or those under their adapters, and the forward that answers
    with an expanded `value`. Those that are neither here and now are left out, and compute. dense_of: as quantised's; adding: as
    add_up has it. filled: their values lie in memory as they would, since dropout on a GPU draws by where its input lies; not
    those of adapters' bases, to which something is added.
    """
    if autocast_dtype(device) is not None:  # whose casts are F.linear's own
        return []
    names = (name for name in dict.fromkeys(names) if as_found(layer, name))
    named = (submodule(layer, name) for name in names)
    modules = ((m, filled and m is n) for n in named if can_go_without(m := base_of(n)))
    dense = lambda m: None if type(m).forward is LINEAR else dense_of(m)  # noqa: E731
    return [(m, partial(_valueless_forward, m, dense(m), value, adding, fill)) for m, fill in modules]


def add_up(layer: nn.Module, idle: list, device: str, adding) -> list:
    """The same of the layer's other plain Linears whose weights' gradients can add up in their matmuls. adding: a function that
    gives of a weight the function that takes them, or None (WeightGradients.adding)."""
    if autocast_dtype(device) is not None:
        return []
    taken = {id(m) for m, _ in idle}
    linears = (m for m in modules_in(layer) if isinstance(m, nn.Linear) and id(m) not in taken)
    plain = (m for m in linears if type(m).forward is LINEAR and can_go_without(m))
    return [(m, partial(_adding_forward, m, adding)) for m in plain if adding(m.weight) is not None]


def without_values(idle: list):
    """Within, the idle Linears compute nothing."""
    return forwards_for_now(idle) if idle else nullcontext()
