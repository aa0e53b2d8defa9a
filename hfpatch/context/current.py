"""The attention and the mask that a patched model's layers meet, and the three ways in which a
layer is asked.

Both are registered in transformers' interfaces (attention.py) under our name, which a model's
configs carry only while its decoder (or a layer in backward) runs: `config.json`, other code that
reads `config._attn_implementation`, and other models see the user's choice.

    pre     Noting: attention notes q, k, v and what was asked of it, and stops the layer's forward with an exception
    post    Answering: attention answers with the tile of the output that it is given
    whole   neither: attention computes itself, for layers that do not run tile by tile
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.attention.attention import CAUSAL, Pattern
from hfpatch.compat import (
    OUR_EXPERTS,
    STANDARD_EXPERTS,
    attention_of,
    experts_of,
    name_attention,
    name_experts,
    ulysses,
)
from hfpatch.context.masks import Batch, Mask


class _Name(str):
    """Our attention's name. Code of a family that asks for "sdpa" by name, to make its own of the
    mask (sparse attention) or to call torch's function itself, does so under ours as well: it would
    leave that out without a word.
    """

    def __eq__(self, other):
        return isinstance(other, str) and other.__hash__() in (hash("hfpatch"), hash("sdpa"))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


NAME = _Name("hfpatch")


class Stopped(BaseException):
    """Ends a layer's forward at its attention. Not an Exception: code that catches those must not
    swallow it.
    """


class NotStopped(RuntimeError):
    """A layer's forward went on beyond the attention that it was asked for; its message says
    why.
    """


class _Current(threading.local):
    role = None  # Noting or Answering
    batch: Batch | None = None  # what the mask function describes
    declined = False  # whether the stack around runs as transformers has it
    causal = False  # whether a causal model's own forward runs around this one
    embeds = None  # the patched model whose forward runs, where that hands nobody what it embedded
    # What its caller said: some models drop positions before their layers (Mamba, Bloom).
    positions: Tensor | None = None
    uncached = False  # whether it asked for no cache, nor against one
    # parallel.exchange.Sequence that the caller says shares rows (context/ranks.py)
    sequence = None
    # The model that is asked for a loss, its labels, whether they are to be shifted, their count.
    target: tuple | None = None
    labels: Tensor | None = None  # that the forward under way computes the loss of
    balance = None  # context.router_balance.Counted, where a causal model's loss is computed
    # of the experts that are called: a parameter's name -> the factors of its adapters
    factors: dict | None = None
    # tokens whose output the loss does not read, where a loss is all that is asked for
    idle_BT: Tensor | None = None


current = _Current()


def why_not_causal(module: torch.nn.Module, mask) -> str | None:
    """None where attention with this mask can be tiled, whatever its queries are, else the
    reason.
    """
    if isinstance(mask, Tensor):
        return "an attention mask of the caller's own"
    if isinstance(mask, Mask) and mask.build is not None:
        return "a mask that is neither causal, a window nor chunks"
    return None if getattr(module, "is_causal", True) else "attention that is not causal"


@dataclass
class Asked:
    """One call of attention: q_BHTE, k_BKTE, v_BKTE as the layer passes them, and what it asks
    for.
    """

    module: torch.nn.Module
    q_BHTE: Tensor
    k_BKTE: Tensor
    v_BKTE: Tensor
    mask: object
    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    dropout: float = 0.0
    told: str | None = None  # what else the family's own attention takes

    def why_not_tiled(self) -> str | None:
        """None where this call can be tiled, else the reason."""
        if self.dropout:
            return "attention dropout"
        if self.told:
            return f"attention that takes a {self.told}"
        if isinstance(self.mask, Tensor):
            return "attention with a mask that its layer makes"
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
    """pre: keeps the calls of one forward, which ends at the last of them. mixed: (args, kwargs) of
    each mixer, by name.
    """

    def __init__(self, n_calls: int):
        self.n_calls, self.calls, self.mixed = n_calls, [], {}

    def _noted(self, answer: Tensor) -> Tensor:
        if len(self.calls) + len(self.mixed) == self.n_calls:
            raise Stopped
        # The calls of a layer do not depend on each other (decoder/probe.py saw to it): any answer
        # does.
        return answer

    def __call__(self, asked: Asked):
        self.calls.append(asked)
        q, v = asked.q_BHTE, asked.v_BKTE
        return self._noted(q.new_zeros(()).expand(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))

    def not_stopped(self) -> NotStopped:
        """What ends a forward that came to its end."""
        came = len(self.calls) + len(self.mixed)
        return NotStopped(
            "its forward catches what stops it at its attention (BaseException)"
            if came >= self.n_calls
            else f"its forward mixed tokens {came} times, not {self.n_calls}"
        )

    def mixer(self, name: str, args, kwargs):
        self.mixed[name] = (args, kwargs)
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return self._noted(x.new_zeros(()).expand(x.shape))


class Answering:
    """post: gives the calls of one forward their answers, [B, t, H, E] each, in order; mixers
    theirs, [B, t, D], by name.
    """

    def __init__(self, answers: list[Tensor], mixed: dict | None = None):
        self.answers, self.mixed = list(answers), mixed

    def __call__(self, asked: Asked):
        if not self.answers:  # a decoder layer called by hand, with an encoder's states
            raise NotStopped("its forward calls attention more often than it did when it was asked")
        return self.answers.pop(0)

    def mixer(self, name: str, args, kwargs):
        return self.mixed[name]


@contextmanager
def having(**values):
    """Within, `current` has these values for this thread."""
    here = vars(current)
    before = here.copy()
    try:
        here.update(values)
        yield
    finally:
        here.clear()  # a field that is not there has its class's value
        here.update(before)


def in_the_midst() -> bool:
    """Whether a patched decoder's forward, or a layer's backward, is under way in this thread."""
    return current.batch is not None or current.declined or current.role is not None


@contextmanager
def on_its_own():
    """Within, a forward knows nothing of the one in whose midst it is called (by a hook, or a
    signal's handler).

    RuntimeError in the midst of a tile, whose layer's modules do not go their ordinary ways.
    """
    if current.role is not None:
        raise RuntimeError(
            "hfpatch: expected no other forward in the midst of a layer's tile, one came (from a "
            "signal's handler?); have the "
            "handler set a flag, and run the model between steps."
        )
    before, sequence = dict(vars(current)), current.sequence
    vars(current).clear()
    current.sequence = sequence
    try:
        yield
    finally:
        vars(current).clear()
        vars(current).update(before)


def asks_for_hidden_states(model, kwargs) -> bool:
    """Whether the caller of this model's forward is to have its hidden states."""
    asked = kwargs.get("output_hidden_states")
    return bool(getattr(model.config, "output_hidden_states", False) if asked is None else asked)


@contextmanager
def asking(role):
    """Layers that run here meet `role` at their attention."""
    before, current.role = current.role, role
    try:
        yield role
    finally:
        current.role = before


def not_exchanged(what: str) -> ValueError:
    """What ends a forward that would take a rank's part of each row for the whole."""
    return ValueError(
        "hfpatch: expected attention that can be exchanged between the ranks of a sequence, "
        f"{what} came; "
        "leave it out, or train without sequence parallelism."
    )


# --- which configs name our attention now ---------------------------------------------------------

# id(config): [the config, the attention that it named before, how many contexts name ours, the
# experts that it named before]
_entered: dict = {}


@contextmanager
def our_attention(configs, batch: Batch | None):
    """Within, the configs name our attention, and masks describe `batch`."""
    before, entered = current.batch, []
    try:
        current.batch = batch
        for config in configs:
            entry = _entered.setdefault(
                id(config), [config, attention_of(config), 0, experts_of(config)]
            )
            entry[2] += 1
            entered.append(config)
            name_attention(config, NAME)
            if entry[3] in STANDARD_EXPERTS:
                name_experts(config, OUR_EXPERTS)
        yield
    finally:
        current.batch = before
        try:
            for config in entered:
                _leave(config)
        except (
            BaseException
        ):  # Ctrl-C in the midst of it, which ends every context around this one too
            for config in entered:
                _leave(config, wholly=True)
            raise


def _leave(config, wholly: bool = False) -> None:
    """One context less in which a config names our attention, or none left."""
    entry = _entered.get(id(config))
    if entry is None:
        return
    entry[2] -= 1
    if wholly or entry[2] <= 0:
        name_attention(config, entry[1])
        if entry[3] in STANDARD_EXPERTS:
            name_experts(config, entry[3])
        _entered.pop(id(config), None)


def unnamed(configs) -> bool:
    """Whether a forward with our attention is under way, and these configs do not name it: of a
    layer that came later.
    """
    return current.batch is not None and any(id(config) not in _entered for config in configs)


def named(config) -> str | None:
    """The attention that a config names outside of ours."""
    entry = _entered.get(id(config))
    return attention_of(config) if entry is None else entry[1]


def named_experts(config) -> str | None:
    """What runs the experts of this config outside of ours; "" where it says nothing."""
    entry = _entered.get(id(config))
    return experts_of(config) if entry is None else entry[3]


def with_experts(name: str | None, config, forward, *args) -> Tensor:
    """forward(*args) of fused experts, whose config names this meanwhile."""
    now = experts_of(config)
    name_experts(config, name)
    try:
        return forward(*args)
    finally:
        name_experts(config, now)


def standard(config) -> str | None:
    """Which of transformers' own attentions, for all of which ours may stand, a config names:
    eager, sdpa, flex_attention or flash; None for another, or for one of these names under which
    somebody registered a function that may see tokens which this process does not have. Each
    version of FlashAttention, and its kernels on the hub under the name of their repository, are
    called by one function.
    """
    name = named(config) or ""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    theirs = function is None or function.__module__.startswith("transformers.")
    by_engine = not theirs and ulysses(function) is not None  # ranks.sequence_now says what it does
    if name in ("eager", "sdpa", "flex_attention"):
        return name if theirs or by_engine else None
    flash = function is flash_attention_forward or by_engine and "flash" in name
    return "flash" if flash else None
