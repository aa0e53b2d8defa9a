"""What each kind of layer answers when it is asked, found before any layer is trusted.

A scaled-down instance of the decoder (models/scaled.py) runs as transformers has it and tiled, forward and backward, plain,
packed and with hidden tokens. A kind of layer that differs beyond rounding is not tiled, and the report says so.
"""

import copy
import time
from functools import cache

import torch
from torch import Tensor, nn

from hfpatch.checkpoint.session import Session
from hfpatch.memory.policy import Checkpointing
from hfpatch.models import probe
from hfpatch.models.answers import Answers
from hfpatch.models.classes import swap
from hfpatch.models.finding import Decoder, list_of_layers
from hfpatch.models.layer import TiledLayer
from hfpatch.models.scaled import TOKENS, kind_of, quiet_process, small_stack
from hfpatch.models.stack import OurAttention

CLOSE = 3e-4  # of a gradient's norm: norms, rotations and routers compute in float32 also in a float64 model
SECONDS = 3.0  # after that no more is tried
TILE = 16
DOCUMENTS = (0, 17, TOKENS)


class _Different(Exception):
    """Its message says what differed."""


def ask_model(decoder: Decoder, verdict: bool) -> list[Answers | None]:
    """One Answers for each layer; None where the layer is to be asked at its first call (no verdict was wanted)."""
    if not verdict:
        return [None] * len(decoder.layers)
    kinds = [kind_of(layer) for layer in decoder.layers]
    try:
        found = _verdict(type(decoder.stack), _Config(decoder.stack.config), tuple(kinds))
    except Exception as error:  # whatever a family raises on a small instance, it is a reason not to trust
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        found = dict.fromkeys(kinds, Answers(reason=f"no small instance of it could be tried ({reason})"))
    unknown = Answers(reason="no layer of its kind in the small instance")
    return [found.get(kind, unknown) for kind in kinds]


class _Config:
    """A config as a key: equal where its values are."""

    def __init__(self, config):
        self.config, self.key = config, config.to_json_string(use_diff=False)

    def __eq__(self, other):
        return self.key == other.key

    def __hash__(self):
        return hash(self.key)


@cache
def _verdict(stack_class: type, config: _Config, kinds: tuple) -> dict[tuple, Answers]:
    with quiet_process():
        began = time.perf_counter()
        stack = small_stack(stack_class, config.config, list(kinds))
        stack = _in_double(stack)
        layers = _layers_of(stack)
        named = {kind_of(layer): i for i, layer in reversed(list(enumerate(layers)))}
        answers = {kind: probe.ask(stack, layers[i]) for kind, i in named.items()}
        # What mixes tokens beside attention knows nothing of documents, in transformers either.
        packed = not any(answer.reason == probe.OTHER_MIXER for answer in answers.values())
        expected = _Expected(stack, packed)
        try:
            expected.compare(answers)
        except _Different as error:
            if len(answers) == 1:
                return {kind: Answers(reason=str(error)) for kind in answers}
            for kind in answers:
                others = {k: a if k == kind else Answers(reason="not now") for k, a in answers.items()}
                if time.perf_counter() - began > SECONDS:
                    answers[kind] = Answers(reason=f"the verdict took more than {SECONDS:.0f} s")
                    continue
                try:
                    expected.compare(others)
                except _Different as error:
                    answers[kind] = Answers(reason=str(error))
            expected.compare(answers)
        return answers


def _layers_of(stack: nn.Module) -> list[nn.Module]:
    return list(list_of_layers(stack))


def _in_double(stack: nn.Module) -> nn.Module:
    """float64 where the family can run so."""
    wide = copy.deepcopy(stack).double()
    try:
        with torch.no_grad():
            wide(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    except RuntimeError:
        return stack
    return wide


class _Expected:
    """What transformers' own layers give for a few batches."""

    def __init__(self, stack: nn.Module, packed: bool):
        self.stack = stack
        dtype, vocabulary = next(stack.parameters()).dtype, stack.config.vocab_size
        self.weight = torch.randn(2, TOKENS, stack.config.hidden_size, dtype=dtype)
        ids = torch.randint(1, vocabulary, (2, TOKENS))
        visible = torch.ones(2, TOKENS, dtype=torch.long)
        visible[0, 11:13], visible[1, -5:] = 0, 0  # a hole, and padding; what hidden tokens see counts too
        a, b = DOCUMENTS[1:]
        one = slice(0, 1)
        apart = [
            {"input_ids": ids[one, :a], "weight": self.weight[one, :a]},
            {"input_ids": ids[one, a:b], "weight": self.weight[one, a:b]},
        ]
        positions = torch.cat([torch.arange(a), torch.arange(b - a)])[None]
        joined = {"input_ids": ids[one], "weight": self.weight[one], "position_ids": positions}
        plain = {"input_ids": ids, "weight": self.weight}
        holes = plain | {"attention_mask": visible}
        self.batches = {"plain": ([plain], plain), "masked": ([holes], holes)}
        # Chunks are counted along the row: documents one by one would have others.
        if packed and not getattr(stack.config, "attention_chunk_size", None):
            self.batches["packed"] = (apart, joined)
        self.wanted = {name: self._gradients(stack, alone) for name, (alone, _) in self.batches.items()}

    @staticmethod
    def _gradients(stack, batches) -> dict[str, Tensor]:
        stack.zero_grad(set_to_none=True)
        for batch in batches:
            batch = dict(batch)
            weight = batch.pop("weight")
            (stack(use_cache=False, **batch).last_hidden_state * weight).sum().backward()
        return {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}

    def compare(self, answers: dict[tuple, Answers]) -> None:
        """_Different where the stack with these answers gives other gradients."""
        ours = copy.deepcopy(self.stack)
        configs = (ours.config,)
        swap(ours, OurAttention)
        layers = _layers_of(ours)
        session = Session(Checkpointing(offload="gpu", every=1, save_attention=True, tile=TILE), None, len(layers))
        ours._hfpatch_configs, ours._hfpatch_session = configs, session
        for index, layer in enumerate(layers):
            answer = answers.get(kind_of(layer), Answers(reason="not asked"))
            swap(layer, TiledLayer)
            layer._hfpatch_index = index
            layer._hfpatch_session, layer._hfpatch_configs, layer._hfpatch_answers = session, configs, answer
        for name, (_, batch) in self.batches.items():
            try:
                got = self._gradients(ours, [batch])
            except Exception as error:  # a layer that cannot be cut may raise anything
                raise _Different(f"tiled, it raises {type(error).__name__} on a {name} batch") from error
            wanted = self.wanted[name]
            if got.keys() != wanted.keys():
                raise _Different(f"other parameters have gradients on a {name} batch")
            for what, value in wanted.items():
                error = (got[what] - value).norm()
                if not error <= CLOSE * value.norm().clamp_min(1e-3):
                    raise _Different(
                        f"tiled, it differs from transformers on a {name} batch ({what}: {error / value.norm():.0e})"
                    )
