"""Modules, forwards and functions of the user's own inside a layer: what they keep, and what comes, changes and goes."""

import itertools
import random
import sys
import types
from collections import deque

import numpy as np
import peft
import pytest
import tiny
import torch
from families import small_model
from peft.tuners.lora import layer as lora
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

import hfpatch

CALLS = []


class Keeper(nn.Linear):
    """A user's own, which keeps something from call to call; `note` is what each does with the tokens it is given."""

    def __init__(self, like: nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=False, dtype=like.weight.dtype)
        self.weight = like.weight
        self.begin()

    def begin(self):
        pass

    def forward(self, x):
        self.note(x)
        return F.linear(x, self.weight)


class InDeque(Keeper):
    def begin(self):
        self.given = deque(maxlen=9)

    def note(self, x):
        self.given.append(x.shape[1])

    def kept(self):
        return [*self.given]


class InDictOfLists(InDeque):
    def begin(self):
        self.table = {"given": []}

    given = property(lambda self: self.table["given"])


class Tally:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class InObject(Keeper):
    def begin(self):
        self.tally = Tally()

    def note(self, x):
        self.tally.calls += 1

    def kept(self):
        return self.tally.calls


class FromFirstForward(Keeper):
    def note(self, x):
        self.calls = getattr(self, "calls", 0) + 1

    def kept(self):
        return self.calls


class MeanFromNone(Keeper):
    def begin(self):
        self.mean = None

    def note(self, x):
        mean = x.detach().mean((0, 1))
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean

    def kept(self):
        return self.mean


class InTensorOfList(Keeper):
    def begin(self):
        self.sums = [torch.zeros((), dtype=torch.float64)]

    def note(self, x):
        self.sums[0] += x.detach().sum()

    def kept(self):
        return self.sums[0]


class InFile(InDeque):
    given = CALLS

    def begin(self):
        CALLS.clear()

    def note(self, x):
        CALLS.append(x.shape[1])


class InClosure(Keeper):
    def begin(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def note(self, x):
        self.count()

    def kept(self):
        return self.count()


class InIterator(Keeper):
    def begin(self):
        self.calls = itertools.count()

    def note(self, x):
        next(self.calls)

    def kept(self):
        return next(self.calls)


class InDraws(Keeper):
    def begin(self):
        self.draws, self.numbers = random.Random(0), torch.Generator().manual_seed(0)
        self.array = np.random.default_rng(0)

    def note(self, x):
        self.draws.random(), torch.rand(1, generator=self.numbers), self.array.random()

    def kept(self):
        return self.draws.random(), torch.rand(1, generator=self.numbers).item(), self.array.random()


class InArrayDraws(Keeper):
    def begin(self):
        self.array = np.random.default_rng(0)

    def note(self, x):
        self.array.random()

    def kept(self):
        return self.array.random()


class InDrawsOfAll(Keeper):
    def begin(self):
        random.seed(0), np.random.seed(0)

    def note(self, x):
        random.random(), np.random.rand()

    def kept(self):
        return random.random(), np.random.rand()


class InMethodOfList(InDeque):
    """And among more modules than objects are looked at."""

    def begin(self):
        super().begin()
        self.add = self.given.append
        self.others = nn.ModuleList([nn.Identity() for _ in range(2_000)])

    def note(self, x):
        self.add(x.shape[1])


class BehindAMethod(Keeper):
    def begin(self):
        given = []
        self.add, self.kept = given.append, given.copy

    def note(self, x):
        self.add(x.shape[1])


KEEPERS = [
    InDeque,
    InDictOfLists,
    InObject,
    FromFirstForward,
    MeanFromNone,
    InTensorOfList,
    InFile,
    InClosure,
    InIterator,
    InDraws,
    InArrayDraws,
    InDrawsOfAll,
    InMethodOfList,
    BehindAMethod,
]


@pytest.mark.parametrize("kind", KEEPERS)
def test_what_a_module_keeps_is_kept_as_under_transformers_checkpointing(kind):
    """Asking would leave its few tokens there, or NaN, and tiles would count."""
    found = []
    for way in ("ours", "stock", "exact"):
        model = tiny.llama(dtype=torch.float64)
        model = tiny.exact(model) if way == "exact" else model
        attention = model.model.layers[0].self_attn
        attention.v_proj = kind(attention.v_proj)
        if way == "ours":
            hfpatch.apply(model, checkpointing=tiny.TILED)
        else:
            tiny.checkpoint(model)
        tiny.step(model, tiny.labelled())
        found.append(attention.v_proj.kept())
    if isinstance(found[0], torch.Tensor):
        tiny.numerics.assert_close(*found, dtype=torch.float32)  # to which norms round
    else:
        assert found[0] == found[1]


data = iter([])  # names that are attributes in a module's code are no use of what the file has by them
TABLE = np.lib.stride_tricks.as_strided(np.zeros(1), (2**40,), (0,))
LOG = sys.stderr


class Reads(Keeper):
    def note(self, x):
        return x.data, TABLE, LOG


def test_a_layer_whose_module_holds_a_file_and_large_data_is_tiled():
    """To copy the data would take 8 TiB."""
    stock = tiny.llama(dtype=torch.float64)
    ours = tiny.llama(dtype=torch.float64)
    for model in (stock, ours):
        model.model.layers[0].self_attn.v_proj = Reads(model.model.layers[0].self_attn.v_proj)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert not ours.model.layers[0]._hfpatch_answers.reason


class Warming(Keeper):
    """Gives more at every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return F.linear(x, self.weight) * self.calls


def test_asking_does_not_change_what_a_counting_module_gives():
    stock = tiny.llama(dtype=torch.float64)
    models = ours, _, _ = tiny.llama(dtype=torch.float64), stock, tiny.exact(stock)
    for model in models:
        model.model.layers[0].self_attn.v_proj = Warming(model.model.layers[0].self_attn.v_proj)
    hfpatch.apply(ours, checkpointing=tiny.TILED, rms_norm=False)
    tiny.numerics.assert_close(*(tiny.step(model, tiny.labelled())["loss"] for model in models))


def less_their_mean(forward):
    return lambda *args: (y := forward(*args)) - y.mean(1, keepdim=True)


@pytest.mark.parametrize("trained", [True, False])
def test_what_mixes_tokens_by_a_share_that_begins_as_zero_is_seen(trained):
    stock = tiny.llama(dtype=torch.float64)
    mlp = stock.model.layers[0].mlp
    mlp.down_proj = tiny.Shift(mlp.down_proj, nn.Parameter(torch.zeros((), dtype=torch.float64)) if trained else 0.0)
    ours = tiny.patched(stock)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    for model in (stock, ours):
        if trained:
            model.model.layers[0].mlp.down_proj.share.data.add_(0.5)
        else:
            model.model.layers[0].mlp.down_proj.share = 0.5
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())


@pytest.mark.parametrize("where", ["class", "inside"])
def test_what_comes_into_adapters_after_apply_sees_whole_rows(where, monkeypatch):
    stock = peft.get_peft_model(tiny.llama(dtype=torch.float64), peft.LoraConfig(target_modules=["v_proj"]))
    ours = tiny.patched(stock)
    tiny.step(ours, tiny.labelled())
    if where == "class":
        monkeypatch.setattr(lora.Linear, "forward", less_their_mean(lora.Linear.forward))
    else:
        for model in (stock, ours):
            inner = model.get_submodule("base_model.model.model.layers.0.self_attn.v_proj.lora_A")
            inner["default"] = tiny.Shift(inner["default"], 0.5)
            inner["default"].weight = inner["default"].inner.weight
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())


def test_a_layer_is_tiled_again_once_a_forward_that_mixes_is_gone():
    stock = tiny.llama(dtype=torch.float64)
    ours = tiny.patched(stock)
    layer = ours.model.layers[0]
    at_apply = layer._hfpatch_answers
    layer.mlp.forward = types.MethodType(less_their_mean(type(layer.mlp).forward), layer.mlp)
    tiny.step(ours, tiny.labelled())
    assert layer._hfpatch_answers.reason
    del layer.mlp.forward
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert layer._hfpatch_answers == at_apply and not at_apply.reason


class Squashed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.tanh(self.inner(x))


class LessMean(Squashed):
    def forward(self, x):
        y = self.inner(x)
        return y - y.mean(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", [Squashed, LessMean])
def test_what_torch_jit_compiled(kind):
    """It keeps its parameters in C++, has no forward in its class, and takes no hooks."""
    stock, ours = tiny.llama(dtype=torch.float64), tiny.llama(dtype=torch.float64)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model, make in ((stock, lambda x: x), (ours, torch.jit.script)):
        mlp = model.model.layers[0].mlp
        mlp.down_proj = make(kind(mlp.down_proj))
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert bool(ours.model.layers[0]._hfpatch_answers.reason) == (kind is LessMean)
    hfpatch.undo(ours)


@pytest.mark.parametrize("way", [tiny.TILED, hfpatch.Checkpointing(tile=8, every=2)], ids=["tiled", "segments"])
def test_a_class_that_is_patched_before_the_backward(way, monkeypatch):
    """The layer runs again as it ran."""
    stock = tiny.llama(dtype=torch.float64)
    ours, wanted = tiny.patched(stock, checkpointing=way), tiny.step(tiny.exact(stock), tiny.labelled())
    loss, forward = ours(**tiny.labelled()).loss, LlamaMLP.forward
    other = less_their_mean(forward)
    monkeypatch.setattr(LlamaMLP, "forward", other)
    loss.backward()
    assert LlamaMLP.forward is other
    tiny.assert_same_in_double({"loss": loss.detach(), **tiny.gradients(ours)}, wanted)


def test_a_function_for_an_activation_that_is_exchanged():
    stock = tiny.llama(dtype=torch.float64)
    for layer in stock.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = F.silu
    ours = tiny.patched(stock)
    assert hfpatch.apply(ours, checkpointing=tiny.TILED).count("mlp") == 2
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    for model in (stock, ours):
        model.model.layers[0].mlp.act_fn = torch.relu
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())


def test_a_hook_that_takes_a_gradient_has_nothing_recorded_twice():
    """Its layers run whole, and again for that gradient while the forward that records router logits is under way."""
    stock, factor = small_model("qwen3_moe"), nn.Parameter(torch.ones((), dtype=torch.float64))
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(offload="host", tile=8, plain=0))

    def hook(module, args, out):
        with torch.enable_grad():
            torch.autograd.grad((factor * (out[0] if isinstance(out, tuple) else out).detach()).mean(), factor)

    found = []
    for model in (stock, ours):
        handle = model.model.layers[0].mlp.register_forward_hook(hook)
        ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        handle.remove()
        assert len(out.router_logits) == model.config.num_hidden_layers
        found.append(tiny.gradients(model))
    for name, gradient in found[0].items():  # norms and rotation are in float32 in stock
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
