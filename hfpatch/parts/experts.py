"""Fused experts of any family, run by ops/experts.py.

transformers looks up the function that runs a class of experts in a table. Ours is in that table
under the name that configs carry while our attention runs (context/current.py), so it also runs
inside the wrappers of expert parallelism and of adapters. Experts whose activation or layout is
unknown here, and configs that name another backend (deepgemm, sonicmoe, batched_mm), keep their
own function.
"""

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    OUR_EXPERTS,
    STANDARD_EXPERTS,
    forward_hooks,
    gate_of,
    hooks_on_all,
    is_fake,
    is_fused_experts,
    other_hooks,
    register_experts,
)
from hfpatch.context.current import current, named_experts, with_experts
from hfpatch.ops._library import KERNEL_DTYPES
from hfpatch.ops.experts import CLAMPED, Layout, experts
from hfpatch.ops.swiglu import ACTIVATIONS, _act
from hfpatch.parts.quantised import is_packed

_known: dict = {}  # (class, settings) of an activation's module -> its name, None where unknown
_SWIGLU_OF_GPT_OSS = "GptOssExperts._apply_gate"
_GATED = "_default_apply_gate"


def _activation(act: nn.Module) -> str | None:
    """The name of the function that this module computes, found on a few numbers."""
    key = type(act), repr(act)
    if key not in _known:
        x = torch.linspace(-6, 6, 49, dtype=torch.float64)
        with torch.no_grad():
            same = (n for n in ACTIVATIONS.values() if torch.allclose(act(x), _act(x, n), 1e-12))
            _known[key] = next(same, None)
    return _known[key]


def _takes(module: nn.Module, name: str) -> bool:
    """Whether this weight has one matrix per expert, of a dtype that the matmuls accept."""
    if is_packed(module, name):  # reading the attribute would dequantise it
        return True
    weight = getattr(module, name, None)
    plain = isinstance(weight, Tensor) and not hasattr(weight, "placements")
    # torchao's tensors have no grouped matmul
    plain = plain and (not hasattr(weight, "__tensor_flatten__") or is_fake(weight))
    return plain and weight.dim() == 3 and weight.dtype in (*KERNEL_DTYPES, torch.float64)


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of fused experts, or None where ops/experts.py cannot compute them."""
    plain = all(_takes(module, name) for name in ("gate_up_proj", "down_proj"))
    # Older versions of transformers lack these attributes: their experts run by their own forward.
    told = all(hasattr(module, name) for name in ("has_gate", "is_transposed"))
    normed = getattr(module, "has_post_expert_norm", False)
    if not plain or not told or not module.has_gate or normed or hooks_on_all():
        return None
    gate = gate_of(module)
    of_gpt_oss = gate.__qualname__ == _SWIGLU_OF_GPT_OSS
    # transformers before 5.10 has no such attribute: only gpt-oss's gate and up alternate.
    together = getattr(module, "is_concatenated", not of_gpt_oss)
    where = {"interleaved": not together, "transposed": module.is_transposed}
    if of_gpt_oss:
        return Layout(CLAMPED, module.alpha, module.limit, **where)
    act = getattr(module, "act_fn", None)
    if gate.__qualname__ != _GATED or not isinstance(act, nn.Module) or where["interleaved"]:
        return None
    watched = forward_hooks(act) or other_hooks(act) or "forward" in vars(act)
    name = None if watched else _activation(act)
    return name and Layout(name, **where)


def can_run(module: nn.Module | None) -> bool:
    """Whether these are fused experts that ops/experts.py can run, without their own forward on the
    instance."""
    return (
        is_fused_experts(module)
        and "forward" not in vars(module)
        and named_experts(module.config) in STANDARD_EXPERTS
        and layout_of(module) is not None
    )


def pairs(mine, **settings) -> list:
    """(module, forward) pairs of these fused experts.

    A wrapper of an engine (expert parallelism) stays around them and calls ours inside.
    """
    found = [(m, partial(run, m, **settings)) for m in mine if can_run(m)]
    around = (m for m in mine if "forward" in vars(m))
    standard = (m for m in around if named_experts(m.config) in STANDARD_EXPERTS)
    return found + [(m, partial(with_experts, OUR_EXPERTS, m.config, m.forward)) for m in standard]


def run(
    module: nn.Module,
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, value: float | None = None,
    adding=None, weight_of=getattr,
) -> Tensor:  # fmt: skip
    """The experts' forward.

    Args:
        module: the fused experts.
        hidden_states, top_k_index, top_k_weights: as transformers calls them.
        value: see ops.experts.
        adding: see WeightGradients.adding.
        weight_of: (module, name) -> a weight, dequantised where it is quantised.
    """
    layout = layout_of(module)
    if layout is None:
        named, forward = named_experts(module.config), partial(type(module).forward, module)
        return with_experts(
            named, module.config, forward, hidden_states, top_k_index, top_k_weights
        )
    w1, w2 = weight_of(module, "gate_up_proj"), weight_of(module, "down_proj")
    biases = {}
    if module.has_bias:
        biases = {"b1": module.gate_up_proj_bias, "b2": module.down_proj_bias}
    factors = {
        name: tuple(x.to(w1.dtype) for x in pair) for name, pair in (current.factors or {}).items()
    }
    adds = [adding and w.requires_grad and adding(w) or None for w in (w1, w2)]
    y = experts(
        hidden_states.to(w1.dtype), top_k_index, top_k_weights, w1, w2, layout=layout, **biases,
        first=factors.get("gate_up_proj", (None, None)),
        second=factors.get("down_proj", (None, None)), adds=tuple(adds), value=value,
    )  # fmt: skip
    return y.to(hidden_states.dtype)


register_experts(run)
