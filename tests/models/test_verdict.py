"""The verdict: the same wherever and however a model was made, within its limits, and the process is as it was after it."""

import random
from contextlib import contextmanager

import peft
import pytest
import tiny
import torch
from torch import nn

import hfpatch
from hfpatch.models import scaled, verdict
from hfpatch.models.finding import find_decoder


def asked(model):
    verdict._verdict.cache_clear()
    return verdict.ask_model(find_decoder(model), True)


@pytest.fixture(scope="module")
def expected():
    return asked(tiny.llama())


def state():
    return {
        "torch": torch.get_rng_state().tolist(), "python": random.getstate(), "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(), "grad": torch.is_grad_enabled(), "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(), "group": torch.distributed.is_initialized(),
        "inference": torch.is_inference_mode_enabled(), "autocast": torch.is_autocast_enabled("cpu"),
    }  # fmt: skip


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "nothing": lambda: torch.enable_grad(),
    "no_grad": torch.no_grad,
    "default_dtype": default_dtype,
    "default_device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_it_neither_sees_nor_touches_what_is_around(around, expected):
    model = tiny.llama()
    with SURROUNDINGS[around]():
        before = state()
        found = asked(model)
        assert state() == before
    assert found == expected and expected.answers[0].block and found.prefill


class Packed(nn.Linear):
    """A weight that cannot be run here, as a quantised one."""

    def forward(self, x):
        raise AssertionError("the model's own weights are not run")


def meta():
    with torch.device("meta"):
        return tiny.llama()


def quantised():
    model = tiny.llama()
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__, module.weight = (
                Packed,
                nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False),
            )
    return model


def adapted():
    return peft.get_peft_model(tiny.llama(), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))


@pytest.mark.parametrize("make", [meta, quantised, adapted])
def test_the_models_own_weights_do_not_matter(make, expected):
    assert asked(make()) == expected


def test_code_of_a_remote_repository_is_not_fetched(monkeypatch, expected):
    def fetch(*args, **kwargs):
        raise AssertionError("remote code")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", fetch)
    model = tiny.llama()
    model.config.auto_map = {"AutoModelForCausalLM": "someone/model--code.Model"}
    assert asked(model) == expected


@pytest.mark.parametrize("what", ["parameters", "seconds"])
def test_above_its_limits_layers_run_whole_and_it_is_said(what, monkeypatch):
    stock = tiny.llama()
    if what == "parameters":
        monkeypatch.setattr(scaled, "MOST_PARAMETERS", 1000)
    else:
        monkeypatch.setattr(verdict, "SECONDS", -1.0)
    found = asked(stock)
    reason = "a small instance would have" if what == "parameters" else "the verdict took more than"
    assert all(reason in answer.reason for answer in found.answers) and not found.ours and not found.prefill
    ours = tiny.patched(stock)
    assert "checkpointed whole" in str(hfpatch.apply(ours, checkpointing=tiny.TILED))
    tiny.assert_as_good(ours, stock, tiny.labelled())
    verdict._verdict.cache_clear()


def test_a_report_prints_on_rank_0_alone(monkeypatch):
    report = hfpatch.apply(tiny.llama())
    assert len(str(report).splitlines()) <= 10 and report.count("rms_norm") == 5
    monkeypatch.setenv("RANK", "1")
    assert str(report) == ""
