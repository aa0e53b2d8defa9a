"""The verdict on a decoder: the traits of each kind of layer, and which of them may be tiled.

A scaled-down instance (decoder/small_instance.py) runs stock and tiled, forward and backward, on a
full, a packed and a masked batch; a user's own layers also on one whose outputs are unread. Where
gradients differ beyond rounding, no layer is tiled, and the report says so.

    small stack -> probe each kind of layer (decoder/probe.py) -> compare with transformers
    -> tiled, or all whole, or transformers' attention, or left alone
"""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import plain_scans
from hfpatch.context.class_code import code_probed, is_own
from hfpatch.context.classes import swap
from hfpatch.context.current import Labelled, having
from hfpatch.context.ranks import sharded
from hfpatch.decoder import probe
from hfpatch.decoder.batch import StackTraits
from hfpatch.decoder.find import Decoder, list_of_layers
from hfpatch.decoder.small_instance import (
    TOKENS,
    kind_of,
    numbers_of,
    quiet_process,
    small_stack,
)
from hfpatch.decoder.stack import PatchedStack
from hfpatch.decoder.time_probe import ask_in_time
from hfpatch.layer.layer import TiledLayer
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.layer.shared_keys import hands_on_keys
from hfpatch.layer.strangers import TOKEN_WISE, kinds_in
from hfpatch.layer.traits import LayerTraits, Patched
from hfpatch.layer.why_whole import OTHER_MIXER, Why, why

# Allowed difference, relative to a gradient's norm. Norms, rotations and routers compute in float32
# even in a float64 model.
CLOSE = 3e-4
EPS = torch.finfo(torch.float32).eps
UNKNOWN = LayerTraits(reason=why("other kind"))
SHARED_KEYS = "its later layers share its keys, and would store them again when it runs again"
TILE = 16
# A row of two documents: the tokens of the first, and the row's positions.
FIRST = 17
POSITIONS = torch.cat([torch.arange(FIRST), torch.arange(TOKENS - FIRST)])[None]


@dataclass
class Verdict:
    """The traits of a decoder, from its small instance.

    `_verdict` fills one in, with the traits of each kind of layer. It is kept for all models with
    the same config and code, so from then on it does not change: `ask_model` returns a copy with the
    traits of each layer of its model.

    Attributes:
        answers: in the kept verdict, kind of layer -> its traits; from ask_model, the traits of
            each layer in order.
        ours: the stack may use hfpatch's attention and masks.
        why_unpatched: why the layers cannot run twice and so stay unpatched, or None.
        isolates: in the patched stack, documents of one row do not see each other.
        searches: transformers itself separates documents by positions that come without a mask or
            a cache.
        unpads: rows with padding may run as one packed row.
    """

    answers: tuple[LayerTraits, ...] | dict[tuple, LayerTraits]
    ours: bool = True
    why_unpatched: str | None = None
    isolates: bool = True
    searches: bool = True
    unpads: bool = False


_verdicts: dict[tuple, Verdict] = {}  # by class of stack, config, kinds of layers, their code


def ask_model(decoder: Decoder) -> Verdict:
    """The verdict on the layers of this model."""
    config = getattr(decoder.stack, "config", None)
    if config is None:
        return Verdict((), False, "its layers are in a module without a config")
    shared = None
    if getattr(config, "num_kv_shared_layers", None) and not hands_on_keys(decoder.layers[0]):
        shared = SHARED_KEYS
    # [Step 1] Find the kind of each layer.
    kinds = [kind_of(layer) for layer in decoder.layers]
    numbers = _differing(decoder.layers, kinds)
    # A stack that was cut behind the layer that completes the kinds has the same verdict.
    first = tuple(kinds[: 1 + max(map(kinds.index, kinds))])
    # [Step 2] Get the verdict on these kinds: the kept one, or a new one from a small instance.
    stack_class = type(decoder.stack)
    try:
        settings = config.to_json_string(use_diff=False)
        key = (stack_class, settings, first, str(numbers), code_probed(decoder.layers))
        if key not in _verdicts:
            _verdicts[key] = _verdict(stack_class, config, kinds, numbers)
        verdict = _verdicts[key]
    except Exception as error:  # a family's own code on a small instance may raise anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        untried = LayerTraits(reason=why("untried", reason))
        return Verdict((untried,) * len(kinds), False, shared, isolates=False)
    # [Step 3] Give each layer of this model the traits of its kind.
    answers = [_answer(verdict, layer, kind) for layer, kind in zip(decoder.layers, kinds)]
    # The mixers of an unknown layer are not known either, so it cannot keep documents apart, nor
    # rows without their padding.
    if None in answers and any(answer.mixes_outside for answer in verdict.answers.values()):
        verdict = replace(verdict, isolates=False, unpads=False)
    answers = tuple(answer or UNKNOWN for answer in answers)
    return replace(verdict, answers=answers, why_unpatched=shared or verdict.why_unpatched)


def _answer(verdict: Verdict, layer: nn.Module, kind: tuple) -> LayerTraits | None:
    """The traits of a layer of this kind; None if the small instance has no such layer. Modules
    that the user declared (hfpatch.token_wise) do not count in the comparison of kinds."""
    declared = {name for name, module in layer.named_modules() if type(module) in TOKEN_WISE}
    for tried, answer in verdict.answers.items():
        if tuple(row for row in tried if row[0] not in declared) == kind:
            return answer
    return None


def _differing(layers, kinds: list[tuple]) -> dict[tuple, dict]:
    """Kind of layer -> (module, attribute) -> the integers there, where the layers of this kind
    differ (numbers_of). A user's own layers may do other things by them, as by layer_idx."""
    found: dict[tuple, dict] = {kind: {} for kind in kinds}
    for layer, kind in zip(layers, kinds):
        for place, number in numbers_of(layer).items():
            found[kind].setdefault(place, {})[number] = None
    return {
        kind: {place: [*numbers] for place, numbers in places.items() if len(numbers) > 1}
        for kind, places in found.items()
    }


def _verdict(stack_class: type, config, kinds: list[tuple], numbers: dict) -> Verdict:
    with quiet_process(), sharded(False), plain_scans():
        stack = _in_double(small_stack(stack_class, config, kinds))
        answers = _ask_all(copy.deepcopy(stack), numbers)  # layers may write to buffers
        # An unidentified mixer does not isolate documents, in transformers either.
        packed = all(answer.reason != OTHER_MIXER for answer in answers.values())
        expected = _Expected(stack, packed)
        verdict = _settled(answers, expected)
        verdict.isolates = verdict.ours and packed or _isolates(_patched(stack, verdict))
        if packed and not verdict.isolates:
            # A document in a packed row differs from the document alone, however the stack runs
            # (its model takes no positions). Such rows are refused.
            del expected.batches["packed"]
            verdict = _settled(answers, expected)
            verdict.isolates = False
        # Where mixers let documents see each other, nothing shows whether attention does: most do not.
        mixes = any(a.mixes_outside and not a.attends for a in answers.values())
        verdict.searches = mixes or _isolates(copy.deepcopy(stack))
        # A layer that the small instance could not run (with an image's states) is not known.
        ran = all(getattr(a.reason, "name", None) != "raised" for a in answers.values())
        verdict.unpads = verdict.ours and ran and verdict.isolates and expected.unpads(verdict)
        for kind, layer in _one_of_each(stack).items():
            if kind in verdict.answers:  # else the layer keeps states of earlier runs
                verdict.answers[kind] = ask_in_time(stack, layer, verdict.answers[kind])
        return verdict


def _one_of_each(stack: nn.Module) -> dict[tuple, nn.Module]:
    """The first layer of each kind in a small stack."""
    return {kind_of(layer): layer for layer in reversed(list_of_layers(stack))}


def _ask_all(stack: nn.Module, numbers: dict) -> dict[tuple, LayerTraits]:
    """The traits of each kind of layer of a small stack. numbers: from _differing."""
    classes = frozenset().union(*map(kinds_in, list_of_layers(stack)))
    answers = {}
    for kind, layer in _one_of_each(stack).items():
        answers[kind] = replace(probe.ask(stack, layer, numbers.get(kind, {})), kinds=classes)
    return answers


def _settled(asked: dict[tuple, LayerTraits], expected: "_Expected") -> Verdict:
    """The first of these that agrees with transformers: all kinds of layers tiled; all whole with
    our attention; all whole with transformers' attention. If none does, the layers stay unpatched.

    Where a kind runs untiled because gradients differ, it is unknown what in it mixes tokens.
    """
    difference = expected.differs(Verdict(asked))
    if difference is None:
        return Verdict(asked)
    whole = dict(asked)
    for kind, answer in asked.items():
        if answer.reason is None:
            whole[kind] = replace(answer, reason=difference, looked=False)
    for verdict in (Verdict(whole), Verdict(whole, ours=False)):
        difference = expected.differs(verdict)
        if difference is None:
            return verdict
    return Verdict(whole, ours=False, why_unpatched=f"run again, {difference}")


def _in_double(stack: nn.Module) -> nn.Module:
    """The stack in float64; in its own dtype if the family cannot run in float64 or gives NaN.

    A mask has float64's least number, which is -inf in a softmax in float32: a hidden token that
    does not see itself (GLM-5-Next) becomes NaN.
    """
    wide = copy.deepcopy(stack).double()
    ids = torch.zeros(1, 4, dtype=torch.long)
    hidden = _hidden(copy.deepcopy(wide), ids, attention_mask=torch.tensor([[1, 1, 0, 1]]))
    return stack if hidden is None or not hidden.isfinite().all() else wide


class _Expected:
    """The expected gradients: those of transformers' own layers on a few batches."""

    def __init__(self, stack: nn.Module, packed: bool):
        self.stack = stack
        dtype = next(stack.parameters()).dtype
        weight = torch.randn(2, TOKENS, stack.config.hidden_size, dtype=dtype)
        ids = torch.randint(1, stack.config.vocab_size, (2, TOKENS))
        visible = torch.ones(2, TOKENS, dtype=torch.long)
        visible[1, -5:] = 0
        full = {"input_ids": ids, "weight": weight}
        masked = full | {"attention_mask": visible, "weight": weight * visible[..., None]}
        # name -> (what transformers runs, what our stack runs in its place)
        runs = {"full": ([full], full), "masked": ([masked], masked)}
        if any(map(is_own, list_of_layers(stack))):
            # What is left are gradients that come from no loss (DeepSeek-V2's AddAuxiliaryLoss on
            # the hub), once a tile.
            free = full | {"weight": 0 * weight}
            runs["loss-free"] = ([free], free)
        if packed:
            row = {"input_ids": ids[:1], "weight": weight[:1]}
            first = {name: x[:, :FIRST] for name, x in row.items()}
            second = {name: x[:, FIRST:] for name, x in row.items()}
            runs["packed"] = ([first, second], row | {"position_ids": POSITIONS})
        # Copies run, because a family may keep states from call to call (RecurrentGemma).
        self.batches = {
            name: (ours, self._gradients(copy.deepcopy(stack), theirs))
            for name, (theirs, ours) in runs.items()
        }

    @staticmethod
    def _gradients(stack, batches) -> dict[str, Tensor]:
        stack.zero_grad(set_to_none=True)
        torch.default_generator.manual_seed(0)  # dropout that no config turns off
        for batch in batches:
            batch = dict(batch)
            weight = batch.pop("weight")
            (stack(use_cache=False, **batch).last_hidden_state * weight).sum().backward()
        return {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}

    def unpads(self, verdict: Verdict) -> bool:
        """Whether real tokens of padded rows have the same outputs in one packed row.

        A family's mixers may remember padding, and its layers may take arguments that a packed row
        does not have. The comparison is with our own padded rows, because in transformers' eager
        attention a token that sees no token may be NaN.
        """
        ours = _patched(self.stack, replace(verdict, unpads=True))
        idle_BT = torch.arange(TOKENS) < torch.tensor([[7], [1]])
        ids = self.batches["full"][0]["input_ids"]
        wanted = _hidden(ours, ids, attention_mask=~idle_BT)
        with having(labelled=Labelled(idle_BT=idle_BT)):
            got = _hidden(ours, ids, attention_mask=~idle_BT)
        if wanted is None or got is None:  # an argument that a layer cannot take for the packed row
            return False
        # Rounding may send a single token to another expert.
        error_N = (got - wanted)[~idle_BT].norm(dim=-1)
        return bool((~(error_N <= CLOSE * wanted[~idle_BT].norm(dim=-1))).sum() <= 1)

    def differs(self, verdict: Verdict) -> Why | None:
        """How a stack with these traits differs from transformers, or None."""
        ours = _patched(self.stack, verdict)
        for name, (batch, wanted) in self.batches.items():
            if name == "packed" and not verdict.ours:
                continue  # transformers' attention runs; there is nothing of ours to compare
            try:
                got = self._gradients(ours, [batch])
            except Exception as error:  # a layer that cannot be cut may raise anything
                return why("batch raises", f"{type(error).__name__} on a {name} batch")
            if got.keys() != wanted.keys():
                return why("other gradients", f"a {name} batch")
            for what, value in wanted.items():
                error = (got[what] - value).norm()
                size = value.norm()
                # A bias of unrotated keys shifts all scores alike. Its gradient is zero up to the
                # rounding of its weight's gradient.
                weight = wanted.get(what.removesuffix(".bias") + ".weight")
                rounding = 0.0 if weight is None else EPS * weight.norm()
                if not error <= max(CLOSE * size.clamp_min(1e-3), rounding):
                    return why("differs", f"{name} batch ({what}: {error / size:.0e})")
        return None


def _isolates(stack: nn.Module) -> bool:
    """Whether a document's output is independent of the document before it in a row whose positions
    restart."""
    ids = torch.randint(1, stack.config.vocab_size, (1, TOKENS))
    other = torch.cat([ids[:, :FIRST].flip(1), ids[:, FIRST:]], 1)
    x = _hidden(stack, ids, position_ids=POSITIONS)
    y = _hidden(stack, other, position_ids=POSITIONS)
    if x is None or y is None:  # it takes no positions, or refuses such rows itself
        return False
    return bool((x - y)[:, FIRST:].norm() <= CLOSE * y[:, FIRST:].norm())


def _hidden(stack: nn.Module, ids: Tensor, **arguments) -> Tensor | None:
    """The stack's last hidden states; None where its own code raises."""
    try:
        with torch.no_grad():
            return stack(input_ids=ids, use_cache=False, **arguments).last_hidden_state
    except Exception:
        return None


def _patched(stack: nn.Module, verdict: Verdict) -> nn.Module:
    """A patched copy of a small stack, with these traits."""
    ours = copy.deepcopy(stack)
    configs = (ours.config,)
    layers = list_of_layers(ours)
    policy = Checkpointing(offload="gpu", keep="attention", tile=TILE, every=1)
    runtime = LayerRuntime(policy, len(layers))
    swap(ours, PatchedStack)
    ours._hfpatch = Patched(StackTraits(verdict.ours, unpads=verdict.unpads), configs, runtime)
    ours._hfpatch_turn = runtime.turn
    for index, layer in enumerate(layers):
        answer = verdict.answers.get(kind_of(layer), UNKNOWN)
        swap(layer, TiledLayer)
        layer._hfpatch = Patched(answer, configs, runtime, index)
    return ours
