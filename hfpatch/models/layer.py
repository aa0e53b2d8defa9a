"""Any decoder layer, tile by tile where that is exact, else whole: which of the two a call is, and how it goes."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from hfpatch.checkpoint.tiled import tiled_layer
from hfpatch.checkpoint.whole import offloaded_checkpoint
from hfpatch.compat import (
    Standing,
    autocast_dtype,
    collected_now,
    collecting,
    engine_hook,
    forward_hooks,
    fsdp2_units,
    hooks_on_all,
    modules_in,
    other_hooks,
    submodule,
    under_zero3,
    watched_by_user,
)
from hfpatch.memory.cuts import tile_bounds
from hfpatch.memory.policy import KEEPABLE
from hfpatch.models.adapters import TOLD, look
from hfpatch.models.answers import OTHER_MIXER, Answers, as_asked
from hfpatch.models.arguments import Arguments
from hfpatch.models.ask import Ask, keepable
from hfpatch.models.asking import (
    Doubted,
    NotStopped,
    here,
    our_attention,
    standard,
    why_not_causal,
)
from hfpatch.models.classes import other_forward, package_of, replaced_forward
from hfpatch.models.documents import refuse_packed
from hfpatch.models.first_call import ASKED_TOKENS, AskedLayer, without_cache
from hfpatch.models.masks import Batch, Mask
from hfpatch.models.mixers import documents_apart
from hfpatch.models.shared_keys import NAME as SHARED_KEYS
from hfpatch.models.shared_keys import of_its_own
from hfpatch.models.silent import by_tiles, nobody_differentiates
from hfpatch.models.streams import joined, split
from hfpatch.models.written import WrittenOut
from hfpatch.ops.attention import Pattern, supported

_CAPTURING = "transformers.utils.output_capturing"
_NO_MASK = "_attach_context_parallel_hooks."
_RECORDED_INSIDE = ("router_logits",)  # recorded per token by modules behind the attention


def _run_directly(function, *args, **kwargs):
    return function(*args, **kwargs)


class TiledLayer(AskedLayer):
    """Mixed over a decoder layer's class: tile by tile where that is exact, else whole with its input offloaded.

    `_hfpatch_session`: the model's checkpoint.session.Session; `_hfpatch_index`: which of its layers this is.
    """

    @property
    def _gradient_checkpointing_func(self):
        # transformers sets one whenever checkpointing is turned on; the session takes its place.
        return _run_directly

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function):
        vars(self)["_gradient_checkpointing_func"] = function  # theirs again after undo()

    def _weights_near(self, device: torch.device):
        return self._hfpatch_session.weights.forward(self, device)

    def _looked(self) -> "Looked":
        """What this layer's modules say of how it runs: asked again where anything stands in them that did not."""
        session = self._hfpatch_session
        known = session.looked.get(self._hfpatch_index)
        if known is None or not known.things.hold([self, *known.inside], session):
            modules = modules_in(self)
            self._look(modules)
            known = session.looked[self._hfpatch_index] = Looked(
                modules[1:], Standing(modules, session), *look(modules)
            )
            if known.things.tensors():  # what a module noted of its last call would live on
                del session.looked[self._hfpatch_index]
        return known

    def why_not_tiled(self, x: Tensor, mask, looked: "Looked") -> str | None:
        """None where this layer can run tile by tile now, else the reason."""
        answers = self._hfpatch_answers
        if answers.reason:
            return answers.reason
        if looked.mixing is None:
            try:
                mixing = [submodule(self, name) for name in answers.mixing]
            except AttributeError:
                return "other modules in it than at apply()"
            reason = self._why_not_inside(mixing)
            if reason:
                return reason
            looked.mixing = mixing
        mixing = looked.mixing
        for attn in mixing:
            kind = getattr(attn, "_hfpatch_base", type(attn))
            if not as_asked(kind):
                return f"another {kind.__name__}.forward than at apply()"
            dropout = getattr(attn, "attention_dropout", 0.0)
            if self.training and (dropout.p if isinstance(dropout, nn.Dropout) else dropout):
                return "attention dropout"
        if mask is not None:
            for attn in mixing[: len(answers.attention)]:
                reason = why_not_causal(attn, mask)
                if reason:
                    return reason
        dtype = autocast_dtype(x.device.type) or x.dtype
        pattern = mask.pattern(answers.softcap) if isinstance(mask, Mask) else Pattern(softcap=answers.softcap)
        return self.why_no_kernels(x.device, dtype, pattern)

    def _why_not_inside(self, mixing: list[nn.Module]) -> str | None:
        """The same of what stands in its modules, by which tokens meet."""
        for attn in mixing:
            kind = getattr(attn, "_hfpatch_base", type(attn))
            if package_of(attn) != package_of(self):
                return f"a {kind.__module__}.{kind.__name__} in it"
        for name in {n for path in self._hfpatch_answers.mixing for n in _ancestors(path)}:
            module = submodule(self, name)
            if _has_hooks(module):
                return f"hooks on {name}"
            if other_forward(module):
                return f"{name}: {replaced_forward(module)}"
        return None

    def _hooked(self, modules: list[nn.Module]) -> str | None:
        """None where nobody watches what is inside this layer, which has these modules: tiles would show them parts of a row,
        and more often. Nor is FSDP2 to reduce the gradients of one module as those of a tile come: it takes the first alone."""
        inside = modules[1:]
        hooked, units = watched_by_user(inside), fsdp2_units(inside)
        if hooked is None and not units:
            return None
        hooked = units[0] if hooked is None else hooked  # a module that holds others may be empty, and false
        if hooks_on_all():
            return "hooks on every module of the process"
        return f"hooks on {next(n for n, m in self.named_modules() if m is hooked)}"

    def why_no_kernels(self, device: torch.device, dtype: torch.dtype, pattern: Pattern) -> str | None:
        """None where this device has kernels for what its attention asks, else the reason."""
        heads = [getattr(submodule(self, name), "head_dim", 0) or 0 for name in self._hfpatch_answers.attention]
        return supported(max(heads, default=0), dtype, device, pattern)

    def __call__(self, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled() and not hidden_states.requires_grad and self._under_zero3:
            # DeepSpeed reduces a leaf module's gradients in its backward hook, which PyTorch runs before the module's
            # backward where no input wants a gradient (the first layer under LoRA).
            hidden_states = hidden_states.detach().requires_grad_(True)
        return super().__call__(hidden_states, *args, **kwargs)

    def _apply(self, fn, recurse=True):
        with self._hfpatch_session.weights_staying(self, fn):
            return super()._apply(fn, recurse)

    def _takes_whole(self, cache: Cache) -> bool:
        """Whether all keys and values may go into this cache at once, which holds none of this layer yet."""
        answers = self._hfpatch_answers
        indices = [getattr(submodule(self, name), "layer_idx", None) for name in answers.attention]
        if answers.mixers or type(cache) is not DynamicCache or len({*indices} - {None}) != len(answers.attention):
            return False
        return not any(cache.get_seq_length(index) for index in indices)

    def _read(self, x: Tensor, args, kwargs, batch, looked: "Looked") -> tuple:
        """Keys of what this layer takes of earlier ones, found out by a token of its first call."""
        if looked.read is None:
            arguments = Arguments(args, of_its_own(kwargs), *x.shape[:2])
            ask = Ask(self, arguments, self._hfpatch_answers, self._hfpatch_configs, batch)
            rng = torch.random.fork_rng([x.device] if x.device.type == "cuda" else [])
            with rng, torch.no_grad(), collecting({}), self._weights_near(x.device):
                ask.pre(x[:, :1], 0, 1)
            looked.read, looked.leaves = ask.read, bool(ask.left)
        return looked.read

    @property
    def _under_zero3(self) -> bool:
        return under_zero3(self)

    def forward(self, hidden_states, *args, **kwargs):
        try:
            x, session, batch = hidden_states, self._hfpatch_session, here.batch
        except AttributeError:  # bound by somebody (accelerate) who keeps it beyond undo()
            return type(self).forward(self, hidden_states, *args, **kwargs)
        if torch.compiler.is_compiling() or here.role is not None:
            return super().forward(x, *args, **kwargs)
        with session.turn:  # without gradients too: what another thread's backward has under way is not left over
            return self._forward(x, session, batch, args, kwargs)

    def _forward(self, x: Tensor, session, batch: Batch | None, args, kwargs):
        cache, shared = _cache_of(args, kwargs), kwargs.get(SHARED_KEYS)
        if batch is None and not here.declined and kwargs.get("attention_mask") is None and x.dim() == 3:
            # Called by hand: without a mask these take every row for one causal sequence.
            known = {standard(c) for c in self._hfpatch_configs}
            alone = known <= {"sdpa", "flash"} and self._sequence() is None
            batch = Batch(*x.shape[:2], x.device) if alone else None
        looked, sequence = self._looked(), self._sequence() if batch is None else batch.sequence
        modules, given = [self, *looked.inside], x
        if batch is not None and x.dim() == 4 and x.shape[1:3] == (batch.B, batch.t):
            self._hfpatch_streams, x = len(x), joined(x)
        cut = batch is not None and (cache is None or batch.prefill) and x.dim() == 3 and not batch.weights
        cut = cut and x.numel() and (self._hfpatch_answers is not None or x.shape[1] >= ASKED_TOKENS)
        if cut and self._hfpatch_answers is None:
            self._hfpatch_answers = self._ask(x, args, kwargs, batch, modules)
            if self._hfpatch_answers.reason:  # which no report has
                if batch.doubted:
                    self._hfpatch_answers = None
                    raise Doubted
                session.tell(_runs_whole(self, self._hfpatch_answers.reason))
        if sequence is not None:
            self._refuse_parts(x, args, kwargs, batch, modules)
        answers = self._hfpatch_answers or Answers()
        mixes = answers.mixers or answers.reason == OTHER_MIXER
        bounds = batch.apart if batch is not None and mixes else None
        if bounds is not None and not answers.mixers:
            refuse_packed(type(self))

        def whole(h):
            if session.weights.on and not nobody_differentiates(self, h, args, kwargs):
                session.weights.refuse_a_graph(self)
            apart = nullcontext()
            if bounds is not None:
                arguments = Arguments(args, kwargs, *x.shape[:2])
                apart = documents_apart(self, answers.mixers, arguments, self._hfpatch_configs, batch, answers.paired)
            with session.weights.forward(self, h.device), apart:
                return super(TiledLayer, self).forward(h, *args, **kwargs)

        takes = cache is None or (cut and shared is None and self._takes_whole(cache))
        adapter = looked.adapter
        reason = adapter and f"an adapter in it has {adapter}"
        if reason is None and (hooks_on_all() or not looked.unwatched):
            reason = self._hooked(modules)
            looked.unwatched = reason is None
        reason = reason or (self.why_not_tiled(x, kwargs.get("attention_mask"), looked) if cut and takes else "not now")
        if reason is None:
            able = partial(keepable, self, answers, KEEPABLE, x.device.type)
            policy = session.policy(self, x, batch.sequence, able=able)
            if torch.is_grad_enabled() and session.is_plain(self, policy):
                return whole(given)
            records = tuple(key for key in collected_now() if key in _RECORDED_INSIDE)
            if answers.mixing and not answers.block and nobody_differentiates(self, x, args, kwargs):
                with by_tiles(self, answers.mixing, tile_bounds(*x.shape[:2], policy.tile), records):
                    return whole(given)
            lists = collected_now()
            try:
                own = kwargs if shared is None else of_its_own(kwargs, self._read(x, args, kwargs, batch, looked))
                arguments = Arguments(*((args, own) if cache is None else without_cache(args, own)), *x.shape[:2])
                ask = Ask(
                    self, arguments, answers, self._hfpatch_configs, batch, records=records, cache=cache,
                    collected=bool(lists), modules=modules, random=looked.draws, looked=looked,
                    written=WrittenOut(self) if policy.dense else None, leaves=looked.leaves,
                )  # fmt: skip
                with session.weights.forward(self, x.device):
                    y, *extras = tiled_layer(session, policy, ask, x)
            except NotStopped as error:  # a forward that goes other ways than when it was asked
                self._hfpatch_answers = replace(answers, reason=str(error))
                warnings.warn(f"hfpatch: a {type(self).__name__} runs whole from now on: {error}.", stacklevel=4)
                return self.forward(given, *args, **kwargs)
            y = y if self._hfpatch_streams is None else split(y, self._hfpatch_streams)
            return ask.hand_on(y, extras, lists, shared)
        x = given
        if not (self.training and torch.is_grad_enabled()) or kwargs.get("output_attentions") or not x.numel():
            return whole(x)
        if adapter in TOLD and not (getattr(self, "gradient_checkpointing", False) and x.requires_grad):
            # By hooks that PEFT takes away when the model's forward ends, but for gradient_checkpointing; there as the layer's
            # backward begins, where nobody wants the gradient of its input.
            session.tell(f"{type(self).__name__}s run whole and keep everything: {reason}.")
            return whole(x)
        if cut and takes and reason != answers.reason:  # which the report has
            session.tell(_runs_whole(self, reason))
        if cache is not None:  # asked for by the caller; running the layer again would write its keys twice
            beside = "keys and values come with the batch, or are to be kept (prefix tuning, use_cache=True)"
            session.tell(f"{type(self).__name__}s run whole and keep everything: {beside}.")
            return whole(x)
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        policy = session.policy(self, x, sequence, whole=True) if x.dim() == 3 else None
        if policy is not None and session.is_plain(self, policy):
            return whole(x)

        def run(h):
            # Again in backward, when the model's forward has long gone.
            with session.turn, our_attention(self._hfpatch_configs if batch is not None else (), batch):
                return whole(h)

        return offloaded_checkpoint(session, policy, self, kwargs.get("attention_mask"), run, x)


@dataclass(slots=True)
class Looked:
    """What the modules in a layer said of how it runs, and `things`, all that stood in the layer and in them then. Held by the
    session: nothing here holds the layer. mixing: those by which tokens meet, where nothing in them is against tiles; unwatched:
    nobody watches one; direct: the layer as a models.direct.Direct, False where it is none, None where nobody asked yet; places: of
    their tensors (checkpoint/weights.py); read: keys of what it takes of earlier layers, None where that is not known yet; leaves:
    whether later ones take some of it."""

    inside: list
    things: Standing
    adapter: str | None
    draws: bool
    mixing: list | None = None
    unwatched: bool = False
    direct: object = None
    places: object = None
    read: tuple | None = None
    leaves: bool = False


def _runs_whole(layer: nn.Module, reason: str) -> str:
    return f"{type(layer).__name__}s run whole, their inputs offloaded: {reason}."


def _ancestors(path: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches this module, but for what a tiled call serves otherwise: transformers' recorders, and
    accelerate's hooks under context parallelism, which take away a mask."""
    forward = [h for h in forward_hooks(module) if getattr(h, "__module__", None) != _CAPTURING]
    others = [h for h in other_hooks(module) if not getattr(h, "__qualname__", "").startswith(_NO_MASK)]
    return bool(forward or others) or engine_hook(module) is not None


def _cache_of(args, kwargs):
    found = [a for a in (*args, *kwargs.values()) if isinstance(a, Cache)]
    return found[0] if found else None
