"""A decoder layer that is asked, at its first call, what no verdict said of it (models/probe.py), and refused where ranks share
rows and its tokens meet by something that they do not exchange.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hfpatch.compat import MADE_FROM, collecting, forward_in, modules_in, pytree, settings_of, unwatched
from hfpatch.models.answers import BY_PLACE, OTHER_MIXER, Answers
from hfpatch.models.arguments import Arguments
from hfpatch.models.asking import here, not_exchanged, our_attention, unnamed
from hfpatch.models.classes import IS_USERS
from hfpatch.models.masks import Batch, Mask
from hfpatch.models.parallel import refuse_shared_mixers, refuse_unless_by_engine, sequence_now
from hfpatch.models.scaled import held_in
from hfpatch.models.streams import by_rows

ASKED_TOKENS = 12  # of a batch, where a layer is asked at its first call


class AskedLayer:
    """Mixed over a decoder layer's class where it runs as transformers has it.

    `_hfpatch_answers`: its kind's Answers, None where it is to be asked at its first call, by `_hfpatch_asks`
    (models.probe.ask_layer); `_hfpatch_held`: what is in it (scaled.held_in), `_hfpatch_first`: that and its answers at apply();
    `_hfpatch_kinds`, `_hfpatch_set`: numbers that stand for all code in it, and for the settings of the user's modules;
    `_hfpatch_configs`: those that what is in it reads; `_hfpatch_streams`: how many its hidden states have (streams.py), or None.
    """

    _hfpatch_kinds = _hfpatch_held = _hfpatch_set = _hfpatch_streams = None

    def _look(self, modules: list[nn.Module]) -> None:
        """Has this layer asked anew where it got other modules or forwards since it was asked."""
        now, settings = [], []
        for module in modules:  # at every call of a layer: without one of Python's where there is nothing to see
            kind = MADE_FROM[module.__class__]
            now += (module.__class__, kind.forward)
            if "forward" in module.__dict__:
                now += (module, id(forward_in(module.__dict__)))
            if IS_USERS[kind]:
                settings += settings_of(module.__dict__)
        kinds, settings = hash(tuple(now)), hash(tuple(settings)) if settings else None
        if kinds != self._hfpatch_kinds:
            held = held_in(self)
            if held != (self._hfpatch_held or held):
                at_apply, answers = self._hfpatch_first
                if held != at_apply and answers is not None:
                    # Why a verdict had it run whole stays true; of what mixes its tokens now nothing is known.
                    answers = replace(answers, looked=False) if answers.reason else None
                self._hfpatch_answers = answers
            self._hfpatch_kinds, self._hfpatch_held, self._hfpatch_set = kinds, held, settings
        elif settings != self._hfpatch_set and self._hfpatch_answers and not self._hfpatch_answers.reason:
            self._hfpatch_answers, self._hfpatch_set = None, settings  # a switch, or a share that grows from nothing

    def stock_forward(self, *args, **kwargs):
        """The layer as transformers has it, from rows to rows."""
        return by_rows(super().forward, self._hfpatch_streams)(*args, **kwargs)

    def _weights_near(self, device: torch.device):
        """Within, its weights are on the device."""
        return nullcontext()

    def _sequence(self):
        """The ranks that share the rows of a forward whose batch nobody knows."""
        return next((s for c in self._hfpatch_configs if (s := sequence_now(c, self.training))), None)

    def _ask(self, x_BtD: Tensor, args, kwargs, batch: Batch | None, modules: list[nn.Module]) -> Answers:
        """What it answers to the first tokens of a call."""
        if batch is None:  # transformers' own mask tells of whole rows
            batch, kwargs = Batch(*x_BtD.shape[:2], x_BtD.device), {**kwargs, "attention_mask": None}
        given = Arguments(*without_cache(args, kwargs), *x_BtD.shape[:2])
        # Where a rank has fewer, some more than once.
        at = torch.arange(ASKED_TOKENS, device=x_BtD.device) % x_BtD.shape[1]
        few = [
            x if axis is None else x.index_select(axis, at.to(x.device)) for x, axis in zip(given.leaves, given.axes)
        ]
        few_args, few_kwargs = pytree().tree_unflatten(few, given.spec)
        # What the layer records while it is asked (router logits), or saves for backward under somebody's checkpointing, is no
        # part of this forward.
        own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with self._weights_near(x_BtD.device), collecting({}), unwatched(modules), own:
            x_BtD = x_BtD.index_select(1, at)
            return self._hfpatch_asks(
                self, self.stock_forward, x_BtD, few_args, few_kwargs, self._hfpatch_configs, batch
            )

    def _refuse_parts(self, x: Tensor, args, kwargs, batch: Batch | None, modules: list[nn.Module]) -> None:
        """ValueError where tokens meet in this layer, or may, by more than attention that the ranks which share rows exchange."""
        if batch is None and not here.declined:  # called by hand
            if isinstance(kwargs.get("attention_mask"), Mask):
                raise not_exchanged("a layer that runs again after its model's forward")
            for config in self._hfpatch_configs:
                refuse_unless_by_engine(config)
        known = self._hfpatch_answers
        if known is None or not known.looked:
            asked = Answers(reason=f"hidden states {list(x.shape)}")
            if x.dim() == 3 and x.numel():
                asked = self._ask(x, args, kwargs, batch, modules)
            if asked.looked:
                reason = asked.reason or (known and known.reason)
                self._hfpatch_answers = replace(asked, reason=reason)
            known = asked
        mixes = known.mixers and not known.attends
        if mixes or known.reason in (OTHER_MIXER, BY_PLACE) or not known.looked:
            refuse_shared_mixers(type(self), None if known.looked else known.reason)

    def forward(self, hidden_states, *args, **kwargs):
        if not isinstance(self, AskedLayer):  # bound by somebody (accelerate) who keeps it beyond undo()
            return type(self).forward(self, hidden_states, *args, **kwargs)
        if not torch.compiler.is_compiling() and here.role is None:
            sequence = self._sequence() if here.batch is None else here.batch.sequence
            if sequence is not None:
                modules = modules_in(self)
                self._look(modules)
                self._refuse_parts(hidden_states, args, kwargs, here.batch, modules)
            if unnamed(self._hfpatch_configs):
                with our_attention(self._hfpatch_configs, here.batch):
                    return super().forward(hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)


def without_cache(args, kwargs) -> tuple[list, dict]:
    return [None if isinstance(a, Cache) else a for a in args], {
        n: None if isinstance(a, Cache) else a for n, a in kwargs.items()
    }
