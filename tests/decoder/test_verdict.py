"""The verdict: the same wherever and however a model was made, within its limits, and the process
is as it was after it.
"""

import copy
import random
import types
from contextlib import contextmanager

import peft
import pytest
import tiny
import torch
from test_users_modules import less_their_mean
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaModel,
    Qwen2Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

import hfpatch
from hfpatch.decoder import small_instance as scaled
from hfpatch.decoder import verdict
from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.small_instance import scaled_config
from hfpatch.layer.condition import look


def asked(model):
    verdict._verdicts.clear()
    return verdict.ask_model(find_decoder(model))


@pytest.fixture(scope="module")
def expected():
    return asked(tiny.llama())


def state():
    return {
        "torch": torch.get_rng_state().tolist(), "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(), "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(), "group": torch.distributed.is_initialized(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
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
    assert found == expected and expected.answers[0].attention and found.ours


class Packed(nn.Linear):
    """A weight that cannot be run here, as one that a library quantised."""

    __module__ = "hqq.core.quantize"

    def _run(self, x):
        raise AssertionError("the model's own weights are not run")

    forward = types.FunctionType(_run.__code__, {"__name__": __module__})


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
    return peft.get_peft_model(
        tiny.llama(), peft.LoraConfig(target_modules=["q_proj", "down_proj"])
    )


@pytest.mark.parametrize("make", [meta, quantised, adapted])
def test_the_models_own_weights_do_not_matter(make, expected):
    assert asked(make()) == expected


class ShiftingLinear(nn.Linear):
    """tiny.Shift as a Linear."""

    def __init__(self, inner, share):
        super().__init__(
            inner.in_features, inner.out_features, bias=False, dtype=inner.weight.dtype
        )
        self.weight, self.share = inner.weight, share

    forward = lambda self, x: tiny.Shift.forward(self, x)  # noqa: E731
    inner = nn.Linear.forward


@pytest.mark.parametrize("at", ["mlp.down_proj", "mlp.down_proj.linear", "input_layernorm"])
def test_a_layer_with_a_module_of_the_users_own_runs_whole(at):
    """No small instance of the config holds it; the next layer has no such module and is tiled."""

    def model(share):
        made = tiny.llama(dtype=torch.float64)
        holder, _, name = at.removesuffix(".linear").rpartition(".")
        holder, kind = (
            made.model.layers[1].get_submodule(holder),
            ShiftingLinear if at.endswith("linear") else tiny.Shift,
        )
        setattr(holder, name, kind(getattr(holder, name), share))
        return made

    stock = model(0.5)
    ours = tiny.patched(stock)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    first, second = (look(layer).reason for layer in ours.model.layers[:2])
    assert first is None and second
    report = str(ours._hfpatch_report)
    assert f"1 of 2 layers run untiled, their inputs offloaded: {second}" in report


def test_a_layer_given_a_module_after_apply_runs_whole(capsys):
    stock = tiny.llama(dtype=torch.float64)
    ours = tiny.patched(stock)
    for step, layer in enumerate((1, 0)):  # before the first step, and after it
        for model in (stock, ours):
            mlp = model.model.layers[layer].mlp
            mlp.down_proj = ShiftingLinear(mlp.down_proj, 0.5)
        tiny.assert_equal_in_double(ours, stock, tiny.labelled())
        whole = [bool(look(m).reason) for m in ours.model.layers[:2]]
        assert whole == [step == 1, True]
    assert "run untiled, their inputs offloaded: mlp.down_proj: a " in capsys.readouterr().err


def _last_doubled(forward):
    return lambda *args: (
        (y := forward(*args)) + torch.cat([torch.zeros_like(y[:, 1:]), y[:, -1:]], 1)
    )


@pytest.mark.parametrize("other", [less_their_mean, _last_doubled], ids=["mixes", "by place"])
@pytest.mark.parametrize("when", ["before", "after", "class"])
def test_forwards_of_the_users_own_see_whole_rows(when, other, monkeypatch):
    """No verdict tells of them: what they make of a tile's tokens is not what they make of a
    row's.
    """
    stock = tiny.llama(dtype=torch.float64)

    def replace(model):
        mlp = model.model.layers[0].mlp
        if when == "class":
            monkeypatch.setattr(LlamaMLP, "forward", other(LlamaMLP.forward))
        else:
            mlp.forward = types.MethodType(other(type(mlp).forward), mlp)

    if when == "before":
        replace(stock)
    ours = tiny.patched(stock)
    if when != "before":
        tiny.step(ours, tiny.labelled())
        for model in (stock, ours)[: 1 + (when != "class")]:
            replace(model)
    tiny.assert_equal_in_double(ours, stock, tiny.labelled())
    assert look(ours.model.layers[0]).reason


def test_code_of_a_remote_repository_is_not_fetched(monkeypatch, expected):
    def fetch(*args, **kwargs):
        raise AssertionError("remote code")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", fetch)
    model = tiny.llama()
    model.config.auto_map = {"AutoModelForCausalLM": "someone/model--code.Model"}
    assert asked(model) == expected


def test_above_its_limit_layers_run_whole_and_it_is_said(monkeypatch):
    stock = tiny.llama()
    monkeypatch.setattr(scaled, "MOST_PARAMETERS", 1000)
    found = asked(stock)
    reason = "a small instance would have"
    assert all(reason in answer.reason for answer in found.answers) and not found.ours
    ours = tiny.patched(stock)
    assert "run untiled" in str(hfpatch.apply(ours, checkpointing=tiny.TILED))
    tiny.assert_as_good(ours, stock, tiny.labelled())
    verdict._verdicts.clear()


def test_a_report_prints_on_rank_0_alone(monkeypatch):
    report = hfpatch.apply(tiny.llama())
    assert len(str(report).splitlines()) <= 10 and report.count("rms_norm") == 5
    monkeypatch.setenv("RANK", "1")
    assert str(report) == ""


class _OwnStack(LlamaModel):
    def __init__(self, config, n_more):
        super().__init__(config)
        self.more = torch.nn.Parameter(torch.ones(n_more))


@pytest.mark.parametrize("name", ["own", "late"])
def test_stacks_that_cannot_be_made_as_they_are_have_a_small_instance(name):
    """A user's subclass asks more than a config of its __init__; Qwen2's windows begin at layer 17:
    packed rows were refused.
    """
    config = scaled_config(
        Qwen2Config() if name == "late" else LlamaConfig(), 18 if name == "late" else 2
    )
    if name == "late":
        config.sliding_window, config.layer_types = (
            8,
            ["full_attention"] * 17 + ["sliding_attention"],
        )
    stock = AutoModelForCausalLM.from_config(config).double()
    if name == "own":
        stock.model = _OwnStack(config, 3).double()
    ids = torch.randint(1, config.vocab_size, (1, 40))
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    with torch.no_grad():
        wanted = torch.cat(
            [stock(input_ids=part, use_cache=False).logits for part in ids.split((17, 23), 1)], 1
        )
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=16))
    assert "untiled" not in str(report)
    got = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()


def test_layers_in_a_module_that_takes_no_token_ids_are_none_to_try():
    """BERT's, as a decoder: they run untiled."""
    config = CONFIG_MAPPING["bert"](num_hidden_layers=2, is_decoder=True, **_SIZES)
    report = str(hfpatch.apply(AutoModelForCausalLM.from_config(config)))
    assert "no small instance of it could be tried" in report


_SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_ODD = {  # sizes, and how many layers are tiled
    "recurrent_gemma": ({"num_hidden_layers": 3, "head_dim": 16, "lru_width": 64,
                         "attention_window_size": 8}, 3),
    "zamba": ({"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
               "attention_hidden_size": 128,
               "attention_head_dim": 32, "mamba_d_state": 8, "mamba_dt_rank": 8}, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "recurrent_gemma",
        pytest.param(
            "zamba",
            marks=tiny.not_before_transformers(
                (5, 23), "names its kinds of layers in another list"
            ),
        ),
    ],
)
def test_a_stack_that_keeps_states_or_shares_weights_has_a_small_instance(name):
    """RecurrentGemma holds the last state of its scan, graph and all, which is not to be copied;
    Zamba's layers with attention share weights, and one alone is refused. The Mamba behind takes
    what attention gave: these two run untiled.
    """
    sizes, tiled = _ODD[name]
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 4}
    stock = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**_SIZES, **ids, **sizes)).train()
    ours = copy.deepcopy(stock)
    options = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}
    report = hfpatch.apply(
        ours, checkpointing=hfpatch.Checkpointing(offload="host", tile=16), **options
    )
    assert "no small instance" not in str(report)
    assert sum(layer._hfpatch.traits.reason is None for layer in ours.model.layers) == tiled
    batch = torch.randint(1, 64, (2, 40))
    for model in (stock, ours):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    for value, got in zip(stock.parameters(), ours.parameters()):
        assert (got.grad - value.grad).norm() <= 1e-4 * value.grad.norm().clamp_min(1e-3)


class _Watched(nn.Linear):
    """Counts its calls and sums what it gives, in training."""

    def __init__(self, like: nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=False, dtype=like.weight.dtype)
        self.weight = like.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(like.out_features, dtype=like.weight.dtype))

    def forward(self, x):
        y = nn.functional.linear(x, self.weight)
        if self.training:
            self.calls += 1
            self.total += y.detach().sum((0, 1))
        return y


@pytest.mark.parametrize("first", ["train", "eval"])
def test_buffers_that_a_forward_writes_to_are_written_to_as_in_transformers(first):
    """Tiles would count their calls, and asking leaves its few tokens, or NaN, in a running
    mean.
    """
    stock, ours = tiny.llama(dtype=torch.float64), tiny.llama(dtype=torch.float64)
    tiny.checkpoint(stock)
    for model in (stock, ours):
        model.model.layers[0].self_attn.v_proj = _Watched(model.model.layers[0].self_attn.v_proj)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=5))
    for model in (stock, ours):
        if first == "eval":
            with torch.no_grad():
                model.eval()(tiny.ids())
        model.train()
        tiny.step(model, tiny.labelled())
    got, wanted = (dict(m.model.layers[0].named_buffers()) for m in (ours, stock))
    assert wanted["self_attn.v_proj.calls"] == 2 and got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += self.training
        return weight


def test_what_makes_a_weight_is_called_as_in_transformers():
    """As spectral norm's power iteration: a Linear with a parametrization, whose forward is torch's
    own.
    """
    stock, ours = tiny.llama(dtype=torch.float64), tiny.llama(dtype=torch.float64)
    tiny.checkpoint(stock)
    for model in (stock, ours):
        torch.nn.utils.parametrize.register_parametrization(
            model.model.layers[0].self_attn.v_proj, "weight", _Counting()
        )
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=5))
    for model in (stock, ours):
        model.model.layers[0].self_attn.v_proj.parametrizations.weight[0].calls.zero_()
        tiny.step(model, tiny.labelled())
    assert [
        m.model.layers[0].self_attn.v_proj.parametrizations.weight[0].calls for m in (stock, ours)
    ] == [2, 2]


@pytest.mark.parametrize(
    "kind",
    ["zamba2", "rwkv"],
)
def test_sizes_that_follow_from_others_fit_a_small_instance(kind):
    """Zamba 2's config computes head sizes once, from the real sizes; RWKV's weights begin by a
    layer's share of the depth.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    reasons = {answer.reason for answer in asked(model).answers}
    assert reasons <= {None, "its mixers depend on each other"} and (None in reasons) == (
        kind == "zamba2"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "glm4v",
        *(
            pytest.param(k, marks=pytest.mark.long)
            for k in ("glm_ocr", "ernie4_5_vl_moe", "mistral4", "qwen2_vl")
        ),
    ],
)
def test_what_is_rotated_fits_a_small_instance(kind):
    """Sections of positions in time, height and width, which many configs leave to the code, add up
    to what a small head turns.
    """
    if kind not in CONFIG_MAPPING:
        pytest.skip("unknown to this transformers")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind]())
    assert {answer.reason for answer in asked(model).answers} == {None}
