"""How one call of a decoder layer runs: in tiles, whole with its input offloaded, or as
transformers has it.

`route` reads an ordered table of rules; the first that gives a reason decides. The forward, the
report and `hfpatch env` give these reasons.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from hfpatch.attention.attention import Pattern, supported
from hfpatch.budget.policy import KEEPABLE, Policy
from hfpatch.compat import autocast_dtype, hooks_on_all, submodule
from hfpatch.context.class_code import as_asked
from hfpatch.context.current import why_not_causal
from hfpatch.context.masks import Batch, Mask
from hfpatch.layer.adapters import TOLD
from hfpatch.layer.condition import Condition
from hfpatch.layer.parts import keepable
from hfpatch.layer.shared_keys import NAME as SHARED_KEYS

NOT_NOW = "not now"  # a reason that no user asks for: generation, evaluation, empty rows
KEEPS = "keys and values come with the batch, or are to be kept (prefix tuning, use_cache=True)"


@dataclass(slots=True)
class Request:
    """One call of a layer, as the rules read it. x: [B, T, D], streams joined; given: as it came;
    sequence: the ranks that share its rows, or None.
    """

    layer: nn.Module
    x: Tensor
    given: Tensor
    args: tuple
    kwargs: dict
    batch: Batch | None
    cache: Cache | None
    sequence: object
    condition: Condition

    @property
    def mask(self):
        return self.kwargs.get("attention_mask")

    @property
    def shared(self):
        return self.kwargs.get(SHARED_KEYS)


@dataclass(frozen=True, slots=True)
class Tiled:
    policy: Policy


@dataclass(frozen=True, slots=True)
class Whole:
    """Checkpointed whole. policy: None where its input stays on the device."""

    reason: str
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class Stock:
    """As transformers has it: nothing is kept for it, or, under the policy `keeps`, everything."""

    reason: str | None = None
    keeps: Policy | None = None


def _in_every_call(r: Request) -> str | None:
    return r.condition.reason


def _hooks_everywhere(r: Request) -> str | None:
    return "hooks on every module of the process" if hooks_on_all() and r.condition.inside else None


def _not_described(r: Request) -> str | None:
    b = r.batch
    return None if b is not None and r.x.dim() == 3 and r.x.numel() and not b.weights else NOT_NOW


def _beside_an_encoder(r: Request) -> str | None:
    return (
        None
        if r.kwargs.get("encoder_hidden_states") is None
        else "it attends to an encoder's states"
    )


def _cache_it_cannot_fill(r: Request) -> str | None:
    if r.cache is None or r.batch.prefill and r.shared is None and _fills(r.layer, r.cache):
        return None
    return NOT_NOW


def _fills(layer: nn.Module, cache: Cache) -> bool:
    """Whether all keys and values may go into this cache at once, which holds none of this layer
    yet.
    """
    traits = layer._hfpatch_traits
    indices = [getattr(submodule(layer, name), "layer_idx", None) for name in traits.attention]
    if (
        traits.mixers
        or type(cache) is not DynamicCache
        or len({*indices} - {None}) != len(traits.attention)
    ):
        return False
    return not any(cache.get_seq_length(index) for index in indices)


def _rotation_replaced(r: Request) -> str | None:
    kinds = [getattr(attn, "_hfpatch_base", type(attn)) for attn in r.condition.mixing]
    return next(
        (f"another rotation for {k.__name__} than at apply()" for k in kinds if not as_asked(k)),
        None,
    )


def _attention_dropout(r: Request) -> str | None:
    for attn in r.condition.mixing if r.layer.training else ():
        dropout = getattr(attn, "attention_dropout", 0.0)
        if dropout.p if isinstance(dropout, nn.Dropout) else dropout:
            return "attention dropout"
    return None


def _mask_not_causal(r: Request) -> str | None:
    if r.mask is None:
        return None
    attention = r.condition.mixing[: len(r.layer._hfpatch_traits.attention)]
    return next((why for attn in attention if (why := why_not_causal(attn, r.mask))), None)


def _no_kernels(r: Request) -> str | None:
    softcap = r.layer._hfpatch_traits.softcap
    pattern = r.mask.pattern(softcap) if isinstance(r.mask, Mask) else Pattern(softcap=softcap)
    return why_no_kernels(
        r.layer, r.x.device, autocast_dtype(r.x.device.type) or r.x.dtype, pattern
    )


RULES = (
    _not_described,
    _cache_it_cannot_fill,
    _in_every_call,
    _hooks_everywhere,
    _beside_an_encoder,
    _rotation_replaced,
    _attention_dropout,
    _mask_not_causal,
    _no_kernels,
)


def route(r: Request) -> Tiled | Whole | Stock:
    """How this call runs."""
    reason = next((why for rule in RULES if (why := rule(r))), None)
    return _tiled(r) if reason is None else _whole(r, reason)


def why_no_kernels(
    layer: nn.Module, device: torch.device, dtype: torch.dtype, pattern: Pattern
) -> str | None:
    """None where this device has kernels for what the layer's attention asks, else the reason."""
    heads = [
        getattr(submodule(layer, name), "head_dim", 0) or 0
        for name in layer._hfpatch_traits.attention
    ]
    return supported(max(heads, default=0), dtype, device, pattern)


def _tiled(r: Request) -> Tiled | Stock:
    layer, session = r.layer, r.layer._hfpatch_session
    able = partial(keepable, layer, layer._hfpatch_traits, KEEPABLE, r.x.device.type)
    policy = session.policy(layer, r.x, r.batch.sequence, able=able)
    keeps_everything = torch.is_grad_enabled() and session.is_plain(layer, policy)
    return Stock(keeps=policy) if keeps_everything else Tiled(policy)


def _whole(r: Request, reason: str) -> Whole | Stock:
    layer, session, kind = r.layer, r.layer._hfpatch_session, type(r.layer).__name__
    nothing_to_keep = not (layer.training and torch.is_grad_enabled()) or not r.given.numel()
    if nothing_to_keep or r.kwargs.get("output_attentions"):
        return Stock(reason)
    by_transformers = getattr(layer, "gradient_checkpointing", False) and r.given.requires_grad
    if r.condition.adapter in TOLD and not by_transformers:
        # By hooks that PEFT takes away when the model's forward ends, but for
        # gradient_checkpointing; there as the layer's backward begins, where nobody wants the
        # gradient of its input.
        session.tell(
            f"{kind}s run whole and keep everything: an adapter in it has {r.condition.adapter}."
        )
        return Stock(reason)
    if reason not in (NOT_NOW, layer._hfpatch_traits.reason):  # the report has the latter
        session.tell(f"{kind}s run whole, their inputs offloaded: {reason}.")
    # asked for by the caller; running the layer again would write its keys twice
    if r.cache is not None:
        session.tell(f"{kind}s run whole and keep everything: {KEEPS}.")
        return Stock(KEEPS)
    policy = session.policy(layer, r.given, r.sequence, whole=True) if r.given.dim() == 3 else None
    if policy is not None and session.is_plain(layer, policy):
        return Stock(reason)
    return Whole(reason, policy)
