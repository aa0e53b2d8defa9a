"""The attention and the mask that a patched model's layers meet, and the three ways in which a layer is asked.

Both are registered in transformers' interfaces under our name, which a model's configs carry only while its decoder (or a layer
in backward) runs: `config.json`, other code that reads `config._attn_implementation`, and other models see the user's choice.

    pre     Noting: attention notes q, k, v and what was asked of it, and stops the layer's forward with an exception
    post    Answering: attention answers with the tile of the output that it is given
    whole   neither: attention computes itself, for layers that do not run tile by tile
"""

import inspect
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.checkpoint.exchange import ExchangedAttention
from hfpatch.compat import attention_of, autocast_dtype, name_attention, ulysses
from hfpatch.models.masks import ANSWERED, Batch, Mask, describe
from hfpatch.ops._library import one_gradient
from hfpatch.ops.attention import CAUSAL, Pattern, attention_backward, attention_forward, pick, supported


class _Name(str):
    """Our attention's name. Code of a family that asks for "sdpa" by name, to make its own of the mask (sparse attention) or to
    call torch's function itself, does so under ours as well: it would leave that out without a word."""

    def __eq__(self, other):
        return isinstance(other, str) and other.__hash__() in (hash("hfpatch"), hash("sdpa"))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


NAME = _Name("hfpatch")
CAUSAL_NAME = "hfpatch_causal"  # in a compiled graph: no mask function goes with it, so no mask is built


class Stopped(BaseException):
    """Ends a layer's forward at its attention. Not an Exception: code that catches those must not swallow it."""


class NotStopped(RuntimeError):
    """A layer's forward came to its end where it was to be stopped; its message says why."""

    def __init__(self, note: "Noting"):
        came = len(note.calls) + len(note.mixed)
        super().__init__(
            "its forward catches what stops it at its attention (BaseException)"
            if came >= note.n_calls
            else f"its forward mixed tokens {came} times, not {note.n_calls}"
        )


class Doubted(Exception):
    """Ends a forward without a verdict at a layer that cannot be tiled, to see first whether its model can have our masks."""


class _Here(threading.local):
    role = None  # Noting or Answering
    batch: Batch | None = None  # what the mask function describes
    declined = False  # whether the stack around runs as transformers has it
    causal = False  # whether a causal model's own forward runs around this one
    embeds = None  # the patched model whose forward runs, where that hands nobody what it embedded
    # What its caller said: some models drop positions before their layers (Mamba, Bloom).
    positions: Tensor | None = None
    uncached = False  # whether it asked for no cache, nor against one
    sequence = None  # checkpoint.exchange.Sequence that the caller says shares rows (models/parallel.py)
    # The model that is asked for a loss, its labels, whether they are to be shifted, their count.
    target: tuple | None = None
    labels: Tensor | None = None  # that the forward under way computes the loss of
    balance = None  # models.balance.Counted, where a causal model's loss is computed
    idle_BT: Tensor | None = None  # tokens whose output the loss does not read, where a loss is all that is asked for


here = _Here()


def why_not_causal(module: torch.nn.Module, mask) -> str | None:
    """None where attention with this mask can be tiled, whatever its queries are, else the reason."""
    if isinstance(mask, Tensor):
        return "an attention mask of the caller's own"
    if isinstance(mask, Mask) and mask.build is not None:
        return "a mask that is neither causal, a window nor chunks"
    return None if getattr(module, "is_causal", True) else "attention that is not causal"


@dataclass
class Asked:
    """One call of attention: q_BHTE, k_BKTE, v_BKTE as the layer passes them, and what it asks for."""

    module: torch.nn.Module
    q_BHTE: Tensor
    k_BKTE: Tensor
    v_BKTE: Tensor
    mask: object
    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0

    def why_not_tiled(self) -> str | None:
        """None where this call can be tiled, else the reason."""
        if self.dropout:
            return "attention dropout"
        reason = why_not_causal(self.module, self.mask)
        if reason is None and self.q_BHTE.shape[2] != self.k_BKTE.shape[2]:
            return "queries and keys of different lengths"
        return reason

    def call(self) -> "Call":
        return Call(self.scale, self.pattern(), self.sinks_H)

    def pattern(self) -> Pattern:
        if isinstance(self.mask, Mask):
            return self.mask.pattern(self.softcap)
        return CAUSAL if self.softcap is None else Pattern(softcap=self.softcap)


@dataclass(frozen=True)
class Call:
    """What one call of attention was asked for."""

    scale: float
    pattern: Pattern
    sinks_H: Tensor | None


class Noting:
    """pre: keeps the calls of one forward, which ends at the last of them. mixed: (args, kwargs) of each mixer, by name."""

    def __init__(self, n_calls: int):
        self.n_calls, self.calls, self.mixed = n_calls, [], {}

    def _noted(self, answer: Tensor) -> Tensor:
        if len(self.calls) + len(self.mixed) == self.n_calls:
            raise Stopped
        # The calls of a layer do not depend on each other (models/probe.py saw to it): any answer does.
        return answer

    def __call__(self, asked: Asked):
        self.calls.append(asked)
        q, v = asked.q_BHTE, asked.v_BKTE
        return self._noted(q.new_zeros(()).expand(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))

    def mixer(self, name: str, args, kwargs):
        self.mixed[name] = (args, kwargs)
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return self._noted(x.new_zeros(()).expand(x.shape))


class Answering:
    """post: gives the calls of one forward their answers, [B, t, H, E] each, in order; mixers theirs, [B, t, D], by name."""

    def __init__(self, answers: list[Tensor], mixed: dict | None = None):
        self.answers, self.mixed = list(answers), mixed

    def __call__(self, asked: Asked):
        return self.answers.pop(0)

    def mixer(self, name: str, args, kwargs):
        return self.mixed[name]


@contextmanager
def having(**values):
    """Within, `here` has these values for this thread."""
    before = {name: getattr(here, name) for name in values}
    for name, value in values.items():
        setattr(here, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(here, name, value)


def asks_for_hidden_states(model, kwargs) -> bool:
    """Whether the caller of this model's forward is to have its hidden states."""
    asked = kwargs.get("output_hidden_states")
    return bool(getattr(model.config, "output_hidden_states", False) if asked is None else asked)


@contextmanager
def asking(role):
    """Layers that run here meet `role` at their attention."""
    before, here.role = here.role, role
    try:
        yield role
    finally:
        here.role = before


def not_exchanged(what: str) -> ValueError:
    """What ends a forward that would take a rank's part of each row for the whole."""
    return ValueError(
        f"hfpatch: expected attention that can be exchanged between the ranks of a sequence, {what} came; "
        "leave it out, or train without sequence parallelism."
    )


# --- which configs name our attention now -----------------------------------------------------------------------------

_entered: dict = {}  # id(config): [how many, what it named before]
_lock = threading.Lock()


@contextmanager
def our_attention(configs, batch: Batch | None):
    """Within, the configs name our attention, and masks describe `batch`."""
    before, here.batch = here.batch, batch
    with _lock:
        for config in configs:
            before_it = name_attention(config, NAME)
            entry = _entered.setdefault(id(config), [0, before_it])
            entry[0] += 1
    try:
        yield
    finally:
        here.batch = before
        with _lock:
            for config in configs:
                entry = _entered[id(config)]
                entry[0] -= 1
                if not entry[0]:
                    name_attention(config, _entered.pop(id(config))[1])


def unnamed(configs) -> bool:
    """Whether a forward with our attention is under way, and these configs do not name it: of a layer that came later."""
    return here.batch is not None and any(id(config) not in _entered for config in configs)


def _of_another_thread(config) -> str | None:
    """The attention that this thread's forward is to have, where the config names ours for another thread's; else None."""
    return named(config) if here.batch is None and here.role is None and id(config) in _entered else None


def named(config) -> str | None:
    """The attention that a config names outside of ours, whatever another thread runs at the moment."""
    with _lock:
        entry = _entered.get(id(config))
        return attention_of(config) if entry is None else entry[1]


def standard(config) -> str | None:
    """Which of transformers' own attentions, for all of which ours may stand, a config names: eager, sdpa, flex_attention or flash;
    None for another. Each version of FlashAttention, and its kernels on the hub under the name of their repository, are called
    by one function."""
    name = named(config) or ""
    if name in ("eager", "sdpa", "flex_attention"):
        return name
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return "flash" if function is flash_attention_forward or ("flash" in name and ulysses(function)) else None


# --- what is registered -----------------------------------------------------------------------------------------------


def mask(batch_size, kv_length, mask_function=None, q_length=None, kv_offset=0, attention_mask=None, local_size=None,
         use_vmap=False, device=None, **kwargs):  # fmt: skip
    """A Mask. Keywords are those that transformers passes to its own mask functions."""
    given = {"q_length": q_length, "local_size": local_size, "device": device}
    given = {name: x for name, x in given.items() if x is not None} | kwargs
    given |= {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
    }
    given |= {"mask_function": mask_function, "use_vmap": use_vmap}
    batch, theirs = here.batch, _of_another_thread(kwargs.get("config"))
    if theirs in ALL_MASK_ATTENTION_FUNCTIONS:
        return ALL_MASK_ATTENTION_FUNCTIONS[theirs](**given)
    if batch is None:  # a model of somebody else's: what it says is all there is
        batch = Batch(batch_size, kv_length, device or torch.device("cpu"), attention_mask)
    if use_vmap:
        given["mask_function"] = batch.within_documents(mask_function)
    kind = None
    if not use_vmap and kv_length == batch.t and not kv_offset:
        kind = describe(mask_function, batch.T, local_size, batch.device)
    added = kwargs.get("dtype") if "config" in kwargs and named(kwargs["config"]) == "eager" else None
    if kind is None:
        given["allow_is_causal_skip"] = False
        return Mask(batch, build=lambda: ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given), added=added)
    return Mask(batch, added=added, **({} if kind[0] == "causal" else {kind[0]: kind[1]}))


def attention(
    module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs
):
    """What layers call: ([B, T, H, E], None). The window is the mask's, as in transformers' own eager and sdpa functions."""
    theirs = _of_another_thread(getattr(module, "config", None))
    extra = {name: x for name, x in {"softcap": softcap, "s_aux": s_aux}.items() if x is not None}
    if theirs is not None:
        function, kwargs = ALL_ATTENTION_FUNCTIONS.get(theirs) or _own_eager(module), kwargs | extra
        return function(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if attention_mask is None and here.batch is not None and here.batch.sequence is not None:
        attention_mask = Mask(here.batch)  # accelerate's hooks take masks away; models with windows it refuses
    asked = Asked(
        module, query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux,
        dropout if module.training else 0.0,
    )  # fmt: skip
    if here.role is None and here.batch is not None and here.batch.weights:
        function = _own_eager(module)  # families differ in what they call weights (sinks)
        if function is None:
            return _eager(asked)
        mask = _whole_mask(asked)
        if mask is not None and mask.dtype == torch.bool:
            mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
        return function(module, query, key, value, mask, scaling=asked.scale, dropout=dropout, **kwargs, **extra)
    return (_whole(asked) if here.role is None else here.role(asked)), None


def _own_eager(module):
    """The eager attention in the file of this module's class; None where it has none."""
    own = inspect.unwrap(getattr(module, "_hfpatch_base", type(module)).forward)
    return own.__globals__.get("eager_attention_forward")


class _Attention(torch.autograd.Function):
    """The two directions of ops/attention.py for a layer that is not tiled."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, asked, backend):
        out, lse, state = attention_forward(q, k, v, **asked, sinks_H=sinks, backend=backend)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.asked, ctx.state, ctx.backend = asked, state, backend
        return out

    @staticmethod
    @one_gradient
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grads = attention_backward(dout, q, k, v, out, lse, ctx.state, **ctx.asked, sinks_H=sinks, backend=ctx.backend)
        return *grads, *(None,) * (6 - len(grads))


class _Exchanged(torch.autograd.Function):
    """Attention over rows that several ranks share, for a layer that is not tiled."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, call, sequence):
        ctx.attention = ExchangedAttention(sequence)
        outs, lses = ctx.attention.forward([call], [], [q, k, v])
        ctx.save_for_backward(q, k, v, *outs, *lses)
        return ctx.attention.join(outs)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, *kept = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        lses = kept[len(kept) // 2 :]
        dsinks = ctx.attention.backward([q, k, v], [dout], kept.__getitem__, lses, grads)
        return *grads, *dsinks, None, None


def _whole(asked: Asked) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (asked.q_BHTE, asked.k_BKTE, asked.v_BKTE))
    cast = autocast_dtype(q.device.type)
    if cast is not None and q.dtype != torch.float64:
        q, k, v = (x.to(cast) for x in (q, k, v))
    sequence, reason = here.batch and here.batch.sequence, asked.why_not_tiled()
    if sequence is not None:
        if reason:
            raise not_exchanged(reason)
        return _Exchanged.apply(q, k, v, asked.sinks_H, asked.call(), sequence)
    if reason is None:
        pattern = asked.pattern()
        unsupported = supported(max(q.shape[3], v.shape[3]), q.dtype, q.device, pattern)
        backend = "blocks" if unsupported else pick(q, k)
        return _Attention.apply(q, k, v, asked.sinks_H, {"scale": asked.scale, "pattern": pattern}, backend)
    return _plain(asked)


def _plain(asked: Asked) -> Tensor:
    """With a whole mask, or dropout, as transformers' own functions do it."""
    q, k, v = asked.q_BHTE, asked.k_BKTE, asked.v_BKTE
    mask, causal = _mask_and_causal(asked)
    if asked.softcap is None and asked.sinks_H is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            asked.dropout,
            causal and mask is None,
            scale=asked.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).contiguous()
    return _eager(asked)[0]


def _mask_and_causal(asked: Asked) -> tuple[Tensor | None, bool]:
    """The whole mask, where one says more than causality, and whether the call is causal without one."""
    mask = asked.mask.dense() if isinstance(asked.mask, Mask) else asked.mask
    same = asked.q_BHTE.shape[2] == asked.k_BKTE.shape[2]
    return mask, getattr(asked.module, "is_causal", True) and same


def _whole_mask(asked: Asked) -> Tensor | None:
    """The whole mask, a causal one's too."""
    mask, causal = _mask_and_causal(asked)
    if mask is None and causal:
        T = asked.q_BHTE.shape[2]
        mask = torch.ones(T, T, dtype=torch.bool, device=asked.q_BHTE.device).tril()
    return mask


def _eager(asked: Asked) -> tuple[Tensor, Tensor]:
    """(out, probabilities [B, H, T, T]) with all scores at once, as transformers' eager functions have it."""
    q, k, v = asked.q_BHTE, asked.k_BKTE, asked.v_BKTE
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * asked.scale
    if asked.softcap is not None:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    mask = _whole_mask(asked)
    if mask is not None:
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    if asked.sinks_H is not None:
        scores = torch.cat([scores, asked.sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    p = torch.nn.functional.dropout(p[..., : k.shape[2]], asked.dropout)
    return (p @ v).transpose(1, 2).contiguous(), p


def causal_attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
    """Every row one causal sequence, in torch's own attention: ([B, T, H, E], None)."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def _torchs_own(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """For torch's function of this name with a Mask of ours: [B, H, T, E]."""
    frame, module = sys._getframe(1), None  # torch's function is not told whose attention it is
    while not isinstance(module, torch.nn.Module):
        module, frame = frame.f_locals.get("self"), frame.f_back
    return attention(module, query, key, value, attn_mask, scaling=scale, dropout=dropout_p)[0].transpose(1, 2)


ANSWERED[torch.nn.functional.scaled_dot_product_attention] = _torchs_own
ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_ATTENTION_FUNCTIONS.register(CAUSAL_NAME, causal_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
