"""LoRA and QLoRA as sizes: against PEFT's own adapters, and the closed form against a simulated
step over quantised weights.
"""

import copy
import json
from dataclasses import replace

import families
import pytest
import torch
from tiny import LONG

from hfpatch.budget.adapters import BASES, Adapters, attention_linears, layer_linears
from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import step_memory
from hfpatch.budget.hardware import GPUS, PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Checkpointing, Policy
from hfpatch.budget.shape import ModelShape
from hfpatch.lab.presets import preset_config
from hfpatch.parts.quantised import as_trained
from hfpatch.planner.answer import PROCESS_BYTES
from hfpatch.planner.placements import resident
from hfpatch.planner.plan import plan
from tests.budget.test_shape import MORE, TINY, built

LAYERS = 2
CARDS = ("rtx4090", "rtx5090", "l40s", "a100-80gb", "h100")


def shape_of(config: dict, adapters: Adapters) -> ModelShape:
    return replace(ModelShape.from_config(config), adapters=adapters)


# A row of each layout of projections: apart, joined, half joined, ungated, latent.
@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4", "starcoder2", "deepseek_v3"])
@pytest.mark.parametrize("base", BASES)
def test_adapters_are_those_of_peft(kind, base):
    from hfpatch.lab.simulate.adapters import adapted

    config, model = built(kind, json.dumps(TINY | MORE.get(kind, {}) | {"hidden_size": 128}))
    shape = ModelShape.from_config(config)
    adapters = Adapters(4, base, tuple(attention_linears(shape)) if shape.experts else ())
    made, shape = adapted(copy.deepcopy(model), adapters), replace(shape, adapters=adapters)
    trained = [p for p in made.parameters() if p.requires_grad]
    assert shape.trained_parameters == sum(p.numel() for p in trained)
    stored = [
        *made.parameters(),
        *(b for n, b in made.named_buffers() if n.endswith(("scales", "nested"))),
    ]
    held = sum(t.numel() * t.element_size() for t in stored)
    # A tiny layer has less than one nested scale for the 16,384 weights that it serves.
    linears = sum(len(layer_linears(shape, i)) for i in range(shape.num_layers))
    assert held - 4 * linears * (base == "4bit") <= shape.parameter_bytes(4) <= held


def test_bytes_of_a_parameter():
    assert BASES["4bit"] == pytest.approx(0.516, abs=1e-3)
    config = preset_config("llama-3.1-8b")
    packed = shape_of(config, Adapters(16, "4bit"))
    assert packed.trained_parameters == 41_943_040  # as PEFT prints for r=16 on all linear layers
    assert packed.parameter_bytes() / 2**30 == pytest.approx(5.39, abs=0.01)
    some = shape_of(config, Adapters.of(16, "bf16", "q_proj, v_proj"))
    assert some.trained_parameters == 32 * 16 * (4096 + 4096 + 4096 + 1024)


def compare(base: str, tokens: int, policy: Policy, preset="llama-3.1-8b", rel=0.05, itemsize=None):
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    config, adapters, sizes = (
        preset_config(preset) | {"num_hidden_layers": LAYERS},
        Adapters(16, base, (), itemsize),
        {"batch": 1},
    )
    shape = shape_of(config, adapters)
    found = simulate(prepare(build(config, adapters=adapters), "hfpatch"), 1, tokens, policy=policy)
    planned, stays = (
        step_memory(shape, policy, tokens=tokens, **sizes),
        resident("gpu8bit", shape, 1, policy),
    )
    assert stays.parameters == pytest.approx(found.categories["parameters"], rel=1e-3)
    assert planned.gradients == pytest.approx(shape.trained_parameters * (itemsize or 2))
    assert max(m.beyond for m in planned.moments) == pytest.approx(found.most_beyond_bytes, rel=rel)
    assert planned.host + stays.host == pytest.approx(found.host_peak_bytes, rel=0.01)
    assert step_flops(shape, policy, tokens=tokens, **sizes).total == pytest.approx(
        found.flops["total"], rel=1e-3
    )


# The forward's, the tiles', the attention's and one tile's moment are the highest here, in this
# order.
@pytest.mark.parametrize("base, tokens, policy", [
    ("8bit", 32768, Policy("host", tile=4096)),
    ("4bit", 32768, Policy("host", tile=4096, save_attention=False)),
    ("4bit", 32768, Policy("host", tile=4096)), ("bf16", 8192, Policy("host")),
    ("bf16", 16384, Policy("host", tile=1024)),
    ("4bit", 16384, Policy("host", tile=1024)),
    ("bf16", 16384, Policy("host", tile=4096, frozen_weights="host")),
    ("4bit", 16384, Policy("gpu", every=2, frozen_weights="host")),
])  # fmt: skip
def test_agrees_with_the_simulator(base, tokens, policy):
    compare(
        base,
        tokens,
        policy,
        "llama-3.2-1b" if policy.tile == 4096 and policy.save_attention else "llama-3.1-8b",
    )


@pytest.mark.parametrize("preset, base, tokens, itemsize", [
    ("llama-3.2-1b", "bf16", 16384, 4), ("llama-3.2-1b", "bf16", 4096, 4),
    ("bigcode/starcoder2-7b", "4bit", 16384, None),
])  # fmt: skip
def test_adapters_of_float32_and_mlps_without_a_gate(preset, base, tokens, itemsize):
    compare(base, tokens, Policy("host", tile=4096), preset, itemsize=itemsize)


BY_NAME = ("o_proj", "experts.gate_up_proj", "experts.down_proj")


# gpt-oss stores its experts the other way round: "all-linear" leaves them out.
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("targets", [(), BY_NAME])
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
def test_adapters_of_experts_are_those_of_peft(kind, targets):
    from hfpatch.lab.simulate.adapters import adapted

    config, model = built(kind, json.dumps(TINY | MORE.get(kind, {}) | {"hidden_size": 128}))
    shape = ModelShape.from_config(config)
    adapters = Adapters(4, "bf16", targets)
    made, shape = adapted(copy.deepcopy(model), adapters), replace(shape, adapters=adapters)
    trained = [p for p in made.parameters() if p.requires_grad]
    assert shape.trained_parameters == sum(p.numel() for p in trained)
    found = as_trained(replace(shape, adapters=None), made)
    assert found.adapters.rank == 4 and {*found.adapters.targets} >= {*targets}


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("tokens", [32768, 131072, 342733])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("every", ["auto", 2, 4])
def test_agrees_with_the_simulator_everywhere(base, tokens, card, every):
    settings = Checkpointing(every=every)
    found = plan(
        "llama-3.1-8b",
        seq_len=tokens,
        gpu=GPUS[card],
        checkpointing=settings,
        adapters=Adapters(16, base),
    )
    compare(base, tokens, Policy(**found.policy))


def test_the_command_takes_adapters(capsys):
    from hfpatch.cli.main import main

    run = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--seq-len",
        "128k",
        "--gpu",
        "rtx4090",
        "--host-ram",
        "128GiB",
    ]
    assert main(run) == 3  # all weights do not fit
    assert main([*run, "--lora-r", "16", "--base", "4bit", "--max-seq-len", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    lengths = [(way["every"], way["seq_len"]) for way in found["longest"]]
    # auto is no worse than the interval set by hand
    assert lengths[0][1] >= lengths[1][1]
    assert [every for every, _ in lengths] == ["auto", 2, 4] and found["max_seq_len"] == lengths[0][
        1
    ] > 131072
    assert all(way["host_peak_bytes"] <= 0.9 * (128 << 30) for way in found["longest"])
    assert main([*run, "--base", "4bit"]) == 2 and "--lora-r" in capsys.readouterr().err
    assert main([*run, "--lora-r", "8", "--lora-target", "q_proj,nonesuch"]) == 2
    assert "'nonesuch' came" in capsys.readouterr().err
    assert main([*run, "--lora-r", "8", "--placement", "zero3-offload"]) == 2


def test_a_patched_model_is_sized_by_what_it_trains():
    """The policy of a session, and the report, know adapters and quantised layers."""
    from hfpatch.lab.simulate.adapters import adapted
    from hfpatch.parts.quantised import as_trained

    values = TINY | {"head_dim": 16}
    config, model = built("llama", json.dumps(values))
    shape = ModelShape.from_config(config)
    assert as_trained(shape, model.model.layers[0]) is shape
    for adapters in (Adapters(4, "4bit"), Adapters(8, "bf16", ("q_proj", "v_proj"))):
        made = adapted(copy.deepcopy(model), adapters)
        layer = made.base_model.model.model.layers[0]
        found = as_trained(shape, layer)
        assert found.trained_parameters == replace(shape, adapters=adapters).trained_parameters
        assert found.adapters.base == adapters.base
        assert as_trained(shape, made).adapters == found.adapters, (
            "the callback asks of the whole model"
        )
        torch.nn.Module.requires_grad_(layer.input_layernorm)  # a norm is trained as well
        assert as_trained(shape, layer) is shape


@LONG
def test_a_short_host_is_planned_with_fewer_inputs():
    """Neither memory has room for every layer's input: auto is no worse than the interval set by
    hand.
    """
    run = {
        "seq_len": 8192,
        "gpu": "rtx4090",
        "host_ram": "64GiB",
        "adapters": Adapters(16, "4bit"),
        "max_seq_len": True,
    }
    auto, second, _ = plan("llama-3.1-8b", **run).longest
    assert auto["seq_len"] >= second["seq_len"] > 320_000


def test_what_an_adapter_adds_to_is_not_kept():
    """It is computed again whatever is kept of it: nothing is reserved for it."""
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    some = replace(shape, adapters=Adapters(16, "bf16", ("q_proj", "v_proj")))
    assert some.keepable == shape.keepable == ("gate_up",)
    assert replace(shape, adapters=Adapters(16, "bf16", ())).keepable == ()
    assert replace(shape, adapters=Adapters(16, "bf16", ("up_proj",))).keepable == ()


def test_a_base_that_does_not_fit_waits_on_the_host():
    run = {"seq_len": 131072, "gpu": "rtx4090", "host_ram": "384GiB", "adapters": Adapters(16)}
    large = plan("llama-3.1-70b", **run)
    assert large.fits and large.policy["frozen_weights"] == "host" and large.policy["plain"] == 0
    assert large.gpu_peak_bytes <= 23 << 30 and large.host_peak_bytes > 128 << 30
    pinned = large.host_peak_bytes - PROCESS_BYTES  # checkpoints and weights
    assert large.first_step["pinning"] == pytest.approx(pinned / PIN_BYTES_PER_SECOND)
    # Hidden, each layer's 1.6 GiB behind its work on 131,072 tokens, but for what no layer stands
    # behind.
    assert large.seconds["copy_wait"] < 1e-4 * large.step_seconds
    short = plan("llama-3.1-70b", **run | {"seq_len": 2048})
    # No work is long enough there: the step takes at least what the weights take over the link, twice.
    link = GPUS["rtx4090"].link_rate
    assert short.step_seconds > 1.9 * short.link_bytes / 2 / link > 2 * 128 / 32
    assert short.seconds["copy_wait"] > 0.2 * short.step_seconds
    # One that fits stays, and goes where it is asked to.
    small = plan("llama-3.1-8b", **run | {"seq_len": 8192})
    assert small.policy["frozen_weights"] == "gpu"
    asked = plan(
        "llama-3.1-8b",
        **run | {"seq_len": 8192, "checkpointing": Checkpointing(frozen_weights="host")},
    )
    assert asked.gpu_bytes["parameters"] < 0.25 * small.gpu_bytes["parameters"]
    assert asked.host_peak_bytes > 16 << 30 and asked.link_bytes > 24 << 30
    with pytest.raises(
        ValueError, match="^hfpatch: weights on the host are a frozen base's[^\n]*$"
    ):
        plan("llama-3.1-8b", seq_len=8192, checkpointing=Checkpointing(frozen_weights="host"))
    # The session leaves them on GPUs that share rows.
    shared = run | {"seq_len": 8192, "gpus": 8, "sp_size": 8}
    assert plan("llama-3.1-70b", **shared).policy["frozen_weights"] == "gpu"
    with pytest.raises(ValueError, match="^hfpatch: weights on the host [^\n]*--sp-size 8[^\n]*$"):
        plan("llama-3.1-70b", **shared, checkpointing=Checkpointing(frozen_weights="host"))


def test_a_simulated_model_without_such_layers_is_refused_in_a_sentence():
    """PEFT adapts no out_proj of Mamba 2, whose kernel reads the weight itself."""
    from hfpatch.lab.simulate.adapters import adapted

    cases = (
        ("nemotron_h", Adapters(4), "'out_proj' is incompatible with Mamba-based models"),
        ("lfm2", Adapters(4, targets=("nonesuch",)), "{'nonesuch'} not found"),
    )
    for name, adapters, why in cases:
        with pytest.raises(ValueError) as raised:
            adapted(families.small_model(name), adapters)
        said = str(raised.value)
        assert said.startswith("hfpatch: expected Linear layers that PEFT adapts") and why in said
        assert said.endswith("name others with --lora-target.")
