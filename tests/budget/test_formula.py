"""The closed form against the simulator, which runs the code that the closed form describes."""

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from hfpatch.budget.choice import choose
from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import ModelShape, step_memory
from hfpatch.budget.hardware import GPUS, gpu_named, gpu_row
from hfpatch.budget.policy import (
    KEEPABLE,
    Policy,
    auto_tile,
    parse_checkpointing,
)
from hfpatch.lab.presets import PRESETS, preset_config
from hfpatch.lab.stock import flops_of, memory_of
from hfpatch.planner.limits import parse_bytes

EXPERTS = tiny.not_before_transformers(
    (5, 10),
    "gathers experts' rows twice, weighs them in float32 or adds biases beside them: a tile of "
    "them keeps more",
)
LAYERS = 3  # a first, a middle and a last one: more of them only repeat the middle
# What is kept beside: one by one where it matters, all together, behind plain layers.
KEEPS = (
    Policy("host", keep=KEEPABLE),
    Policy("gpu", keep=KEEPABLE),
    Policy("gpu", keep=KEEPABLE, plain=1),
    Policy("host", plain=2),
    Policy("host", keep=KEEPABLE, save_attention=False),
)
SOME = (
    Policy("host", again=1, keep=KEEPABLE),
    Policy("host", again=2),  # attention outputs of the first layers alone
    Policy("host", wide=True),
)
WHOLE = {"stock": "hf", "stock-checkpointing": "hf-ckpt", "off": "hfpatch-off"}
POLICIES = (
    Policy("host"), Policy("host", save_attention=False), Policy("gpu"),
    Policy("host", every=2, save_attention=False), Policy("gpu", every=3, save_attention=False),
)  # fmt: skip


def compare(preset, tokens, batch, policy, layers=LAYERS):
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    config = preset_config(preset) | {"num_hidden_layers": layers}
    shape = ModelShape.from_config(config)
    tiled = isinstance(policy, Policy)
    model = prepare(build(config), "hfpatch" if tiled else WHOLE[policy])
    found = simulate(model, batch, tokens, policy=policy if tiled else None)
    planned = memory_of(shape, policy, batch=batch, tokens=tokens)
    flops = flops_of(shape, policy, batch=batch, tokens=tokens)
    assert planned.parameters == pytest.approx(found.categories["parameters"], rel=1e-3)
    assert planned.peak == pytest.approx(found.peak_bytes, rel=0.03)
    # a tied weight's gradient, until it is whole, is the simulator's activation and our gradient
    if not shape.tied:
        # The peak may lie at either of two moments that are equal within the rounding of 512 bytes.
        near = [m.beyond for m in planned.moments if m.total >= 0.999 * planned.peak_moment.total]
        assert any(b == pytest.approx(found.beyond_bytes, rel=0.03) for b in near), (
            near,
            found.beyond_bytes,
        )
    assert planned.host == pytest.approx(found.host_peak_bytes, rel=0.03)
    assert flops.total == pytest.approx(found.flops["total"], rel=1e-3)


# Short: each policy once, at a length of several tiles; one tile; a batch; layers that run whole;
#     tied weights.
@pytest.mark.parametrize("preset, tokens, batch, policy", [
    *(("llama-3.1-8b", 32768, 1, dataclasses.replace(p, tile=auto_tile(32768))) for p in POLICIES),
    *(("llama-3.1-8b", 32768, 1, dataclasses.replace(p, tile=4096)) for p in SOME),
    ("llama-3.1-8b", 131072, 1, Policy("host")), ("llama-160m", 5000, 3, Policy("host", tile=4096)),
    ("llama-3.2-1b", 8192, 1, Policy("host")), ("llama-3.1-8b", 16384, 1, "stock"),
    ("llama-3.1-8b", 16384, 1, "stock-checkpointing"), ("llama-3.1-8b", 16384, 1, "off"),
    *(("llama-3.1-8b", 32768, 1, dataclasses.replace(p, tile=4096)) for p in KEEPS[2:5]),
    *(("llama-3.1-8b", 8192, 1, p) for p in KEEPS[1:3]), ("llama-3.1-8b", 8193, 1, KEEPS[0]),
    # Norms of q and k keep what they are given, in a plain layer and in one tile's graph.
    ("Qwen/Qwen3-8B", 8192, 1, Policy("gpu", plain=2)), ("Qwen/Qwen3-8B", 16384, 1, Policy("host",
                                                                                           tile=16384)),
    # windows in a layer that runs whole
    ("google/gemma-3-12b", 8192, 1, Policy("gpu", plain=1, keep=("gate_up",))),
    # The gradients of what experts were given.
    pytest.param("Qwen/Qwen3-30B-A3B", 32768, 1, Policy("gpu", plain=2, tile=32768), marks=EXPERTS),
    # Latent attention in one tile and in plain layers; no gate; joined projections; norms in plain
    # float32 operations.
    ("deepseek-ai/DeepSeek-V3", 8192, 1, Policy("host", tile=8192)),
    ("deepseek-ai/DeepSeek-V3", 32768, 1, Policy("gpu", plain=2)),
    ("bigcode/starcoder2-7b", 32768, 1, Policy("host", tile=32768)),
    ("microsoft/phi-4", 16384, 1, Policy("gpu", plain=2)),
    ("CohereLabs/c4ai-command-r-v01", 16384, 1, Policy("host", plain=1, tile=16384)),
])  # fmt: skip
def test_agrees_with_the_simulator(preset, tokens, batch, policy):
    compare(preset, tokens, batch, policy)


@pytest.mark.parametrize("policy", [
    Policy("host", tile=8192), Policy("host", tile=2048), Policy("host", tile=8192, plain=1),
    Policy("host", tile=8192, save_attention=False),
])  # fmt: skip
def test_layers_of_experts_behind_dense_ones_take_more_beyond_gradients(policy):
    """DeepSeek's first layers are dense: beside the fewest gradients its last ones take the most,
    which is what a second micro-step meets, whose gradients are all there.
    """
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    config = preset_config("deepseek-ai/DeepSeek-V3") | {"num_hidden_layers": 5}
    shape = ModelShape.from_config(config)
    found = simulate(prepare(build(config), "hfpatch"), 1, 8192, policy=policy)
    planned = step_memory(shape, policy, batch=1, tokens=8192)
    most = max(m.beyond for m in planned.moments)
    assert 0.995 * found.most_beyond_bytes < most < 1.05 * found.most_beyond_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    "preset", ["llama-160m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b"]
)
@pytest.mark.parametrize("tokens", [2048, 8192, 20000, 65536, 131072])
@pytest.mark.parametrize("policy", [*POLICIES, *KEEPS, *WHOLE])
def test_agrees_with_the_simulator_everywhere(preset, tokens, policy):
    if isinstance(policy, Policy):
        policy = dataclasses.replace(policy, tile=auto_tile(tokens))
    compare(preset, tokens, 1, policy)


# Layers that hold one of each kind: Gemma 3 has a period of six, the others repeat after two.
#     (preset, layers)
FAMILIES = (
    ("Qwen/Qwen3-8B", 2), ("mistralai/Mistral-7B-v0.3", 2), ("google/gemma-3-12b", 6),
    pytest.param("Qwen/Qwen3-30B-A3B", 2, marks=EXPERTS),
    pytest.param("openai/gpt-oss-20b", 2, marks=EXPERTS),
)  # fmt: skip


def least(config, tokens):
    """(shape, policy, the step's memory, the most beyond parameters and gradients) with the least
    memory of the device.
    """
    shape = ModelShape.from_config(config)
    policy = choose(parse_checkpointing("least"), shape, batch=1, tokens=tokens)
    planned = step_memory(shape, policy, batch=1, tokens=tokens)
    # A tied weight's gradient, until it is whole at the embedding, is the simulator's activation
    # and our gradient.
    tied = 2 * shape.embedding_parameters if shape.tied else 0
    most = max(m.beyond + (0 if m.name.startswith("embedding") else tied) for m in planned.moments)
    return shape, policy, planned, most


def simulated_least(config, policy, tokens):
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    return simulate(prepare(build(config), "hfpatch"), 1, tokens, policy=policy)


# What the table of benchmarks promises and what was asked of each model: (preset, tokens, GiB at
# the most).
BARS = (
    ("llama-3.1-8b", 131072, 5.6), ("llama-3.1-8b", 32768, 2.4), ("Qwen/Qwen3-8B", 131072, 6.2),
    ("Qwen/Qwen3-8B", 32768, 2.5), ("mistralai/Mistral-7B-v0.3", 131072, 5.9),
    ("google/gemma-3-12b", 131072, 8.6),
    ("Qwen/Qwen3-30B-A3B", 131072, 7.0),
)  # fmt: skip


@pytest.mark.parametrize("preset, tokens, most", BARS)
def test_the_least_memory_stays_below_its_bar(preset, tokens, most):
    assert 0.4 * most * 2**30 < least(preset_config(preset), tokens)[3] <= most * 2**30


PAGE = Path(__file__).parents[2] / "docs/benchmarks/index.md"
# As the page of benchmarks names them: the presets of its sentence on other families.
NAMED = (
    ("Qwen3-8B", "Qwen/Qwen3-8B"), ("Mistral-7B", "mistralai/Mistral-7B-v0.3"),
    ("Gemma3-12B", "google/gemma-3-12b"),
    ("gpt-oss-20b", "openai/gpt-oss-20b"), ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
)  # fmt: skip


def test_the_page_has_the_least_memory_that_is_planned():
    page = " ".join(PAGE.read_text().split())
    for name, preset in NAMED:
        assert f"{name} {least(preset_config(preset), 131072)[3] / 2**30:.1f}" in page


# The table of a step is simulated: (name there, implementation and policy in profiles/plan).
ROWS = (
    ("transformers, no checkpointing", "hf", ""), ("transformers' checkpointing", "hf-ckpt", ""),
    ("the same with `offload` and TRL's fused head", "trl-offload", ""),
    ("the same with TRL's `selective`", "trl-selective", ""),
    ("Liger's kernels and head, `selective`, `offload`", "liger-selective", ""),
    ("Liger, its tiled MLP, `offload` (the ALST recipe)", "liger-tiled-offload", ""),
    ("hfpatch, inputs and attention on the host", "hfpatch", ""),
    ('hfpatch, `checkpointing="least"`', "hfpatch", "least"),
)  # fmt: skip


# README has the most memory of five of these rows, one of them under a shorter name.
SHORT = {"transformers, no checkpointing": "transformers"}


def test_the_pages_have_the_steps_that_were_simulated():
    root, shown = Path(__file__).parents[2], 0
    with open(root / "profiles/plan/results.csv") as file:
        found = [r for r in csv.DictReader(file) if r["model"] == "llama-3.1-8b"]
    for name, implementation, policy in ROWS:
        rows = [r for r in found if (r["implementation"], r["policy"]) == (implementation, policy)]
        assert [r["tokens"] for r in rows] == ["8192", "32768", "131072"]
        gib = [[float(r[k]) for k in ("beyond_gib", "most_gib", "host_gib")] for r in rows]
        cells = [name, *(f"{beyond:.1f} / {most:.1f}, {host:.0f}" for beyond, most, host in gib)]
        cells += [rows[-1]["attention"], f"{float(rows[-1]['matmul']):.2f}"]
        assert f"| {' | '.join(cells)} |" in PAGE.read_text()
        readme = (root / "README.md").read_text()
        if f"| {SHORT.get(name, name)} |" in readme:
            most = [f"{figures[1]:.1f} | {figures[2]:.0f}" for figures in gib]
            line = " | ".join([SHORT.get(name, name), *most])
            assert f"| {line} |" in readme
            shown += 1
        if policy:  # as the closed form has it
            for r, figures in zip(rows, gib):
                _, _, planned, most = least(preset_config("llama-3.1-8b"), int(r["tokens"]))
                assert [n / 2**30 for n in (planned.beyond, most, planned.host)] == pytest.approx(
                    figures, rel=0.05
                )
    assert shown == 5


@pytest.mark.long
@pytest.mark.parametrize("preset, tokens, most", BARS)
def test_the_least_memory_stays_below_its_bar_in_the_simulator(preset, tokens, most):
    config = preset_config(preset)
    assert (
        simulated_least(config, least(config, tokens)[1], tokens).most_beyond_bytes <= most * 2**30
    )


def compare_family(preset, layers, tokens, close=0.05):
    """close: of the highest total."""
    config = preset_config(preset) | {"num_hidden_layers": layers}
    shape, policy, planned, most = least(config, tokens)
    found = simulated_least(config, policy, tokens)
    assert planned.peak == pytest.approx(found.peak_bytes, rel=close)
    assert most == pytest.approx(found.most_beyond_bytes, rel=0.05)
    assert planned.host == pytest.approx(found.host_peak_bytes, rel=0.01)
    assert step_flops(shape, policy, batch=1, tokens=tokens).total == pytest.approx(
        found.flops["total"], rel=1e-3
    )


@pytest.mark.parametrize("preset, layers", FAMILIES)
def test_other_families_agree_with_the_simulator(preset, layers):
    """Each of the five at the shortest of its lengths; the long test has the rest."""
    compare_family(preset, layers, 8192, close=0.02)


@pytest.mark.long
@pytest.mark.parametrize("preset, layers", FAMILIES)
@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
def test_other_families_agree_with_the_simulator_everywhere(preset, layers, tokens):
    compare_family(preset, layers, tokens)


def test_llama_8b_at_128k_keeps_its_promise():
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    sizes = {"batch": 1, "tokens": 131072}
    GiB = 2**30
    assert step_memory(shape, Policy("host"), **sizes).beyond <= 7.5 * GiB
    assert step_memory(shape, Policy("host", tile=4096), **sizes).beyond <= 6.0 * GiB
    assert step_memory(shape, Policy("host", tile=4096), batch=1, tokens=32768).beyond <= 2.5 * GiB
    million = step_memory(shape, Policy("host"), batch=1, tokens=1 << 20).beyond
    assert million <= 56 * 1024 * (1 << 20)
    assert step_flops(shape, Policy("host"), **sizes).total == pytest.approx(2.30e16, rel=0.01)


def test_parameters_of_presets():
    counts = {name: ModelShape.from_config(preset_config(name)).parameters for name in PRESETS}
    # As the model cards and transformers' own count have them.
    assert counts == {"llama-tiny": 158016, "llama-160m": 162417408, "llama-3.2-1b": 1235814400,
                      "llama-3.2-3b": 3212749824, "llama-3.1-8b": 8030261248,
                      "llama-3.1-70b": 70553706496}  # fmt: skip


@pytest.mark.parametrize("change, word", [
    ({"model_type": "mamba"}, "'mamba' came"), ({"hidden_size": None}, "lacks hidden_size"),
    ({"num_attention_heads": 3}, "multiple"), ({"num_hidden_layers": 0}, "at least 1"),
])  # fmt: skip
def test_shape_refuses_in_one_sentence(change, word):
    with pytest.raises(ValueError, match=f"^hfpatch: [^\n]*{word}[^\n]*$"):
        ModelShape.from_config(preset_config("llama-tiny") | change)


def test_hardware_rows():
    assert gpu_row("A100-80GB") is gpu_row("a100") is GPUS["a100-80gb"]
    assert gpu_row("RTX 4090") is GPUS["rtx4090"]
    # As drivers give them; two cards of one name differ by their memory, and its rate.
    for name, row in (
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X", "mi300x"),
    ):  # fmt: skip
        assert gpu_named(name) is GPUS[row]
    assert gpu_named("NVIDIA H100 PCIe") is gpu_named("NVIDIA A10") is None
    with pytest.raises(ValueError, match="a100-40gb, a100-80gb, h100, .*'gtx' came"):
        gpu_row("gtx")
    assert all(row.source and row.usable_bytes < row.memory_bytes for row in GPUS.values())


@pytest.mark.parametrize(
    "text, expected", [("256GiB", 256 << 30), ("1.5 TB", 1_500_000_000_000), (12, 12), ("7B", 7)]
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "12 parsecs", "-3GiB", "", None, True, "256", "1e400GiB", "nanGB", float("inf")]
)
def test_sizes_refused(text):
    with pytest.raises(ValueError, match="^hfpatch: a size is"):
        parse_bytes(text)


def test_needs_no_torch():
    code = "import sys, hfpatch.planner.plan, hfpatch.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
