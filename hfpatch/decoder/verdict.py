"""The verdict on a decoder: the traits of each kind of layer, and which of them may be tiled.

A scaled-down instance (decoder/small_instance.py) runs stock and tiled, forward and backward, on a
plain, a packed and a masked batch. Where gradients differ beyond rounding, no layer is tiled, and
the report says so.

    small stack -> probe each kind of layer (decoder/probe.py) -> compare with transformers
    -> tiled, or all whole, or transformers' attention, or left alone
"""

import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import plain_scans
from hfpatch.context.class_code import code_asked
from hfpatch.context.classes import swap
from hfpatch.context.current import Labelled, having
from hfpatch.context.ranks import sharded
from hfpatch.decoder import probe
from hfpatch.decoder.batch import StackTraits
from hfpatch.decoder.find import Decoder, list_of_layers
from hfpatch.decoder.small_instance import TOKENS, kind_of, quiet_process, small_stack
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
SHARED_KEYS = "its later layers share its keys, and would store them again when it runs again"
TILE = 16
DOCUMENTS = (0, 17, TOKENS)


@dataclass
class Verdict:
    """The traits of a decoder, from its small instance.

    `_verdict` fills one in, with the traits of each kind of layer. It is kept for all models with
    the same config and code, so from then on nobody changes it: `ask_model` returns a copy with the
    traits of each layer of its model.

    Attributes:
        answers: in the kept verdict, kind of layer -> its traits; from ask_model, the traits of
            each layer in order.
        ours: the stack may use hfpatch's attention and masks.
        why_unpatched: why the layers cannot run twice and so stay unpatched, or None.
        isolates: in the patched stack, documents of one row do not see each other.
        unpads: rows with padding may run as one packed row.
    """

    answers: tuple[LayerTraits, ...] | dict[tuple, LayerTraits]
    ours: bool = True
    why_unpatched: str | None = None
    isolates: bool = True
    unpads: bool = False


_verdicts: dict[tuple, Verdict] = {}  # by class of stack, config, kinds of layers, their code


def ask_model(decoder: Decoder) -> Verdict:
    """The verdict on the layers of this model."""
    n = len(decoder.layers)
    if not hasattr(decoder.stack, "config"):
        return Verdict((), False, "its layers are in a module without a config")
    shared = SHARED_KEYS if getattr(decoder.stack.config, "num_kv_shared_layers", None) else None
    if shared and hands_on_keys(decoder.layers[0]):
        shared = None
    code = code_asked(decoder.layers)
    kinds = [kind_of(layer) for layer in decoder.layers]
    try:
        # A stack that was cut behind the layer that completes the kinds has the same verdict.
        first = tuple(kinds[: 1 + max(map(kinds.index, kinds))])
        config = decoder.stack.config
        key = type(decoder.stack), config.to_json_string(use_diff=False), first, code
        if key not in _verdicts:
            _verdicts[key] = _verdict(type(decoder.stack), config, kinds)
        found = _verdicts[key]
    except Exception as error:  # a family's own code on a small instance may raise anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return Verdict(
            (LayerTraits(reason=why("untried", reason)),) * n, False, shared, isolates=False
        )
    unknown = LayerTraits(reason=why("other kind"))
    answers = [_answer(found, layer, kind) for layer, kind in zip(decoder.layers, kinds)]
    # The mixers of an unknown layer are not known either, so it cannot keep documents apart, nor
    # rows without their padding.
    mixes = any(a.mixers or a.reason == OTHER_MIXER for a in found.answers.values())
    if mixes and None in answers:
        found = replace(found, isolates=False, unpads=False)
    answers = tuple(answer or unknown for answer in answers)
    return replace(found, answers=answers, why_unpatched=shared or found.why_unpatched)


def _answer(found: Verdict, layer: nn.Module, kind: tuple) -> LayerTraits | None:
    """The traits of a layer of this kind; None if the small instance has no such layer. Modules
    that the user declared (hfpatch.token_wise) do not count in the comparison of kinds."""
    declared = {name for name, module in layer.named_modules() if type(module) in TOKEN_WISE}
    others = (
        (tuple(row for row in known if row[0] not in declared), answer)
        for known, answer in found.answers.items()
    )
    return next((answer for known, answer in others if known == kind), None)


def _verdict(stack_class: type, config, kinds: list[tuple]) -> Verdict:
    with quiet_process(), sharded(False), plain_scans():
        stack = _in_double(small_stack(stack_class, config, kinds))
        answers = _ask_all(stack)
        # An unidentified mixer does not isolate documents, in transformers either.
        expected = _Expected(
            stack, packed=not any(answer.reason == OTHER_MIXER for answer in answers.values())
        )
        found = _settled(answers, expected)
        never = (
            "packed" in expected.batches
            and not found.ours
            and not _isolates(_patched(stack, found))
        )
        if never:
            # A document in a packed row differs from the document alone, however the stack runs
            # (its model takes no positions). Such rows are refused.
            del expected.batches["packed"]
            found = _settled(answers, expected)
        compared = found.ours and "packed" in expected.batches
        found.isolates = compared or not never and _isolates(_patched(stack, found))
        found.unpads = found.ours and found.isolates and expected.unpads(found)
        for kind, layer in _one_of_each(stack).items():
            if kind in found.answers:  # else the layer keeps states of earlier runs
                found.answers[kind] = ask_in_time(stack, layer, found.answers[kind])
        return found


def _one_of_each(stack: nn.Module) -> dict[tuple, nn.Module]:
    """The first layer of each kind in a small stack."""
    return {kind_of(layer): layer for layer in reversed(list_of_layers(stack))}


def _ask_all(stack: nn.Module) -> dict[tuple, LayerTraits]:
    """The traits of each kind of layer of a small stack."""
    answers = {}
    known = frozenset().union(*map(kinds_in, list_of_layers(stack)))
    for kind, layer in _one_of_each(stack).items():
        try:
            answers[kind] = replace(probe.ask(stack, layer), kinds=known)
        except Exception as error:  # raised by the stack before it calls the layer
            answers[kind] = LayerTraits(reason=why("masks of its own", type(error).__name__))
    return answers


def _settled(asked: dict[tuple, LayerTraits], expected: "_Expected") -> Verdict:
    """The first of these that agrees with transformers: all kinds of layers tiled; all whole with
    our attention; all whole with transformers' attention. If none does, the layers stay unpatched.

    Of a kind that runs untiled since gradients differ, nobody knows what in it mixes tokens.
    """
    difference = expected.differs(Verdict(asked))
    if difference is None:
        return Verdict(asked)
    whole = {
        kind: answer if answer.reason else replace(answer, reason=difference, looked=False)
        for kind, answer in asked.items()
    }
    for found in (Verdict(whole), Verdict(whole, ours=False)):
        difference = expected.differs(found)
        if difference is None:
            return found
    return Verdict(whole, ours=False, why_unpatched=f"run again, {difference}")


def _in_double(stack: nn.Module) -> nn.Module:
    """The stack in float64; in its own dtype if the family cannot run in float64 or gives NaN.

    A mask has float64's least number, which is -inf in a softmax in float32: a hidden token that
    does not see itself (GLM-5-Next) becomes NaN.
    """
    wide = copy.deepcopy(stack).double()
    given = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False}
    try:
        with torch.no_grad():
            out = copy.deepcopy(wide)(attention_mask=torch.tensor([[1, 1, 0, 1]]), **given)
    except RuntimeError:
        return stack
    return wide if out.last_hidden_state.isfinite().all() else stack


class _Expected:
    """The expected gradients: those of transformers' own layers on a few batches."""

    def __init__(self, stack: nn.Module, packed: bool):
        self.stack = stack
        dtype = next(stack.parameters()).dtype
        vocabulary = stack.config.vocab_size
        self.weight = torch.randn(2, TOKENS, stack.config.hidden_size, dtype=dtype)
        ids = torch.randint(1, vocabulary, (2, TOKENS))
        visible = torch.ones(2, TOKENS, dtype=torch.long)
        visible[1, -5:] = 0
        a, b = DOCUMENTS[1:]
        one = slice(0, 1)
        alone = [
            {"input_ids": ids[one, :a], "weight": self.weight[one, :a]},
            {"input_ids": ids[one, a:b], "weight": self.weight[one, a:b]},
        ]
        positions = torch.cat([torch.arange(a), torch.arange(b - a)])[None]
        joined = {"input_ids": ids[one], "weight": self.weight[one], "position_ids": positions}
        plain = {"input_ids": ids, "weight": self.weight}
        holes = plain | {"attention_mask": visible, "weight": self.weight * visible[..., None]}
        self.batches = {"plain": ([plain], plain), "masked": ([holes], holes)}
        if packed:
            self.batches["packed"] = (alone, joined)
        # Copies run, because a family may keep states from call to call (RecurrentGemma).
        self.wanted = {
            name: self._gradients(copy.deepcopy(stack), alone)
            for name, (alone, _) in self.batches.items()
        }

    @staticmethod
    def _gradients(stack, batches) -> dict[str, Tensor]:
        stack.zero_grad(set_to_none=True)
        for batch in batches:
            batch = dict(batch)
            weight = batch.pop("weight")
            (stack(use_cache=False, **batch).last_hidden_state * weight).sum().backward()
        return {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}

    def unpads(self, found: Verdict) -> bool:
        """Whether real tokens of padded rows have the same outputs in one packed row.

        A family's mixers may remember padding, and its layers may take arguments that a packed row
        does not have. The comparison is with our own padded rows, because in transformers' eager
        attention a token that sees no token may be NaN.
        """
        ours = _patched(self.stack, replace(found, unpads=True))
        idle_BT = torch.arange(TOKENS) < torch.tensor([[7], [1]])
        ids = self.batches["plain"][1]["input_ids"]
        run = partial(ours, input_ids=ids, attention_mask=~idle_BT, use_cache=False)
        try:
            with torch.no_grad():
                wanted = run().last_hidden_state[~idle_BT]
                with having(labelled=Labelled(idle_BT=idle_BT)):
                    got = run().last_hidden_state
        except Exception:  # an argument that a layer cannot take for the packed row
            return False
        # Rounding may send a single token to another expert.
        error = (got[~idle_BT] - wanted).norm(dim=-1)
        return bool((~(error <= CLOSE * wanted.norm(dim=-1))).sum() <= 1)

    def differs(self, found: Verdict) -> Why | None:
        """How a stack with these traits differs from transformers, or None."""
        ours = _patched(self.stack, found)
        for name, (_, batch) in self.batches.items():
            if name == "packed" and not found.ours:
                continue  # transformers' attention runs; there is nothing of ours to compare
            try:
                got = self._gradients(ours, [batch])
            except Exception as error:  # a layer that cannot be cut may raise anything
                return why("batch raises", f"{type(error).__name__} on a {name} batch")
            wanted = self.wanted[name]
            if got.keys() != wanted.keys():
                return why("other gradients", name)
            for what, value in wanted.items():
                error, size = (got[what] - value).norm(), value.norm()
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
    a, b = DOCUMENTS[1:]
    ids = torch.randint(1, stack.config.vocab_size, (1, b))
    other = torch.cat([ids[:, :a].flip(1), ids[:, a:]], 1)
    positions = torch.cat([torch.arange(a), torch.arange(b - a)])[None]
    try:
        with torch.no_grad():
            run = partial(stack, use_cache=False, position_ids=positions)
            x, y = (run(input_ids=given).last_hidden_state[:, a:] for given in (ids, other))
    except Exception:  # it takes no positions, or refuses such rows itself
        return False
    return bool((x - y).norm() <= CLOSE * y.norm())


def _patched(stack: nn.Module, found: Verdict) -> nn.Module:
    """A patched copy of a small stack, with these traits."""
    ours = copy.deepcopy(stack)
    configs = (ours.config,)
    swap(ours, PatchedStack)
    layers = list_of_layers(ours)
    runtime = LayerRuntime(
        Checkpointing(offload="gpu", keep="attention", tile=TILE, every=1), len(layers)
    )
    ours._hfpatch = Patched(StackTraits(found.ours, unpads=found.unpads), configs, runtime)
    ours._hfpatch_turn = runtime.turn
    for index, layer in enumerate(layers):
        answer = found.answers.get(kind_of(layer), LayerTraits(reason=why("other kind")))
        swap(layer, TiledLayer)
        layer._hfpatch = Patched(answer, configs, runtime, index)
    return ours
