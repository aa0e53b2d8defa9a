"""`hfpatch plan` as a caller meets it: answers, exit codes, JSON keys, errors of one sentence."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny
import torch
from tiny import LONG, longer

import hfpatch
from hfpatch.budget import choice
from hfpatch.budget.adapters import Adapters
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import Moment, StepMemory, step_memory
from hfpatch.budget.hardware import (
    DISK_READS,
    DISK_WRITES,
    GPUS,
    PIN_BYTES_PER_SECOND,
    SECONDS_ERROR,
)
from hfpatch.budget.policy import Checkpointing, Policy
from hfpatch.budget.shape import ModelShape
from hfpatch.cli import main as cli
from hfpatch.cli import plan as plan_command
from hfpatch.lab.models import config_of
from hfpatch.lab.presets import preset_config
from hfpatch.planner import answer, show
from hfpatch.planner.placements import PLACEMENTS, Resident, candidates, resident
from hfpatch.planner.plan import plan
from hfpatch.planner.seconds import optimizer_seconds
from hfpatch.planner.show import FIRST_STEP_BUDGET, _points, policy_text

GiB = 2**30
KEYS = ("fits", "gpu_peak_bytes", "gpu_bytes", "host_peak_bytes", "step_seconds",
        "tokens_per_second", "mfu", "policy",
        "suggestions")  # fmt: skip
RUN = {"seq_len": 131072, "gpu": "a100-80gb", "host_ram": "256GiB"}


@pytest.mark.parametrize("name, dtype", [("adamw", "bfloat16"), ("adamw-fp32", "float32")])
def test_trainers_own_optimizer_can_be_planned(name, dtype):
    """Weights and states are those that torch's AdamW makes; auto never chooses an optimizer that
    rounds updates away.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny.config()).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [
        value for state in optimizer.state.values() for key, value in state.items() if key != "step"
    ]
    shape = ModelShape.from_config(model.config)
    assert resident(name, shape, 1).optimizer == sum(value.nbytes for value in states)
    # fp32 weights have a bf16 copy under autocast, of which a tiled layer drops its own.
    for whole, copied in (
        (True, shape.parameters),
        (False, max(shape.layer_parameters, shape.embedding_parameters)),
    ):
        weights = sum(p.nbytes for p in model.parameters()) + (
            2 * copied if dtype == "float32" else 0
        )
        assert resident(name, shape, 1, "off" if whole else None).parameters == weights
    assert plan("llama-3.2-1b", **RUN | {"seq_len": 8192}, placement=name).fits
    assert name not in candidates("auto", 1) and name in str(
        plan("llama-3.2-1b", **RUN, placement=name)
    )


def test_the_job_this_is_for_fits():
    found = hfpatch.plan("llama-3.1-8b", **RUN)
    assert found.fits and found.suggestions == []
    assert sum(found.gpu_bytes.values()) == found.gpu_peak_bytes <= found.gpu_usable_bytes
    assert set(found.gpu_bytes) == {"parameters", "gradients", "optimizer", "activations", "slack"}
    assert found.gpu_bytes["activations"] == sum(found.split.values())
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert 0.2 < found.mfu < 0.7
    assert "fits" in str(found) and "zero3-offload" in str(found)


def test_stock_does_not_fit_and_is_told_what_would():
    found = plan("llama-3.1-8b", checkpointing="stock-checkpointing", **RUN)
    assert not found.fits
    changes = {s["change"].split()[0] for s in found.suggestions}
    assert {"--checkpointing", "--seq-len"} <= changes
    assert all(s["cost"] for s in found.suggestions)
    length = next(
        int(s["change"].split()[1])
        for s in found.suggestions
        if s["change"].startswith("--seq-len")
    )
    again = RUN | {"seq_len": length}
    assert plan("llama-3.1-8b", checkpointing="stock-checkpointing", **again).fits
    assert not plan(
        "llama-3.1-8b", checkpointing="stock-checkpointing", **again | {"seq_len": length + 1024}
    ).fits


# Each suggestion, taken, is a run that fits: a few ways of not fitting, by GPU, by host, by
#     placement.
@pytest.mark.parametrize("run", [
    pytest.param({"gpu": "rtx4090", "host_ram": "64GiB", "seq_len": 131072}, marks=LONG),
    {"gpu": "a100-40gb", "host_ram": "64GiB", "seq_len": 262144, "placement": "gpu8bit"},
    pytest.param(
        {"gpu": "h100", "host_ram": "128GiB", "seq_len": 32768, "placement": "zero3-offload"},
        marks=LONG,
    ),
    {"gpu": "h100", "host_ram": "2TiB", "seq_len": 131072, "checkpointing": "gpu", "batch": 4},
])  # fmt: skip
def test_suggestions_hold(run):
    found = plan("llama-3.1-8b", **run)
    assert not found.fits and found.suggestions
    names = {"--gpu": "gpu", "--gpus": "gpus", "--host-ram": "host_ram", "--placement": "placement",
             "--batch": "batch",
             "--seq-len": "seq_len", "--checkpointing": "checkpointing"}  # fmt: skip
    for suggestion in found.suggestions:
        flag, value = suggestion["change"].split()[:2]
        if value == "DIR":
            value = "./checkpoints"
        changed = run | {names[flag]: int(value) if value.isdigit() else value}
        if flag == "--gpus":
            changed["placement"] = "auto"
        assert plan("llama-3.1-8b", **changed).fits, suggestion


def test_more_of_anything_never_costs_less():
    def peak(**change):
        # What is free is spent otherwise.
        given = RUN | {"placement": "gpu8bit", "checkpointing": "least"} | change
        return plan("llama-3.1-8b", **given).gpu_peak_bytes

    assert peak(seq_len=16384) < peak(seq_len=65536) < peak() < peak(batch=2)
    assert peak(placement="gpu8bit-fused") < peak()
    assert plan("llama-3.2-3b", **RUN).step_seconds < plan("llama-3.1-8b", **RUN).step_seconds
    slow, quick = (
        plan("llama-3.1-8b", **RUN | {"gpu": g}).step_seconds for g in ("a100-80gb", "h100")
    )
    assert quick < slow


def test_longest_sequence_is_the_longest():
    found = plan("llama-3.1-8b", **RUN, placement="gpu8bit", max_seq_len=True)
    same = RUN | {"placement": "gpu8bit"}
    assert plan("llama-3.1-8b", **same | {"seq_len": found.max_seq_len}).fits
    assert not plan("llama-3.1-8b", **same | {"seq_len": found.max_seq_len + 1024}).fits


def test_the_longest_sequence_of_gpus_that_share_it_fits_their_host():
    settings = Checkpointing(offload="host", every=1, tile=8192, plain=0, keep=())
    found = plan(
        "llama-3.1-8b", **RUN | {"gpus": 2}, sp_size=2, checkpointing=settings, max_seq_len=True
    )
    (way,) = found.longest
    assert 0.8 * found.host_usable_bytes < way["host_peak_bytes"] <= found.host_usable_bytes


@pytest.mark.parametrize("gpus", longer([1, 2, 8], 8))
def test_every_placement_answers(gpus):
    for row in PLACEMENTS.values():
        if row.one if gpus == 1 else row.many:
            found = plan(
                "llama-3.1-8b", **RUN | {"gpus": gpus, "placement": row.name, "host_ram": "2TiB"}
            )
            assert found.placement == row.name and found.step_seconds > 0
            assert found.tokens_per_second == pytest.approx(gpus * 131072 / found.step_seconds)


def test_sharded_weights_take_no_segments_of_layers():
    run = RUN | {"seq_len": 1 << 20, "gpu": "b200"}
    assert plan("llama-3.1-8b", **run, placement="gpu8bit").policy["every"] > 1
    sharded = plan("llama-3.1-8b", **run, placement="zero3-offload")
    assert sharded.policy["every"] == 1 and not sharded.fits
    assert any("--host-ram" in s["change"] for s in sharded.suggestions)


def test_every_gpu_answers():
    for name in GPUS:
        found = plan("llama-3.2-1b", seq_len=32768, gpu=name)
        assert found.fits and 0 < found.mfu < 1, name


def test_settings_reach_the_policy(tmp_path):
    settings = Checkpointing(
        offload=str(tmp_path), every=2, save_attention=False, tile=2048, plain=0
    )
    found = plan("llama-3.1-8b", **RUN, checkpointing=settings)
    assert found.policy == {
        "offload": "disk",
        "every": 2,
        "save_attention": False,
        "tile": 2048,
        "plain": 0,
        "keep": (),
        "again": 0,
        "frozen_weights": "gpu",
        "wide": True,
        "time_tile": 0,
        "chain": 0,
    }
    assert found.host_peak_bytes < plan("llama-3.1-8b", **RUN).host_peak_bytes


def test_why_names_the_memory_that_segments_are_made_for():
    asked = {"seq_len": 131072, "gpu": "rtx4090", "host_ram": "8GiB", "placement": "gpu8bit-fused"}
    found = plan("llama-3.1-8b", **asked)
    assert found.policy["offload"] == "gpu" and found.policy["every"] > 1
    assert "the GPU has room for one layer's input in" in found.why
    assert "the host has room" not in found.why


def test_files_are_planned_at_the_disk_s_rate(tmp_path):
    """What goes into files takes the disk's seconds, which the machine's GPUs share; the search
    writes less there.
    """
    asked = {"every": 1, "save_attention": True, "tile": 4096, "plain": 0, "keep": ()}
    found = {
        gpus: plan("llama-3.1-8b", **RUN | {"gpus": gpus}, placement="fsdp2",
                   checkpointing=Checkpointing(offload=str(tmp_path), **asked))
        for gpus in (8, 16)
    }  # fmt: skip
    # inputs, attention outputs and lse of each of eight ranks
    out = 32 * (2 * 2 * 4096 + 4 * 32) * 131072
    more = found[16].seconds["copy_wait"] - found[8].seconds["copy_wait"]
    assert more == pytest.approx(
        8 * (out / DISK_WRITES + (found[8].link_bytes - out) / DISK_READS), rel=0.01
    )

    free = {name: plan("llama-3.1-8b", **RUN | {"seq_len": 65536, "gpu": "h100"},
                       checkpointing=Checkpointing(offload=place), placement=placement)
            for name, place, placement in (
                ("host", "host", "zero3-offload"), ("disk", str(tmp_path), "zero3-offload"),
                ("segments", str(tmp_path), "gpu8bit"))}  # fmt: skip
    # Short passes of backward wait for what they read. Fewer inputs would wait less, but weights
    # that an engine gathers are there for one layer at a time.
    waits = {name: p.seconds["copy_wait"] / p.step_seconds for name, p in free.items()}
    assert waits["segments"] < 0.04 and free["segments"].policy["every"] > 1
    assert "the least time goes with one layer's input in" in free["segments"].why
    assert waits["disk"] < 0.08 and free["disk"].policy["every"] == 1
    assert free["disk"].step_seconds > free["host"].step_seconds
    assert (
        not free["disk"].policy["save_attention"]
        and "longer to write than to make" in free["disk"].why
    )


def test_models_in_every_form(tmp_path):
    from transformers import LlamaConfig

    values = preset_config("llama-tiny")
    (tmp_path / "config.json").write_text(json.dumps(values))
    forms = [
        "llama-tiny",
        values,
        LlamaConfig(**values),
        str(tmp_path),
        str(tmp_path / "config.json"),
    ]
    peaks = {plan(form, seq_len=4096).gpu_peak_bytes for form in forms}
    assert len(peaks) == 1


def test_hub_ids_answer_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = (
        "from hfpatch.cli.main import main; raise SystemExit(main(['plan', '--seq-len', '8k', "
        "'--model', '{}']))"
    )

    def ask(name):
        return subprocess.run(
            [sys.executable, "-c", code.format(name)], capture_output=True, text=True
        )

    assert "Qwen/Qwen3-8B, 1 x 8,192 tokens" in ask("Qwen/Qwen3-8B").stdout
    done = ask("owner/name")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'owner/name' came" in done.stderr and "download its config.json" in done.stderr


@pytest.mark.parametrize("change, words", [
    ({"model": "llama-3-1-8b"}, "llama-3.1-8b"), ({"gpu": "abacus"}, "h100"),
    ({"placement": "moon"}, "zero3-offload"),
    ({"placement": "fsdp2"}, "several GPUs"), ({"seq_len": 0}, "seq_len"), ({"batch": -1}, "batch"),
    ({"gpus": 1.5}, "gpus"), ({"host_ram": "lots"}, "256GiB"),
    ({"checkpointing": "maybe"}, "checkpointing must be"),
    ({"model": {"model_type": "bilbo"}}, "bilbo"), ({"gpu": "this"}, "CUDA"),
    ({"model": 3}, "int came"), ({"gpu": 3}, "h100"),
    ({"adapters": 16}, "16 came"), ({"max_seq_len": 8192}, "8192 came"),
])  # fmt: skip
def test_errors_are_one_sentence(change, words, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"model": "llama-tiny", "seq_len": 4096} | change
    with pytest.raises(ValueError, match=rf"^hfpatch: [^\n]*{words}[^\n]*\.$"):
        plan(arguments.pop("model"), **arguments)


def test_command_json_and_exit_codes(capsys):
    common = ["plan", "--model", "llama-3.1-8b", "--host-ram", "256GiB", "--json"]
    assert cli.main([*common, "--gpu", "a100-80gb"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(key in answer for key in KEYS) and answer["fits"] is True
    assert cli.main([*common, "--gpu", "rtx4090", "--placement", "gpu8bit"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert cli.main([*common, "--gpu", "abacus"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_the_search_of_the_longest_says_what_it_tries(monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "PAUSE", 0)
    ask = ["plan", "--model", "llama-tiny", "--gpu", "rtx4090", "--max-seq-len"]
    assert cli.main([*ask, "--seq-len", "8192", "--host-ram", "16GiB"]) == 0
    said = capsys.readouterr()
    assert "trying 16,384 tokens" in said.err and "trying" not in said.out
    monkeypatch.setattr(plan_command, "PAUSE", 1e9)
    assert cli.main([*ask, "--seq-len", "8192", "--host-ram", "16GiB"]) == 0
    assert "trying" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked, near",
    [
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("qwen3-8", "Qwen/Qwen3-8B"),
        ("mistral-7b", "mistralai/Mistral-7B"),
    ],
)
def test_an_unknown_model_gets_the_three_nearest(asked, near, capsys):
    assert cli.main(["plan", "--model", asked]) == 2
    said = capsys.readouterr().err
    named = re.search(r"the nearest are (.*?); any other", said)[1].split(", ")
    assert named[0].startswith(near) and len(named) == 3, said
    assert said.count("\n") == 1 and "config.json" in said and "owner/name" in said


def test_soft_caps_are_planned_as_apply_serves_them(tmp_path, capsys):
    """On a GPU its layers run whole: no kernel there caps scores."""
    small = preset_config("google/gemma-2-9b") | {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(small))
    asked = ["plan", "--model", str(tmp_path), "--seq-len", "8192", "--placement", "gpu8bit"]
    assert cli.main([*asked, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named["policy"].startswith("layers run whole (no kernel caps scores")
    assert named["why"].startswith("simulated")


def test_a_model_without_closed_forms_is_simulated(tmp_path, capsys):
    from hfpatch.lab.simulate.implementations import build

    values = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments = ["plan", "--model", str(tmp_path), "--seq-len", "2048", "--placement", "gpu8bit",
                 "--json",
                 "--checkpointing", "stock-checkpointing"]  # fmt: skip
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpu_bytes"]["parameters"] == 2 * sum(
        p.numel() for p in build(values).parameters()
    )
    assert "simulated" in answer["why"] and answer["gpu_bytes"]["activations"] > 2 * 2048 * 64 * 2
    bytes_moved = answer["seconds"]["elementwise"] * GPUS["h100"].bandwidth
    assert bytes_moved > 2 * 2048 * (40 * 64 + 10 * 128 + 5 * 512) and answer["step_seconds"] > 0
    assert answer["seconds"]["optimizer"] > 0 and answer["seconds"]["exchange"] == 0  # one GPU


FREE = {
    "glm4_moe": {"hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512,
                 "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 2,
                 "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 4,
                 "first_k_dense_replace": 1, "vocab_size": 8192},
    "qwen3_5_text": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
                     "head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 4,
                     "vocab_size": 4096, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
                     "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}  # fmt: skip


@tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
@pytest.mark.parametrize("family", FREE)
def test_auto_spends_free_memory_where_no_closed_form_helps(family):
    """Layers of GLM-4.5, and those of a hybrid with all that their mixers make, keep more than
    "least" has them keep, in the bytes that are planned.
    """
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    values = {"model_type": family, **FREE[family]}
    card = dataclasses.replace(GPUS["h100"], memory_bytes=4 * GiB)
    least, auto = (
        plan(values, seq_len=2048, gpu=card, checkpointing=how) for how in ("least", "auto")
    )
    assert least.fits and auto.fits and not auto.closed_form
    assert auto.policy["plain"] > least.policy["plain"] == 0
    assert auto.step_seconds < least.step_seconds
    step = simulate(prepare(build(values), "hfpatch"), 1, 2048, policy=Policy(**auto.policy))
    taken = step.peak_bytes - step.categories["parameters"]
    assert taken <= auto.gpu_bytes["activations"] + auto.gpu_bytes["gradients"]


def test_layers_of_several_sizes_leave_what_is_around_them_its_own():
    """Of Jamba, whose layers with experts are fifteen times the others, 67 GiB less than nothing
    was gathered.
    """
    for shape in map(
        ModelShape.from_config,
        (preset_config("deepseek-ai/DeepSeek-V3"), preset_config("llama-3.2-1b")),
    ):
        sharded = (
            resident("fsdp2", shape, 8).parameters
            - 4 * -(-shape.parameters // 8)
            - 4 * shape.layer_parameters
        )
        assert sharded == 2 * (shape.parameters - shape.body_parameters) > 0


@pytest.mark.parametrize("whole", [False, True])
def test_files_of_a_model_without_closed_forms(whole, tmp_path, monkeypatch):
    """They take the drive's seconds and no host memory, also where layers run whole."""
    from hfpatch.planner import simulated

    values = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    if whole:
        step = simulated._taken
        monkeypatch.setattr(simulated, "_taken", lambda *a: (*step(*a)[:2], {"a reason": 2}, 0))
    held, filed = (
        plan(values, seq_len=4096, checkpointing=Checkpointing(offload=o, plain=0))
        for o in ("host", str(tmp_path))
    )
    written = held.host_peak_bytes - filed.host_peak_bytes
    assert written > 2 * 4096 * 64 * 2 and isinstance(filed.policy, str) == whole
    shared = dataclasses.replace(GPUS["h100"], sharing=1000)
    monkeypatch.setattr("hfpatch.planner.answer.Run.rates", shared)
    asked = Checkpointing(offload=str(tmp_path), plain=0)
    slow = plan(values, seq_len=4096, checkpointing=asked)
    needed = 1000 * written * (1 / DISK_WRITES + 1 / DISK_READS)
    assert slow.seconds["copy_wait"] == pytest.approx(needed, rel=0.05)


def test_what_loops_over_single_tokens_is_not_simulated_for_ever(monkeypatch):
    monkeypatch.setattr("hfpatch.planner.simulated.OPERATIONS", 500)
    values = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    with pytest.raises(
        ValueError, match="^hfpatch: expected a step of at most 512 operations, plain code"
    ):
        plan(values, seq_len=512)


@pytest.mark.parametrize("limit", [2_500, 3_600, 14_000, 60_000])
def test_the_longest_sequence_is_found_where_memory_grows_by_the_square(limit):
    """Scores that attention writes out: a line through lengths that do not fit comes down to one
    that does in a few steps more.
    """
    from hfpatch.planner.simulated import _longest

    tried = []

    def at(tokens):
        tried.append(tokens)
        took = {
            "gpu_usable_bytes": limit**2,
            "gpu_peak_bytes": tokens**2,
            "host_usable_bytes": None,
        }
        return SimpleNamespace(seq_len=tokens, fits=tokens <= limit, **took)

    found = _longest(at, at(131072))
    assert limit - max(1024, limit // 16) <= found.seq_len <= limit and len(tried) <= 14


def test_adapters_and_the_longest_sequence_of_a_model_without_closed_forms():
    """LoRA's gradients are the adapters' alone, and memory at the longest length, and a little
    above it, is as is said.
    """
    values = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    card = dataclasses.replace(GPUS["h100"], memory_bytes=2 * GiB)
    asked = {"gpu": card, "checkpointing": "stock", "adapters": Adapters(8)}
    found = plan(values, seq_len=4096, max_seq_len=True, **asked)
    linears = {"qkv": (64, 192), "dense": (64, 64), "up": (64, 128), "down": (128, 64)}
    trained = 2 * Adapters(8).over(linears)
    assert found.gpu_bytes["gradients"] <= 2 * trained and not found.closed_form
    assert found.gpu_bytes["parameters"] > 2 * trained and found.adapters["rank"] == 8
    longest = plan(values, seq_len=found.max_seq_len, **asked)
    assert (
        longest.fits and not plan(values, seq_len=found.max_seq_len * 33 // 32 + 1024, **asked).fits
    )


# A pattern of two kinds of layers: what a few of them take says what all of them take, to the byte
# of what is beyond gradients.
@pytest.mark.parametrize("policy", [Policy("host", tile=256), "stock"])
def test_a_few_layers_tell_all(policy, monkeypatch):
    from hfpatch.lab.simulate.implementations import build
    from hfpatch.planner import simulated
    from hfpatch.planner.counted import Counted, Values, layers_of

    values = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 9,
              "num_attention_heads": 4, "head_dim": 16,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
              "pad_token_id": None}  # fmt: skip
    values = Values(values)
    layers = layers_of(build(values))
    counted = Counted.of(build(values), layers)
    assert simulated.depths(layers) == (3, 5, 2, 2) and simulated.depths(layers, every=3)[:3] == (
        0,
        9,
        0,
    )
    memory, flops, reasons, _ = simulated._step(values, counted, 1, 512, policy)
    monkeypatch.setattr(simulated, "depths", lambda layers, every, top: (0, 9, 0, 2))
    whole, their_flops, their_reasons, _ = simulated._step(values, counted, 1, 512, policy)
    rounding = 512 * sum(
        1 for layer in layers[5:] for _ in layer.parameters()
    )  # of the gradients that were not followed
    assert (
        0 <= max(m.total for m in whole.moments) - max(m.total for m in memory.moments) < rounding
    )
    assert max(m.beyond for m in memory.moments) == max(m.beyond for m in whole.moments)
    assert (memory.host, flops, reasons) == (whole.host, their_flops, their_reasons)


def test_what_one_length_alone_adds_is_no_growth():
    """Nemotron-H's few layers: with fewer tokens an operation's sum is highest when most gradients
    have come, with more tokens when the operation takes the most.
    """
    from hfpatch.planner.fewer import stretched

    def step(tokens):
        late = (900, 40) if tokens < 15000 else (100, 10 * tokens)
        return (
            StepMemory(9, 9, (Moment("op", late[0], layer=late[1]),), 0),
            Flops(*[1.0] * 5),
            {},
            0,
        )

    found, *_ = stretched(step, 131072, 4096)
    assert found.moments[0].layer == 10 * 131072


@pytest.mark.parametrize("rows", [0, 1], ids=["through time", "a mixer of whole rows"])
def test_a_long_step_is_told_by_shorter_ones(rows):
    """As mixers' are, whose plain code loops over tokens: bytes by a line, FLOPs with the square
    that attention adds. A mixer of whole rows may hold a mask, whose bytes grow with the square.
    """
    from hfpatch.planner.fewer import stretched

    def step(tokens):
        moments = (
            Moment("late", 900, layer=50 + 7 * tokens),
            Moment("early", 0, layer=10 + 9 * tokens + rows * tokens**2),
        )
        flops = Flops(
            11.0 * tokens, tokens**2 / 2, 5 * tokens**2 / 4, 9.0 * tokens, 3.0 * tokens**2
        )
        return StepMemory(1000, 900, moments, 3 * tokens), flops, {"a reason": 2}, rows

    asked = []
    found, flops, whole, _ = stretched(
        lambda tokens: asked.append(tokens) or step(tokens), 131072, 4096
    )
    wanted, their_flops, *_ = step(131072)
    assert found == wanted and whole == {"a reason": 2} and asked == [12288, 16384, 20480]
    assert vars(flops) == pytest.approx(vars(their_flops), rel=1e-9)


QWEN4 = {
    "model_type": "qwen4_exp_text", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "num_experts": 4,
    "layer_types": ["linear_attention", "qwen_sparse_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_budget": 64,
    "indexer_compress_ratio": 16, "indexer_head_dim": 16,
}  # fmt: skip


def test_a_model_whose_mask_a_loop_over_queries_makes(monkeypatch):
    """Qwen4: in a few operations, and longer than masks that can be known, its mask counted."""
    from hfpatch.lab.simulate import shadow
    from hfpatch.planner import simulated

    pytest.importorskip("transformers.models.qwen4_exp")
    asked = {"gpu": "h100", "checkpointing": "least", "placement": "gpu8bit"}
    found = plan(QWEN4, seq_len=12288, **asked)
    assert found.fits and "carried on by a square" in found.why and "whole" not in found.why
    monkeypatch.setattr(shadow, "LARGEST_WHOLE", 1 << 28)
    monkeypatch.setattr(simulated, "_slow", lambda *_: False)
    run = plan(QWEN4, seq_len=12288, **asked)
    assert found.gpu_bytes["activations"] == pytest.approx(run.gpu_bytes["activations"], rel=0.05)
    assert run.gpu_bytes["activations"] > 12288**2
    assert found.flops == pytest.approx(run.flops, rel=0.02)


def test_the_language_tower_of_a_model_of_several_is_planned(tmp_path, capsys):
    """Gemma 3's is described by closed forms, as is Qwen3-VL's by those of Qwen3; files leave out
    what their class assumes.
    """
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    for kind, preset in (("gemma3", "google/gemma-3-12b"), ("qwen3_vl", "Qwen/Qwen3-8B")):
        text = preset_config(preset)
        said = {
            n: v
            for n, v in text.items()
            if n not in ("model_type", "_name_or_path", "tie_word_embeddings")
        }
        values = {
            "model_type": kind,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": said,
            "vision_config": vision,
        }
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert (
            cli.main(
                [
                    "plan",
                    "--model",
                    str(tmp_path),
                    "--placement",
                    "gpu8bit",
                    "--seq-len",
                    "32k",
                    "--json",
                ]
            )
            == 0
        )
        answer = json.loads(capsys.readouterr().out)
        assert answer["gpu_bytes"] == plan(text, seq_len=32768, placement="gpu8bit").gpu_bytes
        assert answer["model"].endswith("(language tower)") and answer["closed_form"]


def test_frontier_and_least():
    run = RUN | {"placement": "gpu8bit", "seq_len": 65536}
    found, least = plan("llama-3.1-8b", **run), plan("llama-3.1-8b", **run, checkpointing="least")
    points = found.frontier
    assert points[0]["gpu_peak_bytes"] == least.gpu_peak_bytes < found.gpu_peak_bytes
    assert points[-1]["step_seconds"] <= 1.005 * found.step_seconds < least.step_seconds
    assert "least" in least.why
    (line,) = (line for line in str(found).splitlines() if line.startswith("frontier"))
    assert line.endswith(
        f"{found.step_seconds:.1f} s in {found.gpu_peak_bytes / GiB:.1f} GiB (chosen)"
    )
    assert f"{points[0]['step_seconds']:.1f} s" in line and line.count(" s in ") < len(points)
    roomy = str(plan("llama-3.1-8b", seq_len=32768, gpu="h200", placement="gpu8bit"))
    (line,) = (line for line in roomy.splitlines() if line.startswith("frontier"))
    said = [float(word.split(" s in ")[0].split()[-1]) for word in line.split(",")]
    *before, chosen = said
    # no step twice, with a little more memory
    assert len(said) > 3 and all(a > b for a, b in pairwise(before))
    assert before[-1] >= chosen


def test_what_a_plan_prices_is_priced_once(monkeypatch):
    """The choice and the frontier try the same policies, and know the same of what may be
    pinned.
    """
    priced = []
    monkeypatch.setattr(
        choice,
        "step_memory",
        lambda shape, policy, **sizes: priced.append(policy) or step_memory(shape, policy, **sizes),
    )
    asked = Checkpointing(offload="host", keep=("gate_up",), plain=0)
    found = plan(
        "llama-3.1-8b", seq_len=100_003, placement="gpu8bit", host_ram="1TiB", checkpointing=asked
    )
    assert len(priced) == len(set(priced)) > 10
    assert (
        any(point["policy"]["keep"] == asked.keep for point in found.frontier[-1:]) and found.fits
    )


def test_a_step_nearly_as_fast_in_far_less_memory_is_shown():
    steps = [(5, 16.3), (14, 14.2), (30, 14.15), (75, 14.1)]
    points = [{"gpu_peak_bytes": n * GiB, "step_seconds": seconds} for n, seconds in steps]
    chosen = SimpleNamespace(frontier=points, gpu_peak_bytes=77 * GiB, step_seconds=14.1)
    assert _points(chosen) == [
        "16.3 s in 5.0 GiB",
        "14.2 s in 14.0 GiB",
        "14.1 s in 77.0 GiB (chosen)",
    ]
    # A whole step's peak stands at another moment than that of what layers keep: none is larger and
    # slower than one before.
    chosen.frontier = [points[0], {"gpu_peak_bytes": 15 * GiB, "step_seconds": 15.0}, *points[1:]]
    assert _points(chosen) == [
        "16.3 s in 5.0 GiB",
        "14.2 s in 14.0 GiB",
        "14.1 s in 77.0 GiB (chosen)",
    ]


def test_a_policy_is_said_in_words():
    said = policy_text(vars(Policy(plain=1, again=1)))
    assert said.startswith(
        "1 layer keeps everything; the others keep their input and attention in all but 1 on the "
        "host, in"
    )
    kept = policy_text(vars(Policy(again=2, keep=("gate_up",))))
    assert "keep their input, attention and gate and up in all but 2 on" in kept
    assert policy_text("off") == "off"
    assert "\npolicy          12 layers keep everything\n" in str(plan("llama-160m", seq_len=1024))
    found = plan("llama-3.1-8b", **RUN, checkpointing=Checkpointing(offload="host", every=4))
    assert (
        "keep one input in 4 on the host" in policy_text(found.policy)
        and "in 4, as asked" in found.why
    )
    assert (
        "are not kept, as asked"
        in plan("llama-3.1-8b", **RUN, checkpointing=Checkpointing(save_attention=False)).why
    )


@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
def test_the_first_step_is_planned_within_a_minute_beside_its_own(tokens):
    found = plan("llama-3.1-8b", **RUN | {"placement": "gpu8bit", "seq_len": tokens})
    seconds = found.first_step
    assert seconds["pinning"] == pytest.approx(
        (found.host_peak_bytes - 4 * GiB) / PIN_BYTES_PER_SECOND
    )
    assert (
        seconds["compiling"] > 0 < seconds["attention_choice"]
        and sum(seconds.values()) <= FIRST_STEP_BUDGET
    )
    assert "beyond the budget" not in str(found)
    assert f"first step      {found.step_seconds + sum(seconds.values()):.1f} s" in str(found)
    stock = plan(
        "llama-3.1-8b", **RUN | {"placement": "gpu8bit", "seq_len": 2048}, checkpointing="stock"
    )
    assert not any(stock.first_step.values())


def test_a_first_step_beyond_its_budget_is_said():
    """At 524,288 tokens inputs and attention outputs are 266 GiB, pinned once."""
    found = plan(
        "llama-3.1-8b", **RUN | {"placement": "gpu8bit", "seq_len": 1 << 19, "host_ram": "2000GiB"}
    )
    over = sum(found.first_step.values()) - FIRST_STEP_BUDGET
    assert over > 1 and f"; {over:.0f} s beyond the budget of a step and 60 s, once a run" in str(
        found
    )


def test_this_machines_gpu_is_known_by_all_that_torch_tells(monkeypatch):
    """A card that waits for its last blocks by its own number of processors."""
    from hfpatch.planner import measure

    told = SimpleNamespace(name="NVIDIA H100 SXM", multi_processor_count=132)
    rates = {
        f: float(i + 1)
        for i, f in enumerate(("peak_flops", "bandwidth", "link", "attention_forward", "peer"))
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(measure, "gpu_limit", lambda device: 79 * GiB)
    dtypes = []

    def timed(device, dtype):
        dtypes.append(dtype)
        return rates | {"attention_backward": 9.0}

    monkeypatch.setattr(measure, "_rates", timed)
    measure.measure_this(torch.float16)  # of a card without bfloat16
    found = measure.measure_this()
    assert dtypes == [torch.float16, torch.bfloat16]
    assert (found.name, found.processors, found.memory_bytes) == ("NVIDIA H100 SXM", 132, 79 * GiB)
    # measured: no share of them
    assert (found.matmul_flops, found.link_rate, found.peer_rate) == (1.0, 3.0, 5.0)
    assert found.data_sheet_flops == GPUS["h100"].peak_flops, (
        "MFU is the share that the callback gives"
    )


def test_starts_at_once():
    started = time.process_time()
    code = "import resource; from hfpatch.cli.main import main; main(['plan', '--model', 'llama-3.1-8b', '--json']);" \
           "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 1.5
    assert time.process_time() - started < 5


def test_no_placement_is_planned_behind_the_first_that_fits(monkeypatch):
    module, planned = sys.modules["hfpatch.planner.evaluate"], []
    monkeypatch.setattr(
        module,
        "evaluate",
        lambda _, name: planned.append(name) or SimpleNamespace(fits=name == "b"),
    )
    assert module.best(None, "abc").fits and planned == ["a", "b"]


def test_a_plan_is_its_caller_s_own():
    """Plans are remembered: settings that hold lists have a hash, and what a caller does to an
    answer is not in the next.
    """
    asked = {
        "seq_len": 8192,
        "placement": "gpu8bit",
        "checkpointing": Checkpointing(keep=["gate_up"], plain=0),
    }
    asked["adapters"] = Adapters(16, targets=["q_proj"])
    first = plan("llama-3.1-8b", **asked)
    expected = json.dumps(first.to_dict())
    for told in (first.gpu_bytes, first.seconds, first.policy, first.split):
        told.clear()
    assert json.dumps(plan("llama-3.1-8b", **asked).to_dict()) == expected


@pytest.mark.parametrize("base", ["bf16", "4bit"])
def test_an_optimizer_walks_no_frozen_weight(base):
    """As the callback plans the same run, which is told what is trained alone."""
    shape = dataclasses.replace(
        ModelShape.from_config(preset_config("llama-3.1-8b")), adapters=Adapters(16, base)
    )
    stays, memory = (
        resident("gpu8bit", shape, 1, Policy()),
        step_memory(shape, Policy(), batch=1, tokens=8192),
    )
    alone = Resident(shape.trained_parameters * shape.trained_itemsize(2), None, stays.optimizer)
    gpu = GPUS["rtx4090"]
    assert optimizer_seconds(gpu, memory, stays) == optimizer_seconds(gpu, memory, alone) < 1e-3


def test_a_config_json_may_hold_infinity(tmp_path):
    """As transformers writes Mamba 2's time_step_limit: a model's own folder was refused."""
    from transformers import Mamba2Config

    Mamba2Config(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert list(config_of(tmp_path)[1]["time_step_limit"]) == [0.0, float("inf")]


@tiny.not_before_transformers((5, 16), "chooses kernels for mixers by other ways")
def test_longer_lengths_of_a_hybrid_simulate_nothing_more(monkeypatch):
    """A step that is told by two shorter ones is told by the same two at every length."""
    from transformers import Qwen3_5TextConfig

    from hfpatch.planner import simulated

    def refuse(*args, **kwargs):
        raise AssertionError("simulated again")

    config = Qwen3_5TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    ).to_dict()  # fmt: skip
    tiles = Checkpointing(tile=256)
    found = plan(config, seq_len=2048, checkpointing=tiles)
    monkeypatch.setattr(simulated, "simulate", refuse)
    longer = plan(config, seq_len=4096, checkpointing=tiles)
    assert "768, 1,024 and 1,280 tokens" in found.why and longer.why == found.why
    assert longer.host_peak_bytes > found.host_peak_bytes


def test_a_faster_placement_that_fits_is_named():
    """Auto takes the most exact one; what is faster by more than the plan's error gets a line, with
    what it gives up. What is as fast, or does not fit, gets none.
    """
    run = {"seq_len": 8192, "gpu": "h100"}
    found = plan("llama-3.1-8b", **run)
    other = plan("llama-3.1-8b", **run, placement="gpu8bit")
    assert found.placement == "zero3-offload" and other.fits
    assert other.step_seconds < (1 - SECONDS_ERROR) * found.step_seconds
    assert found.faster == {"placement": "gpu8bit", "step_seconds": other.step_seconds}
    (line,) = re.findall(r"^faster +(.*)$", str(found), re.M)
    seconds = f"{other.step_seconds:.1f} s ({show.span(other.step_seconds)})"
    assert line.startswith(f"{seconds} with --placement gpu8bit: bf16 weights rounded at random")
    large = plan("llama-3.1-8b", **run | {"seq_len": 131072})
    assert large.placement == "zero3-offload" and not large.faster  # attention takes most of both
    small = plan("llama-3.1-8b", **run | {"gpu": "rtx4090"})
    for same in (other, large, small):
        assert not same.faster and "\nfaster" not in str(same)


HYBRIDS = {
    "qwen3_5_text": {"num_hidden_layers": 4},
    "nemotron_h": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
}


@tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_s_plan_is_what_its_whole_length_takes(family):
    """What is told by steps of three to five tiles, beside a simulated step of eight."""
    from hfpatch.decoder.small_instance import scaled_config
    from hfpatch.lab.simulate.implementations import build, config_class, prepare
    from hfpatch.lab.simulate.simulator import simulate

    small = scaled_config(config_class(family)(**HYBRIDS[family]), 4).to_dict()
    asked = {"placement": "gpu8bit", "checkpointing": Checkpointing(tile=256)}
    found = plan(small, seq_len=2048, **asked)
    by_shorter = "768, 1,024 and 1,280 tokens" in found.why
    assert by_shorter == (family != "lfm2")  # convolutions loop over no tokens
    step = simulate(prepare(build(small), "hfpatch"), 1, 2048, policy=Policy(**found.policy))
    taken = step.peak_bytes - step.categories["parameters"]
    planned = found.gpu_bytes["activations"] + found.gpu_bytes["gradients"]
    assert planned == pytest.approx(taken, rel=0.05)
    on_host = found.host_peak_bytes - answer.PROCESS_BYTES
    assert on_host == pytest.approx(step.host_peak_bytes, rel=0.05)
    assert found.flops == pytest.approx(step.flops["total"], rel=0.05)
