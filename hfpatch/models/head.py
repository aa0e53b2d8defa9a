"""The head of a causal model: which module it is, whether a call of it can answer with something else than logits, and that call.

It stays the Linear that it is. For one call its `forward` is a function of hidden states, weight and bias, so that the engines'
hooks around the call gather what is sharded. Under tensor parallelism the function gets the rows that this rank has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    forward_hooks,
    hooked_forward,
    hooks_on_all,
    in_fsdp2,
    modules_of,
    other_hooks,
    output_hooks,
    parameters_of,
    user_hooks,
)
from hfpatch.models.classes import CALL, LINEAR, forward_now, forwards_for_now, swap, whose
from hfpatch.ops import VocabShard


def copies(head: nn.Module):
    """The modules that PEFT's modules_to_save wrapper holds, and the one that runs; the head itself where there is none."""
    held = getattr(head, "modules_to_save", None)
    if not isinstance(held, nn.ModuleDict):
        return [head], head
    active = (
        getattr(head, "active_adapter", None) or ()
    )  # none where the adapter that is switched on has no head of its own
    active = (active,) if isinstance(active, str) else active
    own = active and all(name in held for name in active) and not getattr(head, "disable_adapters", False)
    return [head.original_module, *held.values()], held[active[0]] if own else head.original_module


def fuse(module: nn.Module, theirs: type, part: type) -> None:
    """Mixes `part` over a module of class `theirs`, or over those that PEFT's modules_to_save wrapper holds."""
    for inner in copies(module)[0]:
        if type(inner) is theirs and "forward" not in vars(inner) and not hasattr(inner.weight, "placements"):
            swap(inner, part)


def why_not_fused(head: nn.Module, pass_forward: bool = False) -> str | None:
    """None where a call of `head` can answer with the fused loss (also through PEFT's modules_to_save), else what it is.

    pass_forward: a forward on the instance is no reason, as who asks would not have called it.
    """
    inner = copies(head)[1]
    if not isinstance(inner, nn.Linear) or type(inner).forward is not LINEAR:
        return f"lm_head is a {type(head).__module__}.{type(head).__name__}"
    if type(inner).__call__ is not CALL:
        return f"lm_head is a {type(inner).__module__}.{type(inner).__name__} whose __call__ is not torch's"
    if has_rows_of_it(inner):
        return "torch.compile takes no part of lm_head's rows" if torch.compiler.is_compiling() else None
    held = forward_now(inner, hooked_forward(inner))
    if held is not None and getattr(held, "__func__", None) is not LINEAR and not pass_forward:
        return f"lm_head is a {type(inner).__module__}.{type(inner).__name__} with a forward of another library"
    # FSDP2's sharded weights are whole within the call; those of quantisation stay what they are.
    weight = parameters_of(inner).get("weight")
    if hasattr(type(weight), "__tensor_flatten__") and not in_fsdp2(inner):
        return f"lm_head's weight is a {type(weight).__module__}.{type(weight).__name__}"
    return None


def rows_of(head: nn.Module) -> int:
    """How many words a head has; its weight may be sharded now, and its own number be older than its weight."""
    inner = copies(head)[1]
    weight = parameters_of(inner).get("weight")
    return weight.shape[0] if weight is not None and weight.ndim == 2 and weight.shape[0] else inner.out_features


def has_rows_of_it(linear: nn.Linear) -> bool:
    """Whether transformers' tensor parallelism, whose forward this Linear then has, gave each rank some rows."""
    held = vars(linear).get(hooked_forward(linear))
    tensors = [t for t in parameters_of(linear).values() if t is not None]
    by_rows = [
        (t.device_mesh.ndim == 1 or in_fsdp2(linear))
        and t.placements[-1].is_shard()
        and t.placements[-1].dim in (0, -t.ndim)
        for t in tensors
        if hasattr(t, "placements")
    ]
    return (
        held is not None and whose(held).startswith("transformers.") and len(by_rows) == len(tensors) and all(by_rows)
    )


def _rows_here(linear: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None, dict]:
    """hidden, weight and bias as this rank's function takes them, within a call of the head; and of which words they are."""
    weight, bias = linear.weight, linear.bias
    if not hasattr(weight, "placements"):
        return hidden, weight, bias, {}
    whole = hidden.full_tensor() if hasattr(hidden, "placements") else hidden
    shard = VocabShard(weight.device_mesh.get_group(), weight.shape[0])
    return whole, weight.to_local(), None if bias is None else bias.to_local(), {"shard": shard}


def reads_logits(head: nn.Module) -> str | None:
    """The reason where a hook of the user's expects what a head gives, or its gradient."""
    hooks = [h for m in dict.fromkeys((head, copies(head)[1])) for h in user_hooks(m, output_hooks(m))] + hooks_on_all()
    return next((f"lm_head has a hook ({getattr(h, '__qualname__', type(h).__name__)})" for h in hooks), None)


@dataclass
class Call:
    """The head's forward for one call: function(hidden, weight, *args, bias=bias, **options)."""

    function: Callable
    linear: nn.Linear
    args: tuple
    options: dict

    def __call__(self, hidden: Tensor):
        hidden, weight, bias, part = _rows_here(self.linear, hidden)
        return self.function(hidden, weight, *self.args, bias=bias, **self.options, **part)


def call_under_way(head: nn.Module) -> Call | None:
    """The Call that this head answers with now, for hooks that run beside it; None where it gives logits."""
    inner = copies(head)[1]
    found = forward_now(inner, hooked_forward(inner))
    return found if isinstance(found, Call) else None


def through(head: nn.Module, function, hidden: Tensor, *args, **options):
    """function(hidden, weight, *args, bias=bias, **options) by one call of the head, whose hooks (the engines') gather both."""
    inner = copies(head)[1]
    name, call = hooked_forward(inner), Call(function, inner, args, options)
    if not torch.compiler.is_compiling():
        with forwards_for_now([(inner, call)], name):
            return head(hidden)
    own = vars(inner)
    if head is inner and name == "forward" and name not in own and not forward_hooks(inner) and not other_hooks(inner):
        return call(hidden)  # the same; torch 2.11's dynamo cannot take a forward away again
    before = own.get(name)
    own[name] = call
    try:
        return head(hidden)
    finally:
        del own[name]
        if before is not None:
            own[name] = before


def head_name(model: nn.Module) -> str | None:
    """The attribute under which a model calls its head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((n for n, m in modules_of(model).items() if m is head and m is not None), None)
