"""Why a layer runs untiled: the one ordered list.

Tiles must not change a number, nor what a hook is given. Where they might, the layer runs untiled,
its input offloaded; where it cannot run again in backward, it keeps everything. The first reason of
`REASONS` that holds decides. It is asked in five stages, each when its facts are known:

    apply    the layer's small instance differed (decoder/probe.py, decoder/verdict.py)
    layer    modules, hooks and adapters in the layer, after each change of them (condition.py)
    forward  the mode and the process, once in each forward of the stack (condition.py)
    batch    the arguments of the stack's forward: all its layers run untiled (decoder/batch.py).
             They then see no batch, which for `call` is "not described", and nothing more is said
    call     the arguments of this layer's call (layer.py)

For a rare case add a row; write no special code path. docs/internals/untiled.md is made from this list.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers.cache_utils import Cache

from hfpatch.compat import (
    MADE_FROM,
    engine_hook,
    forward_hooks,
    hooks_on_all,
    in_fsdp2,
    other_hooks,
    split_by_hooks,
    watched_by_user,
)
from hfpatch.context.class_code import as_probed
from hfpatch.context.classes import other_forward, package_of, replaced_forward
from hfpatch.context.current import named, standard, why_not_causal
from hfpatch.layer.arguments import other_argument
from hfpatch.layer.strangers import stranger_in
from hfpatch.parts.quantised import WRAPPED, kinds_of, scales_over_tokens

_CAPTURING = "transformers.utils.output_capturing"
_NO_MASK = "_attach_context_parallel_hooks."

# PEFT's adapters whose effect on a token depends on others, by class (of a module or of a LoRA
# variant). PEFT is not imported for a model without adapters.
_OVER_TOKENS = {
    "peft.LilyLayer": "experts weighted by a mean over all tokens",
    "peft.PveraLayer": "a draw for all tokens",
    "peft.MontecloraLinearVariant": "a draw for all tokens",
    "peft.VeloraLinearVariant": "a mean over the first batch",
}
# Those whose dropout masks the weight update, for all tokens at once.
_DRAW_ONCE = {
    "peft.LycorisLayer": "LoHa or LoKr",
    "peft.OFTLayer": "OFT",
    "peft.BOFTLayer": "BOFT",
}
# Those that read what PEFT's model forward hands them by hooks, which are gone in backward.
_HANDED = {
    "peft.ALoraLinearVariant": "offsets from the end of a row",
    "peft.PolyLayer": "a task for each row",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A row of the list.

    Attributes:
        name: unique.
        sentence: for the report. The words in braces say what the detail is, which replaces them.
        test: function of the stage's facts. Returns the detail, or whether the reason holds. None at
            stage apply, where decoder/ finds it.
        when: the stage.
        keeps: the layer cannot run again, so it keeps everything.
        told: a line on stderr says it once. The report has those of apply, and the stack says those of
            batch.
    """

    name: str
    sentence: str
    test: Callable | None = None
    when: str = "apply"
    keeps: bool = False
    told: bool = False


class Why(str):
    """A reason's sentence. name: of the reason. how: the way such layers run, in words of the
    report."""

    name: str
    how: str


# --- tests: (layer, condition) -------------------------------------------------------------------


def _adapters(table: dict, layer: nn.Module, condition) -> str | None:
    found: set[str] = set()
    for module in condition.snapshot.inside if "peft" in sys.modules else ():
        found |= kinds_of(type(module))
        for variant in getattr(module, "lora_variant", {}).values():
            found |= kinds_of(type(variant))
    return next((what for name, what in table.items() if name in found), None)


def _adds_a_bias(layer: nn.Module, condition) -> bool:
    """A projection of zeros, which padding is before a mixer, is then no longer zero."""
    if not condition.traits.mixers or "peft" not in sys.modules:
        return False
    for module in condition.snapshot.inside:
        if "peft.BaseTunerLayer" in kinds_of(type(module)):
            for name, _ in module.named_parameters():
                if "bias" in name and not name.startswith(WRAPPED):
                    return True
    return False


def _scaled(layer: nn.Module, condition) -> str | None:
    for name, module in layer.named_modules():
        why = scales_over_tokens(module)
        if why is not None:
            return f"{name}: {why}"
    return None


def _hooked(layer: nn.Module, condition) -> str | None:
    """Tiles would call a user's hooks more often, with parts of a row. A forward that is stopped at
    its attention calls no hook of the modules around that.
    """
    watched = watched_by_user(condition.snapshot.inside)
    if watched is not None:
        return next(name for name, module in layer.named_modules() if module is watched)
    return next(
        (name for name, module in _on_the_way(layer, condition) if _has_hooks(module)), None
    )


def _on_the_way(layer: nn.Module, condition) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules that mix tokens, and of those around them."""
    names: dict[str, None] = {}
    for path in condition.traits.mixing:
        parts = path.split(".")
        names |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)))
    return [(name, layer.get_submodule(name)) for name in names]


def _has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks other than those that a tiled call serves otherwise:
    transformers' recorders, and accelerate's hooks under context parallelism, which remove a mask.
    """
    forward = [h for h in forward_hooks(module) if getattr(h, "__module__", None) != _CAPTURING]
    others = [
        h for h in other_hooks(module) if not getattr(h, "__qualname__", "").startswith(_NO_MASK)
    ]
    return bool(forward or others) or engine_hook(module) is not None


def _patched(layer: nn.Module, condition) -> str | None:
    kinds = dict.fromkeys(MADE_FROM[type(m)] for m in (layer, *condition.snapshot.inside))
    return next((kind.__name__ for kind in kinds if not as_probed(kind)), None)


def _other_attention(layer: nn.Module, condition) -> str | None:
    """A module that mixes tokens, or one around it, of another library or with its forward."""
    for name, module in _on_the_way(layer, condition):
        if other_forward(module):
            return f"{name}: {replaced_forward(module)}"
        if name in condition.traits.mixing and package_of(module) != package_of(layer):
            kind = MADE_FROM[type(module)]
            return f"{name}: a {kind.__module__}.{kind.__name__}"
    return None


def _drops_scores(layer: nn.Module, condition) -> bool:
    # Many families call the rate so, and it may change. Of others a call shows whether they drop.
    rates = [getattr(attn, "attention_dropout", 0.0) for attn in condition.mixing]
    return layer.training and (condition.drops or any(getattr(p, "p", p) for p in rates))


def _draws(layer: nn.Module, condition) -> str | None:
    """Dropout draws for each token, also LoRA's. A user's own layer may draw once for a row."""
    if not (condition.draws and layer.training):
        return None
    own = "a layer of your own" if condition.traits.arguments is not None else None
    return own or _adapters(_DRAW_ONCE, layer, condition)


# --- tests: (layer.Request) ----------------------------------------------------------------------


def _mask(r) -> str | None:
    mask = r.kwargs.get("attention_mask")
    if mask is None:
        return None
    for attn, _ in zip(r.condition.mixing, r.condition.traits.attention):
        reason = why_not_causal(attn, mask)
        if reason is not None:
            return reason
    return None


# --- the list ------------------------------------------------------------------------------------

_layer = partial(Reason, when="layer", told=True)
_forward = partial(Reason, when="forward", told=True)
_batch = partial(Reason, when="batch")
_call = partial(Reason, when="call", told=True)


REASONS = (
    # What cannot run again in backward.
    _call(
        "cache",
        "keys and values come with the batch, or are to be kept (prefix tuning, use_cache=True)",
        lambda r: any(isinstance(value, Cache) for value in (*r.args, *r.kwargs.values())),
        keeps=True,
    ),
    _layer(
        "handed adapter",
        "an adapter in it has {something that its model hands it}",
        partial(_adapters, _HANDED),
        keeps=True,
    ),
    Reason(
        "other generator",
        "it draws by Python's or NumPy's random, which backward cannot repeat",
        keeps=True,
    ),
    # What was not probed.
    Reason("untried", "no small instance of it could be tried ({the error})"),
    Reason("other kind", "no layer of its kind in the small instance"),
    _layer(
        "unknown module",
        "{a module or a forward that hfpatch does not know}",
        lambda layer, c: stranger_in(layer, c.traits.kinds),
    ),
    # What the small instance showed.
    Reason("raised", "its small instance raised {an error}"),
    Reason("other mixer", "it mixes tokens by something other than attention"),
    Reason("more results", "it returns values that do not belong to single tokens"),
    Reason("probed attention", "{why the attention that it calls cannot run in tiles}"),
    Reason("dependent mixers", "its mixers depend on each other"),
    Reason("buffer", "it writes to {a buffer, an attribute or a global}"),
    Reason("number", "what it does depends on {an integer that differs from layer to layer}"),
    Reason("batch raises", "it raises {an error on one of the batches}"),
    Reason("other gradients", "different parameters get gradients on {one of the batches}"),
    Reason("differs", "it differs from transformers on a {batch, in a gradient, by so much}"),
    # What is in the layer now.
    _layer(
        "adapter",
        "an adapter in it has {something that several tokens share}",
        partial(_adapters, _OVER_TOKENS),
    ),
    _layer("adapter's bias", "an adapter adds a bias before a mixer", _adds_a_bias),
    _layer("shared scale", "{a projection that rounds several tokens by one scale}", _scaled),
    _layer(
        "sharded inside",  # each would be gathered, and its gradients reduced, once a tile
        "modules in it are sharded by themselves (FSDP2)",
        lambda layer, c: any(map(in_fsdp2, c.snapshot.inside)),
    ),
    _layer(  # hooks reduce in place what a rerun leaves out
        "split by hooks",
        "weights that transformers before 5.16 splits over ranks",
        lambda layer, c: any(map(split_by_hooks, c.snapshot.inside)),
    ),
    _layer("hooks", "hooks on {a module}", _hooked),
    _layer("patched class", "{class}.forward or its rotation changed since apply()", _patched),
    _layer(
        "other attention",
        "{a module around attention with another class or forward}",
        _other_attention,
    ),
    # What holds in this forward.
    _forward(
        "hooks on all",
        "hooks on every module of the process",
        lambda layer, c: c.snapshot.inside and hooks_on_all(),
    ),
    _forward("dropout", "attention dropout in training", _drops_scores),
    _forward(
        "draws",
        "random numbers that tokens may share, in {a layer of your own or an adapter}",
        _draws,
    ),
    _forward(
        "eval mode",
        "eval mode, in which a layer of your own gives other values",
        lambda layer, c: not (layer.training or c.traits.evaluates),
    ),
    _forward(  # each would have to run equally many tiles
        "experts of other ranks",
        "ranks send tokens to each other's experts",
        lambda layer, c: (
            layer._hfpatch.runtime is not None and layer._hfpatch.runtime.exchanges_tokens
        ),
    ),
    # What the stack was given.
    _batch(
        "stack's attention",
        "attention of a {class}, which hfpatch cannot replace",
        lambda given, traits, batch: not traits.ours and given.kind.__name__,
    ),
    _batch(
        "named attention",
        "attention of another library ({its name})",
        lambda given, *_: not standard(given.config) and str(named(given.config).attention),
    ),
    _batch(
        "stack's direction",
        "attention that is not causal",
        lambda given, *_: not (given.causal and getattr(given.config, "is_causal", True)),
    ),
    _batch("stack's encoder", "attention to an encoder's states", lambda given, *_: given.encoder),
    _batch(
        "stack's mask", "an attention mask of the caller's own", lambda given, *_: given.other_mask
    ),
    _batch(
        "probabilities",
        "output_attentions",
        # Eager attention returns probabilities, unless ranks share rows.
        lambda given, *_: (
            given.probabilities and (given.row_ranks or standard(given.config) != "eager")
        ),
    ),
    _batch("reruns", "transformers' own checkpointing", lambda given, *_: given.reruns),
    _batch(
        "dropout in shared rows",  # not_exchanged ends the sentence
        "attention dropout",
        lambda given, *_: (
            given.row_ranks
            and given.training
            and getattr(given.config.get_text_config(), "attention_dropout", 0.0)
        ),
    ),
    _batch(
        "holes",
        "an attention mask with holes, padding that a loss reads, or padding behind a row, until a "
        "backward shows that no loss reads it",
        lambda given, traits, batch: given.rows_mask is not None and batch.rows().holes,
    ),
    # What this call of the layer was given.
    _call(
        "not described",
        "a call outside the stack, output_attentions, or no input [B, T, D]",
        lambda r: r.batch is None or r.batch.probabilities or r.x.dim() != 3 or not r.x.numel(),
        told=False,
    ),
    _call(
        "encoder",
        "it attends to an encoder's states",
        lambda r: r.kwargs.get("encoder_hidden_states") is not None,
    ),
    _call("mask", "{attention or a mask that is not causal}", _mask),
    _call(
        "argument",
        "an argument that its small instance did not get, or with other axes ({its name})",
        lambda r: other_argument(r.condition.traits, r.args, r.kwargs, *r.x.shape[:2]),
    ),
)
BY_NAME = {reason.name: reason for reason in REASONS}


def why(name: str, detail: str = "") -> Why:
    """The sentence of the reason of this name."""
    made = Why(BY_NAME[name].sentence.format_map(defaultdict(lambda: detail)))
    made.name = name
    made.how = (
        "untiled and not checkpointed" if BY_NAME[name].keeps else "untiled, their inputs offloaded"
    )
    return made


def first(stage: str, settled: Why | None, *facts) -> Why | None:
    """The first reason of the list that holds: `settled`, of an earlier stage, or one of this
    stage, by its facts; None if tiles are exact.
    """
    for reason in REASONS:
        if settled is not None and settled.name == reason.name:
            return settled
        if reason.when == stage and (detail := reason.test(*facts)):
            return why(reason.name, detail)
    return None


OTHER_MIXER = why("other mixer")
