"""How one call of a decoder layer runs: in tiles, whole with its input offloaded, or as
transformers has it. The reasons are those of why_whole.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hfpatch.budget.policy import Policy
from hfpatch.context.masks import Batch
from hfpatch.layer.condition import Condition
from hfpatch.layer.why_whole import BY_NAME, Why, first


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


def route(r: Request) -> Tiled | Whole | Stock:
    """How this call runs."""
    why = first("call", r.condition.now, r)
    if why is not None:
        return _whole(r, why)
    layer, runtime = r.layer, r.layer._hfpatch_runtime
    policy = runtime.policy(layer, r.x, r.batch.sequence)
    if not r.batch.even:  # ranks that exchange tokens in each tile need equally many tiles
        policy = replace(policy, tile=r.x[..., 0].numel())
    # Mixers of shared rows need their tiles.
    untiled = runtime.untiled(layer, r.x, policy)
    untiled = untiled and not (r.batch.sequence and layer._hfpatch_traits.mixers)
    return Stock(keeps=policy) if untiled else Tiled(policy)


def _whole(r: Request, why: Why) -> Whole | Stock:
    reason = BY_NAME[why.name]
    layer, runtime = r.layer, r.layer._hfpatch_runtime
    nothing_to_keep = not (layer.training and torch.is_grad_enabled()) or not r.given.numel()
    if nothing_to_keep or r.kwargs.get("output_attentions"):
        return Stock(why)
    if reason.told:
        how = " and not checkpointed" if reason.keeps else ", their inputs offloaded"
        runtime.tell(f"{type(layer).__name__}s run untiled{how}: {why}.")
    if reason.keeps:
        return Stock(why)
    policy = runtime.policy(layer, r.given, r.sequence, whole=True) if r.given.dim() == 3 else None
    if policy is not None and runtime.untiled(layer, r.given, policy):
        return Stock(why, keeps=policy)
    return Whole(why, policy)
