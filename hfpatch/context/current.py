"""The thread's state while a patched model runs, the name of our attention in configs, and the
roles of attention.

Attention and the mask are registered in transformers' interfaces (attention.py) under our name. A
model's configs carry that name only while its decoder, or a layer in backward, runs: `config.json`,
other code that reads `config._attn_implementation`, and other models see the user's choice.

    before   Noting: attention records q, k, v and its options, and ends the forward by an exception
    after    Answering: attention returns the tile of the output that was computed for it
    none     attention computes the result itself, for layers that do not run in tiles
"""

import threading
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.attention.attention import CAUSAL, Pattern
from hfpatch.compat import (
    OUR_EXPERTS,
    STANDARD_EXPERTS,
    attention_of,
    attention_row,
    experts_of,
    experts_row,
    ulysses,
    values_for_now,
)
from hfpatch.context.masks import Batch, Mask


class _Name(str):
    """Our attention's name, which compares equal to "sdpa" too.

    Some families check for "sdpa" by name, to derive their own mask (sparse attention) or to call
    torch's function themselves. Under any other name they would skip this silently.
    """

    def __eq__(self, other):
        return isinstance(other, str) and other.__hash__() in (hash("hfpatch"), hash("sdpa"))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


NAME = _Name("hfpatch")


class Stopped(BaseException):
    """Ends a layer's forward at its attention.

    It is a BaseException, so that a layer's `except Exception` does not swallow it.
    """


class NotStopped(RuntimeError):
    """A layer's forward ran past the attention call that should have ended it; the message says
    why.
    """


# The forward around the decoder's. causal: it is a causal model's. embeds: the patched model that runs,
# if it does not return its embeddings. positions: the caller's, which some models drop before their
# layers (Mamba, Bloom). uncached: the caller passed neither a cache nor use_cache.
Outer = namedtuple("Outer", "causal embeds positions uncached", defaults=(False, None, None, False))
# What the loss of the running forward reads: its labels or None; idle_BT: tokens whose outputs it does
# not read, or None; watched: whether other code may read outputs.
Labelled = namedtuple("Labelled", "labels idle_BT watched", defaults=(None, None, False))


class _Current(threading.local):  # a second thread may run another model meanwhile
    # No field has a default in the class: dynamo before torch 2.13 reads that in place of a thread's
    # own value.
    def __init__(self):
        self.role = None  # Noting or Answering
        # Of the decoder's forward that runs, for the mask function.
        self.batch: Batch | None = None
        self.declined = False  # whether the decoder runs with transformers' own code
        self.outer = Outer()
        # The parallel.exchange.RowRanks that share the rows (context/ranks.py); False for no ranks.
        self.row_ranks = None
        # (the model that computes a loss, its labels, whether to shift them, ignore_index)
        self.target = None
        self.labelled = Labelled()
        # Gate and up of a fused MLP, kept from a layer's forward for its backward, so that they are
        # not computed again: (a list that receives them, those that replace the computed ones).
        self.gate_up = (None, None)


current = _Current()


def why_not_causal(module: torch.nn.Module | None, mask) -> str | None:
    """The reason why attention with this mask cannot be tiled, or None. Queries are not checked."""
    if isinstance(mask, Tensor):
        return "an attention mask of the caller's own"
    if isinstance(mask, Mask) and mask.build is not None:
        return "a mask that is neither causal, a window nor chunks"
    return None if getattr(module, "is_causal", True) else "attention that is not causal"


@dataclass
class AttentionCall:
    """One call of attention: q_BHTE, k_BKTE, v_BKTE as the layer passes them, and its options."""

    module: torch.nn.Module | None
    q_BHTE: Tensor
    k_BKTE: Tensor
    v_BKTE: Tensor
    mask: object
    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0
    told: str | None = None  # the name of another input of the family's own attention

    def why_not_tiled(self) -> str | None:
        """None where this call can be tiled, else the reason."""
        if self.dropout:
            return "attention that is called with dropout"
        if self.told:
            return "attention that takes other inputs than q, k, v and a mask"
        if isinstance(self.mask, Tensor):
            return "attention with a mask that its layer makes"
        reason = why_not_causal(self.module, self.mask)
        if reason is None and self.q_BHTE.shape[2] != self.k_BKTE.shape[2]:
            return "queries and keys of different lengths"
        return reason

    def options(self) -> "AttentionOptions":
        return AttentionOptions(self.scale, self.pattern(), self.sinks_H)

    def pattern(self) -> Pattern:
        if isinstance(self.mask, Mask):
            return self.mask.pattern(self.softcap)
        return CAUSAL if self.softcap is None else Pattern(softcap=self.softcap)


@dataclass(frozen=True)
class AttentionOptions:
    """The options of one attention call."""

    scale: float
    pattern: Pattern
    sinks_H: Tensor | None


@dataclass
class Noting:
    """The role before attention: records the attention calls of one forward, and stops it at the last call.

    mixed: (args, kwargs) of each mixer, by name.
    """

    n_calls: int
    calls: list[AttentionCall] = field(default_factory=list)
    mixed: dict[str, tuple] = field(default_factory=dict)

    def _noted(self, answer: Tensor) -> Tensor:
        if len(self.calls) + len(self.mixed) == self.n_calls:
            raise Stopped
        # decoder/probe.py checked that a layer's calls do not depend on each other: any value will
        # do.
        return answer

    def __call__(self, call: AttentionCall):
        self.calls.append(call)
        B, H, T, _ = call.q_BHTE.shape
        return self._noted(call.q_BHTE.new_zeros(()).expand(B, T, H, call.v_BKTE.shape[3]))

    def not_stopped(self) -> NotStopped:
        """The error for a forward that was not stopped."""
        times = len(self.calls) + len(self.mixed)
        if times >= self.n_calls:
            return NotStopped("its forward catches what stops it at its attention (BaseException)")
        return NotStopped(f"its forward mixed tokens {times} times, not {self.n_calls}")

    def mixer(self, name: str, args, kwargs):
        self.mixed[name] = (args, kwargs)
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return self._noted(x.new_zeros(()).expand(x.shape))


@dataclass
class Answering:
    """The role after attention: returns the attention outputs of one forward in order, [B, t, H, E] each,
    and the outputs of mixers, [B, t, D], by name.
    """

    answers: list[Tensor]
    mixed: dict | None = None

    def __call__(self, call: AttentionCall):
        if not self.answers:  # a decoder layer that the user calls with an encoder's states
            raise NotStopped("its forward calls attention more often than in its probe")
        return self.answers.pop(0)

    def mixer(self, name: str, args, kwargs):
        return self.mixed[name]


@contextmanager
def having(**values):
    """A context in which `current` has these values, for this thread."""
    here = vars(current)
    before = here.copy()
    try:
        here.update(values)
        yield
    finally:
        here.update(before)


def refuse_in_the_midst() -> None:
    """Raises RuntimeError where this thread runs a patched decoder's forward or a layer's backward.
    A forward that a hook or a signal's handler calls there would meet the outer one's state.
    """
    if current.batch is not None or current.declined or current.role is not None:
        raise RuntimeError(
            "hfpatch: a patched model cannot run again inside its own forward (from a hook or a "
            "signal handler). Set a flag there, and run the model between steps."
        )


def asks_for(name: str, model, kwargs) -> bool:
    """Whether the caller, or else the model's config, asks for a forward's further outputs
    (output_hidden_states and its like)."""
    asked = kwargs.get(name)
    return bool(getattr(model.config, name, False) if asked is None else asked)


@contextmanager
def in_role(role):
    """A context in which layers meet `role` at their attention."""
    with having(role=role):
        yield role


def not_exchanged(what: str) -> ValueError:
    """The error for a forward that would take a rank's part of each row for the whole row."""
    return ValueError(
        f"hfpatch: {what} does not work while ranks share a sequence. Leave it out, or train "
        "without sequence parallelism."
    )


# --- which configs name our attention now ---------------------------------------------------------


# What a config names itself: its attention, or None; its experts implementation, "" without one.
Named = namedtuple("Named", "attention experts")
_borrowed: dict[int, Named] = {}  # by id(config), while the config names ours


def named(config) -> Named:
    """What a config names when ours is not entered."""
    return _borrowed.get(id(config)) or Named(attention_of(config), experts_of(config))


def our_attention(configs, batch: Batch | None):
    """A context in which the configs name our attention, and masks describe `batch`.

    Contexts end in the reverse order of their beginning: the model's lock lets one thread in.
    """
    rows = [(vars(current), "batch", batch)]
    for config in configs:
        own = named(config)
        rows.append((_borrowed, id(config), own))
        rows.append(attention_row(config, NAME))
        if own.experts in STANDARD_EXPERTS:
            rows.append(experts_row(config, OUR_EXPERTS))
    return values_for_now(rows)


def experts_as_named(module: torch.nn.Module, *args) -> Tensor:
    """The forward of fused experts by the implementation that their config names."""
    config = module.config
    with values_for_now([experts_row(config, named(config).experts)]):
        return type(module).forward(module, *args)


def standard(config) -> str | None:
    """The kind of transformers' own attention that a config names: eager, sdpa, flex_attention or
    flash. Ours can replace each of them.

    None for other names, and for one of these names where another function is registered, which may
    read tokens that this process does not have. One function serves every version of FlashAttention
    and its kernels on the hub, which are named by their repository.
    """
    name = named(config).attention or ""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    by_engine = ulysses(function) is not None  # see ranks.row_ranks_now
    if name in ("eager", "sdpa", "flex_attention"):
        theirs = function is None or function.__module__.startswith("transformers.")
        return name if theirs or by_engine else None
    flash = function is flash_attention_forward or by_engine and "flash" in name
    return "flash" if flash else None
