"""Who runs a layer's experts: our op, or what the config names."""

import copy

import families
import pytest
import torch

import hfpatch
from hfpatch.layer.traits import layers_in
from hfpatch.ops import experts as op
from hfpatch.parts import experts
from tests import tiny
from tests.layer.test_adapted_experts import batch
from tests.layer.test_peft import assert_as_good


@pytest.fixture
def calls(monkeypatch):
    """`value` of each call of the op: None where the output is computed."""
    seen, real = [], experts.experts
    monkeypatch.setattr(
        experts, "experts", lambda *a, **kw: seen.append(kw["value"]) or real(*a, **kw)
    )
    return seen


# With router and balance loss, and biases of experts.
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_weights_train_in_tiles_and_the_second_product_runs_once(family, calls, monkeypatch):
    stock = families.small_model(family, torch.float32)
    ours = tiny.patched(stock)
    named = ours.config._experts_implementation
    sums, real = [], op.EXPERT_SUMS
    monkeypatch.setattr(
        "hfpatch.layer.weight_gradients.EXPERT_SUMS", lambda *a: sums.append(a[4]) or real(*a)
    )
    calls.clear()
    got = tiny.step(ours, batch())
    layers = len(layers_in(ours))
    assert calls.count(None) == len(calls) - calls.count(None) == 6 * layers
    assert len(sums) == 2 * 6 * layers and sums.count(True) == 2 * layers
    assert ours.config._experts_implementation == named
    assert_as_good(got, tiny.step(stock, batch()), tiny.step(tiny.exact(stock), batch()))


def test_another_backend_that_is_named_runs(calls):
    stock = families.small_model("qwen3_moe", torch.float32)
    stock.set_experts_implementation("batched_mm")
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    calls.clear()
    tiny.step(ours, batch())
    assert not calls and ours.config._experts_implementation == "batched_mm"


def test_experts_whose_gate_is_not_known_run_as_they_are_named(calls, monkeypatch):
    stock = families.small_model("qwen3_moe", torch.float32)
    kind = type(stock.model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: x.chunk(2, -1)[0].sin())
    stock.set_experts_implementation("grouped_mm")
    ours = tiny.patched(stock)
    calls.clear()
    got, plain = tiny.step(ours, batch()), tiny.step(stock, batch())
    assert not calls
    for name, value in plain.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


def test_a_backend_that_is_named_after_apply_runs_from_then_on(calls):
    stock = families.small_model("qwen3_moe", torch.float32)
    ours = tiny.patched(stock)
    exact = tiny.step(tiny.exact(stock), batch())  # by "eager": the others have no float64
    for name, runs in (("batched_mm", False), ("grouped_mm", True), ("eager", True)):
        ours.set_experts_implementation(name)
        stock.set_experts_implementation(name)
        calls.clear()
        assert_as_good(tiny.step(ours, batch()), tiny.step(stock, batch()), exact)
        assert bool(calls) is runs
