"""Fused experts of any family, run by ops/experts.py.

transformers looks up the function that runs a class of experts in a table. Ours is in that table
under the name that configs carry while our attention runs (context/current.py), so it also runs
inside the wrappers of expert parallelism and of adapters. Experts whose activation or layout is
unknown here, and configs that name another backend (deepgemm, sonicmoe, batched_mm), keep their
own function.
"""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    OUR_EXPERTS,
    STANDARD_EXPERTS,
    forward_hooks,
    gate_of,
    hooks_on_all,
    is_fake,
    other_hooks,
    register_experts,
)
from hfpatch.context.current import experts_as_named, named
from hfpatch.ops._library import KERNEL_DTYPES
from hfpatch.ops.experts import CLAMPED, Layout, experts
from hfpatch.ops.swiglu import ACTIVATIONS, _act
from hfpatch.parts.parts import with_gradients

_known: dict = {}  # (class, settings) of an activation's module -> its name, None where unknown
_SWIGLU_OF_GPT_OSS = "GptOssExperts._apply_gate"
_GATED = "_default_apply_gate"


def _activation(act: nn.Module) -> str | None:
    """The name of the function that this module computes, found on a few numbers."""
    key = type(act), repr(act)
    if key not in _known:
        _known[key] = None
        # A user's activation may raise anything.
        with suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            x = torch.linspace(-6, 6, 49, dtype=torch.float64)
            x = torch.cat([x, 100 * x]).requires_grad_()  # some are clipped, as gelu_10
            of = lambda y: torch.stack(with_gradients((y,), [x]))  # noqa: E731
            y = of(act(x.clone()))  # it may write in place
            same = (n for n in ACTIVATIONS.values() if torch.allclose(y, of(_act(x, n)), 1e-12))
            _known[key] = next(same, None)
    return _known[key]


def layout_of(module: nn.Module) -> Layout | None:
    """The layout of fused experts; None where ops/experts.py cannot compute them, and for other
    modules.
    """
    gate = gate_of(module)
    if gate is None or not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    of_gpt_oss = gate.__qualname__ == _SWIGLU_OF_GPT_OSS
    # transformers before 5.10 has no such attribute: only gpt-oss's gate and up alternate.
    together = getattr(module, "is_concatenated", not of_gpt_oss)
    where = {"interleaved": not together, "transposed": module.is_transposed}
    if of_gpt_oss:
        return Layout(CLAMPED, **where)  # its numbers: see `run`
    act = getattr(module, "act_fn", None)
    if gate.__qualname__ != _GATED or not isinstance(act, nn.Module) or where["interleaved"]:
        return None
    watched = forward_hooks(act) or other_hooks(act) or "forward" in vars(act)
    name = None if watched else _activation(act)
    return name and Layout(name, **where)


def layouts_in(modules) -> dict[nn.Module, Layout]:
    """The fused experts among these modules that ops/experts.py can run, with their layouts."""
    layouts = {m: layout_of(m) for m in modules}
    return {m: layout for m, layout in layouts.items() if layout is not None}


def weights_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """W1 and W2 in a call of these experts; None where they run as their config names them.

    Engines gather weights for the call, and the config may name another function than before, so
    neither can be known earlier.
    """
    # A config that was copied within a forward names ours.
    if named(module.config).experts not in (OUR_EXPERTS, *STANDARD_EXPERTS):
        return None
    pair = (module.gate_up_proj, module.down_proj)
    for w in pair:
        dense = w.__class__ in (Tensor, nn.Parameter) or is_fake(w)  # no DTensor, none of torchao's
        if not dense or w.dim() != 3 or w.dtype not in (*KERNEL_DTYPES, torch.float64):
            return None
    return pair


def run(
    module: nn.Module,
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, layout: Layout | None = None, value: float | None = None, adding=None,
    weights=None, **adapters,
) -> Tensor:  # fmt: skip
    """The experts' forward.

    Args:
        module: the fused experts.
        hidden_states, top_k_index, top_k_weights: as transformers calls them.
        layout: from layout_of; None where transformers calls.
        value: see ops.experts.
        adding: see WeightGradients.adding.
        weights: from weights_of, if the caller has them.
        adapters: first and second, see ops.experts.
    """
    if layout is None and not hooks_on_all():
        layout = layout_of(module)
    if layout is not None and weights is None:
        weights = weights_of(module)
    if weights is None:
        return experts_as_named(module, hidden_states, top_k_index, top_k_weights)
    w1, w2 = weights
    if layout.activation == CLAMPED:  # numbers count as they are at the call
        layout = replace(layout, alpha=module.alpha, limit=module.limit)
    biases = {}
    if module.has_bias:
        biases = {"b1": module.gate_up_proj_bias, "b2": module.down_proj_bias}
    adds = (adding(w1), adding(w2)) if adding else (None, None)
    y = experts(
        hidden_states.to(w1.dtype), top_k_index, top_k_weights, w1, w2, layout=layout, adds=adds,
        value=value, **biases, **adapters,
    )  # fmt: skip
    return y.to(hidden_states.dtype)


register_experts(run)
