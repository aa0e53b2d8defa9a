"""Modules, forwards and functions of the user's own inside a layer: what they keep, and what comes,
changes and goes.
"""

from collections import deque

import peft
import pytest
import tiny
import torch
from peft.tuners.lora import layer as lora
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

import hfpatch
from hfpatch.layer import strangers
from hfpatch.layer.condition import look


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


class MeanFromNone(Keeper):
    def begin(self):
        self.mean = None

    def note(self, x):
        mean = x.detach().mean((0, 1))
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean

    def kept(self):
        return self.mean


KEEPERS = [InDeque, MeanFromNone]


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


@pytest.fixture
def declared():
    yield [hfpatch.token_wise(kind) for kind in (Plain, PlainNorm, Bare)]
    strangers.TOKEN_WISE.difference_update({Plain, PlainNorm, Bare})


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
    made.forward = lambda x: x.cumsum(1)
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
        match="hfpatch: modules, hooks, forwards or merged adapters of a .*after backward",
    ):
        loss.backward()
    assert LlamaMLP.forward is other
