"""How one call of a decoder layer runs: in tiles, whole with its input offloaded, or as
transformers has it.

`route` reads an ordered table of rules; the first that gives a reason decides. The forward, the
report and `hfpatch env` print these reasons. Rules that need no arguments of the call are settled
when the stack looks at its layers (condition.py).
"""

from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hfpatch.attention.attention import Pattern, supported
from hfpatch.budget.policy import Policy
from hfpatch.compat import autocast_dtype
from hfpatch.context.current import why_not_causal
from hfpatch.context.masks import Batch, Mask
from hfpatch.layer.adapters import TOLD
from hfpatch.layer.condition import Condition

# The reason of a call without a description of its tokens (generation, evaluation, a caller's own
# mask). The report leaves it out: the stack has printed why, if it matters.
NOT_DESCRIBED = "not described"
KEEPS = "keys and values come with the batch, or are to be kept (prefix tuning, use_cache=True)"


@dataclass(slots=True)
class Request:
    """One call of a layer, as the rules read it.

    Attributes:
        x: [B, T, D], residual streams joined; given: x as the caller passed it.
        batch: the description of the tokens, None if transformers' attention runs.
        sequence: the ranks that share the rows, or None.
        mask: the layer's attention_mask; shared: keys of earlier layers, or None; cache: its KV
            cache, or None.
    """

    layer: nn.Module
    x: Tensor
    given: Tensor
    args: tuple
    kwargs: dict
    batch: Batch | None
    sequence: object
    condition: Condition
    mask: object
    shared: object
    cache: Cache | None = None


@dataclass(frozen=True, slots=True)
class Tiled:
    policy: Policy


@dataclass(frozen=True, slots=True)
class Whole:
    """Checkpointed whole. policy: None if its input stays on the device."""

    reason: str
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class Stock:
    """transformers' own forward. reason: why the call is not tiled, None if it may be. keeps: the
    policy by which this layer keeps everything, else None.
    """

    reason: str | None = None
    keeps: Policy | None = None


def _not_described(r: Request) -> str | None:
    b = r.batch
    described = b is not None and not b.weights and r.x.dim() == 3 and r.x.numel()
    return None if described and r.cache is None else NOT_DESCRIBED


def _not_causal(r: Request) -> str | None:
    if r.kwargs.get("encoder_hidden_states") is not None:
        return "it attends to an encoder's states"
    n = 0 if r.mask is None else len(r.layer._hfpatch_traits.attention)
    for attn in r.condition.mixing[:n]:
        if (why := why_not_causal(attn, r.mask)) is not None:
            return why
    return None


def _no_kernels(r: Request) -> str | None:
    softcap, device = r.layer._hfpatch_traits.softcap, r.x.device
    pattern = r.mask.pattern(softcap) if isinstance(r.mask, Mask) else Pattern(softcap=softcap)
    dtype = autocast_dtype(device.type) or r.x.dtype
    return supported(r.condition.head_dim, dtype, device, pattern)


# condition.now: the stack's finding in this forward
RULES = (_not_described, attrgetter("condition.now"), _not_causal, _no_kernels)


def route(r: Request) -> Tiled | Whole | Stock:
    """How this call runs."""
    for rule in RULES:
        reason = rule(r)
        if reason is not None:
            return _whole(r, reason)
    return _tiled(r)


def _tiled(r: Request) -> Tiled | Stock:
    layer, runtime = r.layer, r.layer._hfpatch_runtime
    policy = runtime.policy(layer, r.x, r.batch.sequence)
    if not r.batch.even:  # ranks that exchange tokens in each tile need equally many tiles
        policy = replace(policy, tile=r.x[..., 0].numel())
    # Mixers of shared rows need their tiles.
    untiled = runtime.untiled(layer, r.x, policy)
    untiled = untiled and not (r.batch.sequence and layer._hfpatch_traits.mixers)
    return Stock(keeps=policy) if untiled else Tiled(policy)


def _whole(r: Request, reason: str) -> Whole | Stock:
    layer, runtime, kind = r.layer, r.layer._hfpatch_runtime, type(r.layer).__name__
    nothing_to_keep = not (layer.training and torch.is_grad_enabled()) or not r.given.numel()
    if nothing_to_keep or r.kwargs.get("output_attentions"):
        return Stock(reason)
    by_transformers = getattr(layer, "gradient_checkpointing", False) and r.given.requires_grad
    if r.condition.adapter in TOLD and not by_transformers:
        # PEFT passes these by hooks, which it removes when the model's forward ends. With
        # gradient_checkpointing they last longer, but end as the layer's backward begins if its
        # input needs no gradient.
        runtime.tell(
            f"{kind}s run untiled and not checkpointed: an adapter in it has {r.condition.adapter}."
        )
        return Stock(reason)
    # the report prints traits.reason
    if reason not in (NOT_DESCRIBED, layer._hfpatch_traits.reason):
        runtime.tell(f"{kind}s run untiled, their inputs offloaded: {reason}.")
    # the caller wants the cache, and a rerun of the layer would write its keys twice
    if r.cache is not None:
        runtime.tell(f"{kind}s run untiled and not checkpointed: {KEEPS}.")
        return Stock(KEEPS)
    policy = runtime.policy(layer, r.given, r.sequence, whole=True) if r.given.dim() == 3 else None
    if policy is not None and runtime.untiled(layer, r.given, policy):
        return Stock(reason, keeps=policy)
    return Whole(reason, policy)
