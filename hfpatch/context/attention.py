"""The mask function and the attention function that transformers' interfaces hold under our names.

Attention hands its call to the role that is current, or computes the result itself.
"""

import inspect
from functools import partial

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.attention.heads import Attention
from hfpatch.compat import autocast_dtype
from hfpatch.context.current import NAME, AttentionCall, current, named, not_exchanged
from hfpatch.context.masks import ANSWERED, Batch, Mask, describe
from hfpatch.context.ranks import attends_to_all_before
from hfpatch.parallel.exchange import ExchangedAttention


def mask(
    *,
    kv_length,
    mask_function,
    config,
    dtype=None,
    kv_offset=0,
    local_size=None,
    use_vmap=False,
    **kwargs,
) -> Mask:
    """A Mask. The keywords are those of transformers' own mask functions."""
    batch = current.batch
    if batch is None:  # of a model that is not patched, whose config was copied during a forward
        device = kwargs.get("device", "cpu")
        batch = Batch(kwargs["batch_size"], kv_length, device, kwargs.get("attention_mask"))
    added = dtype if named(config).attention == "eager" else None
    if not use_vmap and kv_length == batch.t and not kv_offset:
        kind = describe(mask_function, local_size)
        if kind is not None:
            return Mask(batch, added=added, **kind)
    if use_vmap:
        mask_function = batch.within_documents(mask_function)
    kwargs |= {
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "local_size": local_size,
        "mask_function": mask_function,
        "use_vmap": use_vmap,
        "allow_is_causal_skip": False,
    }
    return Mask(batch, build=partial(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], **kwargs), added=added)


def attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    scaling=None,
    dropout=0.0,
    softcap=None,
    s_aux=None,
    **kwargs,
):
    """The attention function of patched layers: returns ([B, T, H, E], None).

    The mask holds the window, as in transformers' own eager and sdpa functions.
    """
    if attention_mask is None and _row_ranks() is not None:
        # accelerate's hooks drop masks; before 1.15 they drop masks of windows too
        if not attends_to_all_before(getattr(module, "config", None)):
            raise not_exchanged(
                "a window whose mask accelerate took away (hfpatch.Callback keeps it)"
            )
        attention_mask = Mask(current.batch)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if not getattr(module, "training", True):
        dropout = 0.0
    told = _told(module, kwargs)
    call = AttentionCall(
        module, query, key, value, attention_mask, scaling, softcap, s_aux, dropout, told
    )
    if current.role is None:
        return _whole(call, kwargs)
    return current.role(call), None


def _own_eager(module):
    """The eager attention in the file that defines this module's class, or None."""
    own = inspect.unwrap(getattr(module, "_hfpatch_base", type(module)).forward)
    return own.__globals__.get("eager_attention_forward")


def _told(module, kwargs) -> str | None:
    """The name of a float tensor among the arguments that the family's eager attention takes too
    and that changes its scores (a bias of positions), or None.
    """
    floats = [name for name, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()]
    function = _own_eager(module) if floats else None
    if function is None:
        return None
    parameters = inspect.signature(function).parameters
    return next((name for name in floats if name in parameters), None)


class _Attention(torch.autograd.Function):
    """Attention of a layer that is not tiled. row_ranks: the ranks that share its rows, or None."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options, row_ranks):
        ctx.attention = Attention(all_heads=True)
        if row_ranks is not None:
            ctx.attention = ExchangedAttention(row_ranks)
        outs, lses = ctx.attention.forward([options], [], [q, k, v])
        ctx.save_for_backward(q, k, v, *outs, *lses)
        return outs[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [None, None, None]
        dsinks = ctx.attention.backward([q, k, v], [dout], lambda: out, [lse], grads)
        return *grads, *dsinks, None, None


def _row_ranks():
    """The ranks that share the rows of the running forward, or None."""
    return None if current.batch is None else current.batch.row_ranks


def _whole(call: AttentionCall, kwargs: dict) -> tuple[Tensor, Tensor | None]:
    """(out, probabilities or None) of whole rows. kwargs: the other arguments of the call."""
    row_ranks = _row_ranks()
    reason = call.why_not_tiled()
    if reason is not None and row_ranks is not None:
        raise not_exchanged(reason)
    scaled = call.softcap is not None or call.sinks_H is not None
    probabilities = current.batch is not None and current.batch.probabilities
    if probabilities or call.told or reason and scaled:
        return _by_family(call, kwargs)
    if reason is not None:
        return _by_sdpa(call), None
    q, k, v = _cast(call)
    return _Attention.apply(q, k, v, call.sinks_H, call.options(), row_ranks), None


def _cast(call: AttentionCall) -> list[Tensor]:
    """q, k and v as [B, T, H, E], in autocast's dtype."""
    qkv = [x.transpose(1, 2) for x in (call.q_BHTE, call.k_BKTE, call.v_BKTE)]
    cast = autocast_dtype(qkv[0].device.type)
    if cast is None or qkv[0].dtype == torch.float64:
        return qkv
    return [x.to(cast) for x in qkv]


def _by_family(call: AttentionCall, kwargs: dict) -> tuple[Tensor, Tensor]:
    """(out, probabilities [B, H, T, T]) of the family's own eager attention. Families differ in
    what else they take, and in whether their probabilities include sinks.
    """
    eager = _own_eager(call.module)
    q = call.q_BHTE
    mask, causal = _mask_and_causal(call)
    if mask is None and causal:
        mask = q.new_ones(2 * q.shape[2:3], dtype=torch.bool).tril()
    if eager is None:
        raise NotImplementedError(
            f"hfpatch: {type(call.module).__name__} has no eager attention to fall back to. Call "
            "hfpatch.undo(model)."
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(q.dtype).min)
    scoring = {"softcap": call.softcap, "s_aux": call.sinks_H}
    kwargs = kwargs | {name: x for name, x in scoring.items() if x is not None}
    return eager(
        call.module, q, call.k_BKTE, call.v_BKTE, mask, scaling=call.scale,
        dropout=call.dropout, **kwargs,
    )  # fmt: skip


def _by_sdpa(call: AttentionCall) -> Tensor:
    """Attention with a dense mask or dropout, computed as transformers' own functions do."""
    mask, causal = _mask_and_causal(call)
    out = torch.nn.functional.scaled_dot_product_attention(
        call.q_BHTE,
        call.k_BKTE,
        call.v_BKTE,
        mask,
        call.dropout,
        causal and mask is None,
        scale=call.scale,
        enable_gqa=call.q_BHTE.shape[1] != call.k_BKTE.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def _mask_and_causal(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """(the dense mask, or None where causality describes it; whether the call is causal without a
    mask).
    """
    mask = call.mask.dense() if isinstance(call.mask, Mask) else call.mask
    same = call.q_BHTE.shape[2] == call.k_BKTE.shape[2]
    return mask, getattr(call.module, "is_causal", True) and same


def _torchs_own(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Replaces torch's function of this name where the mask is a Mask: [B, H, T, E]. No module comes
    with such a call (Falcon's)."""
    out, _ = attention(None, query, key, value, attn_mask, scaling=scale, dropout=dropout_p)
    return out.transpose(1, 2)


ANSWERED[torch.nn.functional.scaled_dot_product_attention] = _torchs_own
ALL_ATTENTION_FUNCTIONS.register(str(NAME), attention)  # a graph accepts only str itself as a key
ALL_MASK_ATTENTION_FUNCTIONS.register(str(NAME), mask)
