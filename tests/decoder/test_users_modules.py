"""Modules, forwards and functions of the user's own inside a layer: what they keep, and what comes,
changes and goes.
"""

import itertools
import random
import types
from collections import deque

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
from hfpatch.layer import strangers
from hfpatch.layer.condition import look

CALLS = []


class Keeper(nn.Linear):
    """A user's own, which keeps something from call to call; `note` is what each does with the
    tokens it is given.
    """

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


class InFile(InDeque):
    given = CALLS

    def begin(self):
        CALLS.clear()

    def note(self, x):
        CALLS.append(x.shape[1])


class MeanFromNone(Keeper):
    def begin(self):
        self.mean = None

    def note(self, x):
        mean = x.detach().mean((0, 1))
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean

    def kept(self):
        return self.mean


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

    def note(self, x):
        self.draws.random(), torch.rand(1, generator=self.numbers)

    def kept(self):
        return self.draws.random(), torch.rand(1, generator=self.numbers).item()


KEEPERS = [InDeque, InFile, MeanFromNone, InClosure, InIterator, InDraws]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KEEPERS)
def test_what_a_module_keeps_is_kept_as_under_transformers_checkpointing(kind, when):
    """Asking would leave its few tokens there, or NaN, and tiles would count: its layer is not
    asked and runs untiled.
    """
    found = []
    for way in ("ours", "stock", "exact"):
        model = tiny.llama(dtype=torch.float64)
        model = tiny.exact(model) if way == "exact" else model
        attention = model.model.layers[0].self_attn
        if way == "ours" and when == "after":
            report = hfpatch.apply(model, checkpointing=tiny.TILED)
        attention.v_proj = kind(attention.v_proj)
        if way == "ours" and when == "before":
            report = hfpatch.apply(model, checkpointing=tiny.TILED)
        if way != "ours":
            tiny.checkpoint(model)
        tiny.step(model, tiny.labelled())
        found.append(attention.v_proj.kept())
        if way == "ours":
            reason = look(model.model.layers[0]).reason
            assert reason.startswith(f"self_attn.v_proj: a {__name__}.{kind.__name__}")
            assert f"run untiled, their inputs offloaded: {reason}" in str(report)
    if isinstance(found[0], torch.Tensor):
        tiny.numerics.assert_close(*found, dtype=torch.float32)  # to which norms round
    else:
        assert found[0] == found[1]


class Plain(Keeper):
    """Each token by itself."""

    def note(self, x):
        self.shape = x.shape


class PlainNorm(nn.Module):
    def __init__(self, like):
        super().__init__()
        self.weight = like.weight

    def forward(self, x):
        self.shape = x.shape
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class Bare(nn.Module):
    """Without weights."""

    def forward(self, x):
        return torch.tanh(x)


def over_all_tokens(x):
    return x.cumsum(1)


@pytest.fixture
def declared():
    yield [hfpatch.token_wise(kind) for kind in (Plain, PlainNorm, Bare)]
    strangers._DECLARED.difference_update({Plain, PlainNorm, Bare})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at, kind", [("self_attn.v_proj", Plain), ("input_layernorm", PlainNorm)])
def test_a_class_that_is_declared_token_wise_is_tiled(at, kind, when, declared):
    stock = tiny.llama(dtype=torch.float64)
    ours = tiny.llama(dtype=torch.float64)
    if when == "after":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (stock, ours):
        layer = model.model.layers[0]
        holder, _, name = at.rpartition(".")
        setattr(layer.get_submodule(holder), name, kind(layer.get_submodule(at)))
    if when == "before":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    layer = ours.model.layers[0]
    assert not look(layer).reason and layer.get_submodule(at).shape[1] < tiny.TOKENS


@pytest.mark.parametrize("at", ["input_layernorm", "mlp.act_fn"])
def test_a_declared_module_with_another_forward_is_not_what_was_declared(at, declared):
    stock = tiny.llama(dtype=torch.float64)
    layer = stock.model.layers[0]
    holder, _, name = at.rpartition(".")
    made = Bare() if name == "act_fn" else PlainNorm(layer.get_submodule(at))
    setattr(layer.get_submodule(holder), name, made)
    made.forward = over_all_tokens
    ours = tiny.patched(stock)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert look(ours.model.layers[0]).reason == f"{at}: its forward is {__name__}'s"


def test_a_declaration_wants_a_class():
    with pytest.raises(
        ValueError,
        match="hfpatch: token_wise takes a class of torch.nn.Module, got Linear.* Pass the",
    ):
        hfpatch.token_wise(nn.Linear(2, 2))


def less_their_mean(forward):
    return lambda *args: (y := forward(*args)) - y.mean(1, keepdim=True)


@pytest.mark.parametrize("trained", [True, False])
def test_what_mixes_tokens_by_a_share_that_begins_as_zero_is_seen(trained):
    stock = tiny.llama(dtype=torch.float64)
    mlp = stock.model.layers[0].mlp
    mlp.down_proj = tiny.Shift(
        mlp.down_proj, nn.Parameter(torch.zeros((), dtype=torch.float64)) if trained else 0.0
    )
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
    stock = peft.get_peft_model(
        tiny.llama(dtype=torch.float64), peft.LoraConfig(target_modules=["v_proj"])
    )
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
    layer.mlp.forward = types.MethodType(less_their_mean(type(layer.mlp).forward), layer.mlp)
    tiny.step(ours, tiny.labelled())
    assert look(layer).reason
    del layer.mlp.forward
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert not look(layer).reason


@pytest.mark.parametrize(
    "way", [tiny.TILED, hfpatch.Checkpointing(tile=8, every=2)], ids=["tiled", "segments"]
)
def test_a_class_that_is_patched_before_the_backward(way, monkeypatch):
    """The layer would run again by another forward."""
    ours = tiny.patched(tiny.llama(dtype=torch.float64), checkpointing=way, rms_norm=False)
    loss, forward = ours(**tiny.labelled()).loss, LlamaMLP.forward
    other = less_their_mean(forward)
    monkeypatch.setattr(LlamaMLP, "forward", other)
    with pytest.raises(
        RuntimeError,
        match="hfpatch: hooks, forwards or merged adapters of a .*after backward",
    ):
        loss.backward()
    assert LlamaMLP.forward is other


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


def test_a_hook_that_moves_between_steps_fires_where_it_is():
    """The same function, from the layer to its attention, which a block's own code calls no more."""
    model, seen = tiny.patched(tiny.llama()), []
    layer = model.model.layers[0]
    hook = lambda module, *_: seen.append(module)  # noqa: E731
    for module in (layer, layer.self_attn, layer):
        handle = module.register_forward_hook(hook)
        model(**tiny.labelled()).loss.backward()
        handle.remove()
    assert list(dict.fromkeys(seen)) == [layer, layer.self_attn]
    assert seen[-1] is layer


def test_a_hook_that_takes_a_gradient_has_nothing_recorded_twice():
    """Its layers run untiled, and again for that gradient while the forward that records router
    logits is under way.
    """
    stock, factor = small_model("qwen3_moe"), nn.Parameter(torch.ones((), dtype=torch.float64))
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(offload="host", tile=8, plain=0))

    def hook(module, args, out):
        with torch.enable_grad():
            torch.autograd.grad(
                (factor * (out[0] if isinstance(out, tuple) else out).detach()).mean(), factor
            )

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
