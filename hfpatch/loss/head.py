"""The head of a causal model: finding it, and computing a loss inside one call of it.

The head stays the Linear that it is. For one call its `forward` is replaced by a function of hidden
states, weight and bias, so the hooks of engines around the call gather a sharded weight.
"""

import torch
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss

from hfpatch.compat import (
    hooked_forward,
    hooks_on_all,
    in_fsdp2,
    modules_of,
    output_hooks,
    parameters_of,
    user_hooks,
    values_for_now,
)
from hfpatch.context.classes import CALL, LINEAR, swap, whose

WHOLE = (
    "the loss runs through whole logits, as {}. A fused loss needs a plain Linear as lm_head, "
    "transformers' own loss, and a forward that only hands the logits to it."
)


def copies(head: nn.Module):
    """(the copies in PEFT's modules_to_save wrapper, the active one).

    Without a wrapper: ([head], head).
    """
    held = getattr(head, "modules_to_save", None)
    if not isinstance(held, nn.ModuleDict):
        return [head], head
    # Empty where the active adapter has no head of its own.
    active = getattr(head, "active_adapter", None) or ()
    active = (active,) if isinstance(active, str) else active
    own = (
        active
        and all(name in held for name in active)
        and not getattr(head, "disable_adapters", False)
    )
    return [head.original_module, *held.values()], held[active[0]] if own else head.original_module


def linear_of(head: nn.Module) -> nn.Module:
    """The module that computes logits: the head, or the active copy in PEFT's wrapper."""
    return head if isinstance(head, nn.Linear) else copies(head)[1]


def fuse(module: nn.Module, theirs: type, part: type) -> None:
    """Swaps in the class `part` for modules of class `theirs`: the module, or the copies that PEFT
    holds."""
    for inner in copies(module)[0]:
        if (
            type(inner) is theirs
            and "forward" not in vars(inner)
            and not hasattr(inner.weight, "placements")
        ):
            swap(inner, part)


def why_not_fused(head: nn.Module, pass_forward: bool = False) -> str | None:
    """Why a call of `head` cannot compute the fused loss, or None where it can.

    Args:
        head: the head, or PEFT's modules_to_save wrapper around it.
        pass_forward: accept a forward set on the instance; for callers that would bypass it.

    Returns:
        A phrase that names the head's class, forward or hook, for a report.
    """
    inner = linear_of(head)
    if not isinstance(inner, nn.Linear) or type(inner).forward is not LINEAR:
        return f"lm_head is a {type(head).__module__}.{type(head).__name__}"
    if type(inner).__call__ is not CALL:
        return f"lm_head is a {type(inner).__name__} whose __call__ is not torch's"
    hooks = output_hooks(inner)
    if head is not inner:
        hooks += output_hooks(head)
    if hooks:
        hooks = user_hooks(hooks)
    hooks += hooks_on_all()
    if hooks:  # one that reads logits or their gradient
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        return f"lm_head has a hook ({name})"
    held = vars(inner).get(hooked_forward(inner))
    if held is not None and getattr(held, "__func__", None) is not LINEAR and not pass_forward:
        return f"lm_head is a {type(inner).__name__} with a forward of another library"
    # FSDP2 gathers its sharded weight within the call; a quantised weight stays quantised.
    weight = parameters_of(inner).get("weight")
    if hasattr(type(weight), "__tensor_flatten__") and not in_fsdp2(inner):
        return f"lm_head's weight is a {type(weight).__module__}.{type(weight).__name__}"
    return None


def why_whole_logits(model: nn.Module, head: nn.Module) -> str | None:
    """Why this model's loss runs through whole logits, or None where it is fused: the loss is
    transformers' causal one, and a call of the head can compute it."""
    loss = model.loss_function
    if loss not in (ForCausalLMLoss, model._hfpatch_loss):
        return f"its loss is {getattr(loss, '__qualname__', type(loss).__name__)}"
    return _replaced() or why_not_fused(head)


@torch.compiler.assume_constant_result
def _replaced() -> str | None:
    """A phrase that names a function of transformers' causal loss that other code replaced."""
    parts = (
        (loss_utils, "ForCausalLMLoss"),
        (loss_utils, "fixed_cross_entropy"),
        (nn.functional, "cross_entropy"),
    )
    for home, name in parts:
        owner = whose(getattr(home, name))
        if owner != home.__name__:
            return f"{name} is {owner}'s"
    return None


def rows_of(head: nn.Module) -> int:
    """The size of a head's vocabulary.

    A sharded weight has fewer rows; out_features may be outdated.
    """
    inner = linear_of(head)
    weight = parameters_of(inner).get("weight")
    return (
        weight.shape[0]
        if weight is not None and weight.ndim == 2 and weight.shape[0]
        else inner.out_features
    )


def through(head: nn.Module, function, hidden: Tensor, *args, **options):
    """function(hidden, weight, *args, bias=bias, **options), computed inside one call of the head.

    Engine hooks (FSDP, ZeRO-3) around that call gather the head's weight.
    """
    inner = linear_of(head)

    def forward(hidden):
        return function(hidden, inner.weight, *args, bias=inner.bias, **options)

    with values_for_now([(vars(inner), hooked_forward(inner), forward)]):
        return head(hidden)


def head_name(model: nn.Module) -> str | None:
    """The name of the attribute that holds a model's head, or None."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((n for n, m in modules_of(model).items() if m is head and m is not None), None)
