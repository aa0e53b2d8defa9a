"""FLOPs by the closed form: windows, experts, what runs again, and what nobody reads."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.choice import decide
from hfpatch.budget.cuts import head_groups
from hfpatch.budget.flops import attended, step_flops
from hfpatch.budget.formula import step_memory
from hfpatch.budget.hardware import GPUS, GiB
from hfpatch.budget.policy import Checkpointing, Policy, parse_checkpointing
from hfpatch.budget.seconds import (
    FORWARD_SHARE,
    HOST_SECONDS_PER_LAYER,
    HOST_SECONDS_PER_TILE,
    HOST_SECONDS_PLAIN,
    SUM_BYTES,
    SUM_BYTES_ONCE,
    step_time,
    tails,
)
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.traffic import elementwise, layer_passes
from hfpatch.lab.presets import preset_config
from hfpatch.lab.stock import STOCK_FACTOR, STOCK_LOGIT_BYTES, UNTILED, flops_of


def shape_of(name, **change):
    return ModelShape.from_config(preset_config(name) | change)


def test_a_window_is_counted_pair_by_pair():
    def pairs(tokens, window):
        return sum(min(i + 1, window or tokens) for i in range(tokens))

    for tokens, window in ((64, 0), (64, 16), (64, 64), (64, 100), (1000, 1)):
        # The closed form leaves out half the diagonal, as kernels' published rates do.
        seen = min(window or tokens, tokens)
        assert attended(tokens, window) == pairs(tokens, window) - seen / 2


def test_windows_leave_attention_to_the_layers_that_see_all():
    gemma = shape_of("google/gemma-3-12b")
    whole = flops_of(
        shape_of("google/gemma-3-12b", layer_types=["full_attention"] * 48),
        UNTILED,
        batch=1,
        tokens=131072,
    )
    windowed = flops_of(gemma, UNTILED, batch=1, tokens=131072)
    assert sum(w == 0 for w in gemma.windows) == 8
    assert windowed.attention_forward / whole.attention_forward == pytest.approx(
        (8 + 40 * (1024 * 131072 - 1024**2 / 2) / (131072**2 / 2)) / 48
    )


def test_attention_again_costs_what_those_layers_see():
    """Of Gemma 3's layers each sixth sees all tokens, the last one too; so do the waits of its
    launches.
    """
    gemma, sizes = shape_of("google/gemma-3-12b"), {"batch": 1, "tokens": 131072}
    once = step_flops(gemma, Policy(), **sizes).attention_forward
    of_all = sum(attended(131072, w) for w in gemma.windows)
    for policy, layers in ((Policy(again=2), (46, 47)), (Policy(plain=1, again=3), (44, 45, 46)),
                           (Policy(plain=1, save_attention=False), range(47))):  # fmt: skip
        more = step_flops(gemma, policy, **sizes).attention_forward / once - 1
        assert more == pytest.approx(
            sum(attended(131072, gemma.window(i)) for i in layers) / of_all
        )
    saved = [tails(GPUS["a100-80gb"], gemma, Policy(plain=n), **sizes) for n in (0, 1, 2)]
    assert (saved[0] - saved[1]) / (saved[1] - saved[2]) == pytest.approx(131072 / 1024)


def test_layers_that_keep_less_run_what_others_keep():
    """Between all layers with `keep` and none, by as many parts as there are layers; attention runs
    once.
    """
    shape, sizes = shape_of("llama-3.1-8b"), {"batch": 1, "tokens": 8192}
    kept = Policy(tile=2048, keep=("gate_up",), plain=4)
    every, seven, none = (
        step_flops(shape, policy, **sizes)
        for policy in (kept, replace(kept, again=7), replace(kept, keep=()))
    )
    assert (seven.matmul - every.matmul) / (none.matmul - every.matmul) == pytest.approx(7 / 28)
    assert seven.attention_forward == every.attention_forward == none.attention_forward


def test_experts_count_where_a_token_goes():
    flops = flops_of(shape_of("Qwen/Qwen3-30B-A3B"), UNTILED, batch=1, tokens=1024)
    # 3.3 billion active parameters by its card, of which the embedding's 0.3 are no matmul.
    assert flops.matmul / (6 * 1024) == pytest.approx(3.03e9, rel=0.01)


def products(config) -> dict:
    """Weights of each projection of one layer."""
    D, F, E = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = D * config["num_attention_heads"] * E, D * config["num_key_value_heads"] * E
    return {"q": q, "k": kv, "v": kv, "o": q, "gate": D * F, "up": D * F, "down": D * F}


# Which products of a layer nobody reads when it runs again: after attention, and before it once q,
#     k and v are there.
@pytest.mark.parametrize("model, after, before", [
    ("llama-3.1-8b", "down", "q k v"), ("Qwen/Qwen3-8B", "down", "v"),
    ("google/gemma-3-12b", "", "v"),
    ("google/gemma-2-9b", "", "q k v"), ("CohereLabs/c4ai-command-r-v01", "down o", "q k v"),
    ("allenai/OLMo-2-1124-7B", "", "v"), ("microsoft/phi-4", "down", "q k v"),
])  # fmt: skip
def test_what_runs_again(model, after, before):
    config = preset_config(model)
    shape, weights = ModelShape.from_config(config), products(config)
    runs = {"one": "q k v o gate up down", "several": "q k v q k v o gate up down"}
    sizes = {"batch": 1, "tokens": 16384}
    least = flops_of(shape, UNTILED, **sizes).matmul

    def again(tile):
        return (step_flops(shape, Policy(tile=tile), **sizes).matmul - least) / (
            2 * 16384 * shape.num_layers
        )

    count = lambda names: sum(weights[n] for n in names.split())  # noqa: E731
    left = count(runs["one"]) - count(after), count(runs["several"]) - count(after) - count(before)
    assert (again(16384), again(4096)) == pytest.approx(left)


def test_llama_8b_runs_a_quarter_again():
    """6 x the weights of matmuls x tokens is 1."""
    shape = shape_of("llama-3.1-8b")
    for tokens in (8192, 131072):
        sizes = {"batch": 1, "tokens": tokens}
        assert (
            step_flops(shape, Policy(), **sizes).matmul / flops_of(shape, UNTILED, **sizes).matmul
            < 1.23
        )


# Whatever is kept, nothing is counted as less than the mathematics; all kept, nothing runs again.
@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "Qwen/Qwen3-8B", "CohereLabs/c4ai-command-r-v01"]
)
@pytest.mark.parametrize("tile", [1024, 8192])
def test_what_is_kept_is_not_run_again(model, tile):
    shape = shape_of(model)
    sizes = {"batch": 1, "tokens": 8192}
    least = flops_of(shape, UNTILED, **sizes)
    one = [
        step_flops(shape, Policy(tile=tile, keep=(name,)), **sizes).matmul
        for name in shape.keepable
    ]
    nothing = step_flops(shape, Policy(tile=tile), **sizes).matmul
    every = step_flops(shape, Policy(tile=tile, keep=shape.keepable), **sizes).matmul
    assert all(least.matmul <= every <= n < nothing for n in one)
    assert nothing - every == pytest.approx(sum(nothing - n for n in one))
    assert step_flops(shape, Policy(tile=tile, plain=shape.num_layers), **sizes) == least


# bf16 parameters and gradients resident in 79 GiB, no optimizer; tests/budget/test_formula.py holds
# the counts to what is run.
@pytest.mark.parametrize("gpu", ["a100-80gb", "h100"])
@pytest.mark.parametrize(
    "tokens, goal", [(8192, 1.03), (16384, 1.15), (32768, 1.26), (131072, 1.27)]
)
def test_free_memory_leaves_little_to_run_again(tokens, goal, gpu):
    shape = shape_of("llama-3.1-8b")
    sizes = {"batch": 1, "tokens": tokens}
    free = {"gpu_free": 79 * GiB - 4 * shape.parameters, "host_free": 120 * GiB, "gpu": GPUS[gpu]}
    least = flops_of(shape, UNTILED, **sizes)
    for settings, most in ((Checkpointing(), goal), (parse_checkpointing("least"), 1.26)):
        option = decide(settings, shape, **sizes, **free)
        flops = step_flops(shape, option.policy, **sizes)
        assert flops.matmul <= most * least.matmul
        assert flops.attention_forward == least.attention_forward


def counted_traffic(policy, tokens: int, name="llama-3.1-8b", adapters=None, layers=1, **more):
    """Bytes that one layer moves beside matmuls and attention, by phase: of a layer more."""
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    one, two = (
        simulate(
            prepare(build(preset_config(name) | {"num_hidden_layers": n, "vocab_size": 1024} | {
                key: value[:n] if isinstance(value, list) else value for key, value in more.items()
            }, adapters=adapters), "hfpatch"),
            1, tokens, policy=policy,
        ).ledger.traffic
        for n in (layers, layers + 1)
    )  # fmt: skip
    return {phase: two[phase] - one[phase] for phase in ("forward", "backward")}


# One tile and four; what is kept.
@pytest.mark.parametrize("tile, keep", [(8192, ()), (2048, ()), (2048, ("gate_up",))])
def test_bytes_beside_matmuls_are_those_that_are_counted(tile, keep):
    policy, tokens = Policy("gpu", tile=tile, keep=keep), 8192
    shape = shape_of("llama-3.1-8b", num_hidden_layers=1)
    counted = counted_traffic(policy, tokens)
    groups = head_groups(1, tokens, shape)
    forward, backward = (2 * n for n in elementwise(shape, policy, tokens, tile < tokens, groups))
    several = tokens // tile
    sums = (SUM_BYTES * several + SUM_BYTES_ONCE) * shape.trained_of(0) if several > 1 else 0
    assert forward == pytest.approx(counted["forward"], rel=0.05)
    assert backward + sums == pytest.approx(counted["backward"], rel=0.05)


SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 3}  # fmt: skip
UNFUSED = [
    ("openai/gpt-oss-20b", None, SMALL | {"intermediate_size": 384, "num_local_experts": 8}),
    ("Qwen/Qwen3-30B-A3B", None, SMALL | {"moe_intermediate_size": 384, "num_experts": 8}),
    ("llama-3.1-8b", Adapters(16), {}),
]


# Two families of experts whose inner size is not the hidden size, and LoRA on every Linear.
@pytest.mark.parametrize("model, adapters, more", UNFUSED, ids=lambda row: str(row)[:20])
def test_bytes_of_code_that_is_not_fused_are_those_that_are_counted(model, adapters, more):
    policy, tokens = Policy("gpu", tile=4096), 4096
    one = {key: value[:1] if isinstance(value, list) else value for key, value in more.items()}
    shape = replace(shape_of(model, num_hidden_layers=1, **one), adapters=adapters)
    counted = counted_traffic(policy, tokens, model, adapters, layers=2, **more)
    forward, backward = (2 * n for n in elementwise(shape, policy, tokens, several=False))
    assert forward == pytest.approx(counted["forward"], rel=0.05)
    # Sums of gradients that autograd makes in place (of an adapter's input here) are not counted.
    assert 0.97 * counted["backward"] < backward < 1.1 * counted["backward"]


def test_transformers_own_bytes_are_those_that_are_counted():
    """Of a layer and of a logit: the difference of one layer, and of one vocabulary, to two."""
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    tokens, shape = 2048, shape_of("llama-3.1-8b")

    def traffic(layers, vocabulary):
        config = preset_config("llama-3.1-8b") | {
            "num_hidden_layers": layers, "vocab_size": vocabulary, "bos_token_id": 1,
            "eos_token_id": 2,
        }  # fmt: skip
        return simulate(prepare(build(config), "hf"), 1, tokens).ledger.traffic

    one, two, wide = traffic(1, 512), traffic(2, 512), traffic(1, 4608)
    phases = ("forward", "backward")
    for phase, passes in zip(phases, layer_passes(shape, 0)):
        layer = (two[phase] - one[phase]) / (2 * tokens * passes)
        assert layer == pytest.approx(STOCK_FACTOR, rel=0.02)
    more = sum(wide[p] - one[p] for p in phases) / 4096
    logit = (more - 4 * shape.hidden_size) / tokens  # less the embedding's gradient, written twice
    assert logit == pytest.approx(STOCK_LOGIT_BYTES, rel=0.02)


def test_the_hosts_seconds_are_those_that_were_timed():
    """The step model had what a tile took before blocks were written out, three times as much."""
    with open(Path(__file__).resolve().parents[2] / "profiles" / "host" / "results.csv") as file:
        rows = list(csv.DictReader(file))
    timed = {
        (r["who"], int(r["tiles"])): (int(r["us_forward"]) + int(r["us_backward"])) * 1e-6
        for r in rows
    }
    ours = [who for who, tiles in timed if tiles == 16][-1]
    for tiles in (1, 16):
        planned = HOST_SECONDS_PER_LAYER / tiles + HOST_SECONDS_PER_TILE
        assert planned == pytest.approx(timed[ours, tiles], rel=0.01)
        forward = 1e-6 * next(
            int(r["us_forward"]) for r in rows if r["who"] == ours and r["tiles"] == "16"
        )
        assert pytest.approx(forward / timed[ours, 16], rel=0.01) == FORWARD_SHARE
    assert pytest.approx(timed["stock", 1], rel=0.01) == HOST_SECONDS_PLAIN
    # Segments run forward once more: of a small model, which waits for the host, a step is longer
    #     for it.
    shape, sizes = shape_of("llama-tiny"), {"batch": 1, "tokens": 256}
    waits = [
        step_time(
            GPUS["h100"],
            step_flops(shape, p, **sizes),
            step_memory(shape, p, **sizes),
            p,
            shape,
            **sizes,
        )[0].total
        for p in (Policy("gpu", save_attention=False), Policy("gpu", 2, False))
    ]
    assert waits[1] > 1.1 * waits[0]
