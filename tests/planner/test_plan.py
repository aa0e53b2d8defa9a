"""`hfpatch plan` as a caller meets it: answers, exit codes, JSON keys, errors of one sentence."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import tiny
import torch
from tiny import LONG, longer

import hfpatch
from hfpatch.budget.limits import GiB
from hfpatch.budget.measured import PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Checkpointing
from hfpatch.cli import main as cli
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import (
    DISK_READS,
    DISK_WRITES,
    GPUS,
    SECONDS_ERROR,
)
from hfpatch.lab.models import config_of
from hfpatch.lab.presets import preset_config
from hfpatch.lab.shallow import Values, model_of
from hfpatch.planner import answer, show
from hfpatch.planner.placements import PLACEMENTS, candidates, resident
from hfpatch.planner.plan import plan

KEYS = {"fits", "run", "gpu", "host", "time", "policy", "advice"}
RUN = {"seq_len": 131072, "gpu": "a100-80gb", "host_ram": "256GiB"}


@pytest.mark.parametrize(
    "name, dtype",
    longer([("adamw", "bfloat16"), ("adamw-fp32", "float32")], ("adamw-fp32", "float32")),
)
def test_trainers_own_optimizer_can_be_planned(name, dtype):
    """Weights and states are those that torch's AdamW makes; auto never chooses an optimizer that
    rounds updates away.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny.config()).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [
        value for state in optimizer.state.values() for key, value in state.items() if key != "step"
    ]
    shape = model_of(Values(model.config.to_dict())).sizes
    assert resident(name, shape, 1, Checkpointing()).optimizer == sum(
        value.nbytes for value in states
    )
    # fp32 weights have a bf16 copy under autocast, of which a tiled layer drops its own.
    for whole, copied in (
        (True, shape.parameters),
        (False, max(shape.layer_parameters, shape.embedding_parameters)),
    ):
        weights = sum(p.nbytes for p in model.parameters()) + (
            2 * copied if dtype == "float32" else 0
        )
        policy = Checkpointing("off" if whole else "auto")
        assert resident(name, shape, 1, policy).parameters == weights
    found = plan("llama-160m", seq_len=1024, placement=name)
    assert found.fits and name in str(found) and name not in candidates("auto", 1)


def test_the_job_this_is_for_fits():
    found = hfpatch.plan("llama-3.1-8b", **RUN)
    assert found.fits and found.advice.suggestions == []
    assert sum(found.gpu.parts.values()) == found.gpu.peak_bytes <= found.gpu.usable_bytes
    assert set(found.gpu.parts) == {"parameters", "gradients", "optimizer", "activations", "slack"}
    assert found.time.step_seconds == pytest.approx(sum(found.time.parts.values()))
    assert 0.2 < found.time.mfu < 0.7
    assert "fits" in str(found) and "zero3-offload" in str(found)


# Each suggestion, taken, is a run that fits: a few ways of not fitting, by GPU, by host, by
#     placement.
@LONG
@pytest.mark.parametrize("run", [
    {"gpu": "rtx4090", "host_ram": "5GiB", "seq_len": 131072},
    {"gpu": "rtx4090", "host_ram": "6GiB", "seq_len": 262144, "placement": "gpu8bit"},
    {"gpu": "rtx4090", "host_ram": "2TiB", "seq_len": 131072, "checkpointing": "gpu", "batch": 8},
])  # fmt: skip
def test_suggestions_hold(run):
    found = plan("llama-3.2-1b", **run)
    assert not found.fits and found.advice.suggestions
    names = {"--gpu": "gpu", "--gpus": "gpus", "--host-ram": "host_ram", "--placement": "placement",
             "--batch": "batch",
             "--seq-len": "seq_len", "--checkpointing": "checkpointing"}  # fmt: skip
    for suggestion in found.advice.suggestions:
        flag, value = suggestion["change"].split()[:2]
        if flag == "--lora-r":
            changed = run | {
                "adapters": Adapters(16, "4bit" if "4bit" in suggestion["change"] else "bf16"),
                "placement": "auto",
            }
            assert plan("llama-3.2-1b", **changed).fits, suggestion
            continue
        if value == "DIR":
            value = "./checkpoints"
        changed = run | {names[flag]: int(value) if value.isdigit() else value}
        if flag == "--gpus":
            changed["placement"] = "auto"
        assert plan("llama-3.2-1b", **changed).fits, suggestion


@LONG
def test_longest_sequence_is_the_longest():
    """To a thirtieth."""
    same = {"gpu": "l40s", "host_ram": "256GiB", "placement": "gpu8bit"}
    found = plan("llama-160m", seq_len=65536, **same, max_seq_len=True)
    assert found.advice.max_seq_len > 65536
    assert plan("llama-160m", **same, seq_len=found.advice.max_seq_len).fits
    longer = found.advice.max_seq_len * 33 // 32 + 1024
    assert not plan("llama-160m", **same, seq_len=longer).fits


@pytest.mark.parametrize("gpus", longer([1, 2, 8], 8))
def test_every_placement_answers(gpus):
    for row in PLACEMENTS.values():
        if row.one if gpus == 1 else row.sharded:
            found = plan("llama-160m", seq_len=8192, gpus=gpus, placement=row.name)
            assert found.run.placement == row.name and found.time.step_seconds > 0
            assert found.time.tokens_per_second == pytest.approx(
                gpus * 8192 / found.time.step_seconds
            )


@LONG
def test_every_gpu_answers():
    for name in GPUS:
        found = plan("llama-160m", seq_len=4096, gpu=name)
        assert found.fits and 0 < found.time.mfu < 1, name


def test_files_are_planned_at_the_disk_s_rate(tmp_path):
    """What goes into files takes the disk's seconds, which the machine's GPUs share."""
    asked = {"every": 1, "tile": 4096, "plain": 0, "keep": "attention"}
    run = {"seq_len": 16384, "placement": "fsdp2"}
    run |= {"checkpointing": Checkpointing(offload=str(tmp_path), **asked)}
    eight, sixteen = (plan("llama-3.2-1b", **run, gpus=gpus) for gpus in (8, 16))
    # inputs, attention outputs and lse of each of eight ranks
    out = 16 * (2 * 2 * 2048 + 4 * 32) * 16384
    more = sixteen.time.parts["copy_wait"] - eight.time.parts["copy_wait"]
    into, back = out / DISK_WRITES, (eight.host.link_bytes - out) / DISK_READS
    assert more == pytest.approx(8 * (into + back), rel=0.03)


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
    peaks = {plan(form, seq_len=4096).gpu.peak_bytes for form in forms}
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

    assert config_of("Qwen/Qwen3-8B")[1]["hidden_size"] == 4096
    done = ask("owner/name")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'owner/name' is no preset" in done.stderr and "to a plan its config.json" in done.stderr


@pytest.mark.parametrize("change, words", [
    ({"model": "llama-3-1-8b"}, "llama-3.1-8b"), ({"gpu": "abacus"}, "h100"),
    ({"placement": "moon"}, "zero3-offload"),
    ({"placement": "fsdp2"}, "several GPUs"), ({"seq_len": 0}, "seq_len"), ({"batch": -1}, "batch"),
    ({"gpus": 1.5}, "gpus"), ({"host_ram": "lots"}, "256GiB"),
    ({"checkpointing": "maybe"}, "checkpointing must be"),
    ({"model": {"model_type": "bilbo"}}, "bilbo"), ({"gpu": "this"}, "CUDA"),
    ({"model": 3}, "got int"), ({"gpu": 3}, "h100"),
    ({"adapters": 16}, "got 16"), ({"max_seq_len": 8192}, "got 8192"),
])  # fmt: skip
def test_errors_are_one_sentence(change, words, monkeypatch):

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"model": "llama-tiny", "seq_len": 4096} | change
    with pytest.raises(ValueError, match=rf"^hfpatch: [^\n]*{words}[^\n]*\.$"):
        plan(arguments.pop("model"), **arguments)


def test_command_json_and_exit_codes(capsys):
    common = ["plan", "--model", "llama-3.1-8b", "--host-ram", "256GiB", "--json"]
    common += ["--seq-len", "8k"]
    assert cli.main([*common, "--gpu", "a100-80gb"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == KEYS and answer["fits"] is True and answer["gpu"]["peak_bytes"] > 0
    assert cli.main([*common, "--gpu", "rtx4090", "--placement", "gpu8bit"]) == 3
    answer = json.loads(capsys.readouterr().out)
    changes = {suggestion["change"].split()[0] for suggestion in answer["advice"]["suggestions"]}
    assert answer["fits"] is False and {"--placement", "--lora-r"} <= changes
    assert cli.main([*common, "--gpu", "abacus"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


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
    named = re.search(r"Did you mean (.*?)\?", said)[1].split(", ")
    assert named[0].startswith(near) and len(named) == 3, said
    assert said.count("\n") == 1 and "config.json" in said and "owner/name" in said


def test_untiled_layers_are_planned_as_apply_serves_them(tmp_path, capsys):
    small = {"num_hidden_layers": 2, "vocab_size": 1024, "attention_dropout": 0.1}
    small = preset_config("llama-3.2-1b") | small
    (tmp_path / "config.json").write_text(json.dumps(small))
    asked = ["plan", "--model", str(tmp_path), "--seq-len", "8192", "--placement", "gpu8bit"]
    assert cli.main([*asked, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)["advice"]
    assert named["keeps"].startswith("layers run untiled (attention dropout")
    assert named["why"].startswith("simulated")


NEOX = {
    "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip


def test_a_model_of_any_family_is_planned(tmp_path, capsys):
    from hfpatch.lab.simulate.implementations import build

    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    arguments = ["plan", "--model", str(tmp_path), "--seq-len", "2048", "--placement", "gpu8bit",
                 "--json", "--checkpointing", "stock-checkpointing"]  # fmt: skip
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    parameters = sum(p.numel() for p in build(NEOX).parameters())
    assert answer["gpu"]["parts"]["parameters"] == 2 * parameters
    assert answer["gpu"]["parts"]["activations"] > 2 * 2048 * 64 * 2
    seconds = answer["time"]["parts"]
    assert seconds["elementwise"] * GPUS["h100"].bandwidth > (
        2 * 2048 * (40 * 64 + 10 * 128 + 5 * 512)
    )
    assert seconds["optimizer"] > 0 and seconds["exchange"] == 0  # one GPU


def test_what_loops_over_single_tokens_is_not_simulated_for_ever(monkeypatch):
    monkeypatch.setattr("hfpatch.lab.steps.OPERATIONS", 500)
    values = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    with pytest.raises(
        ValueError,
        match="^hfpatch: a simulated step must have at most 512 operations, and plain code",
    ):
        plan(values, seq_len=512)


def test_adapters_and_the_longest_sequence_of_any_family():
    """LoRA's gradients are the adapters' alone, and memory at the longest length, and a little
    above it, is as is said.
    """
    card = dataclasses.replace(GPUS["h100"], memory_bytes=2 * GiB)
    asked = {"gpu": card, "checkpointing": "stock", "adapters": Adapters(8)}
    found = plan(NEOX, seq_len=4096, max_seq_len=True, **asked)
    columns = 2 * (64 + 192 + 64 + 64 + 64 + 128 + 128 + 64)  # of two layers' four Linear layers
    assert found.gpu.parts["gradients"] <= 2 * 8 * columns < found.gpu.parts["parameters"]
    assert found.time.parts["optimizer"] < 1e-4 and found.run.adapters["rank"] == 8
    assert plan(NEOX, seq_len=found.advice.max_seq_len, **asked).fits
    assert not plan(NEOX, seq_len=found.advice.max_seq_len * 33 // 32 + 1024, **asked).fits


@LONG
def test_the_language_tower_of_a_model_of_several_is_planned(tmp_path, capsys):
    """Files leave out what their class assumes."""
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
        assert answer["gpu"]["parts"] == plan(text, seq_len=32768, placement="gpu8bit").gpu.parts
        assert answer["run"]["model"].endswith("(language tower)")


def test_the_first_step_is_planned_within_a_minute_beside_its_own():
    found = plan("llama-3.2-1b", **RUN | {"placement": "gpu8bit", "seq_len": 16384})
    seconds = found.time.first_step
    pinned = found.host.peak_bytes - 4 * GiB
    assert seconds["pinning"] == pytest.approx(pinned / PIN_BYTES_PER_SECOND)
    assert seconds["compiling"] > 0 and sum(seconds.values()) <= 60
    assert f"first step      {found.time.step_seconds + sum(seconds.values()):.1f} s" in str(found)


def test_a_plan_is_its_caller_s_own():
    """Plans are remembered: settings that hold lists have a hash, and what a caller does to an
    answer is not in the next.
    """
    settings = Checkpointing(keep="gate_up", plain=0)
    asked = {"seq_len": 1024, "placement": "gpu8bit", "checkpointing": settings}
    asked["adapters"] = Adapters(16, targets=["q_proj"])
    first = plan("llama-160m", **asked)
    for told in (first.gpu.parts, first.time.parts):
        told.clear()
    again = plan("llama-160m", **asked)
    assert again.policy == first.policy and again.gpu.parts and again.time.parts


def test_a_repeated_question_is_answered_at_once(tmp_path):
    """Without torch, from a file. A changed source asks anew."""
    code = "import resource, sys; from hfpatch.cli.main import main; main({}); print(" \
           "'torch' in sys.modules, resource.getrusage(resource.RUSAGE_SELF).ru_utime)"  # fmt: skip
    ask = ["plan", "--model", "llama-160m", "--seq-len", "1024", "--checkpointing", "host"]
    said = []
    for _ in range(2):
        run = [sys.executable, "-c", code.format(ask)]
        around = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(run, capture_output=True, text=True, check=True, env=around)
        said.append(done.stdout.splitlines())
    assert said[0][:-1] == said[1][:-1]
    torch_there, seconds = said[1][-1].split()
    assert said[0][-1].startswith("True") and torch_there == "False" and float(seconds) < 0.6


def test_a_config_json_may_hold_infinity(tmp_path):
    """As transformers writes Mamba 2's time_step_limit: a model's own folder was refused."""
    from transformers import Mamba2Config

    Mamba2Config(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert list(config_of(tmp_path)[1]["time_step_limit"]) == [0.0, float("inf")]


def test_a_faster_placement_that_fits_is_named():
    """Auto takes the most exact one; what is faster by more than the plan's error gets a line, with
    what it gives up. What is as fast, or does not fit, gets none.
    """
    run = {"seq_len": 8192, "gpu": "h100"}
    found = plan("llama-3.1-8b", **run)
    other = plan("llama-3.1-8b", **run, placement="gpu8bit")
    assert found.run.placement == "zero3-offload" and other.fits
    assert other.time.step_seconds < (1 - SECONDS_ERROR) * found.time.step_seconds
    assert found.advice.faster == {"placement": "gpu8bit", "step_seconds": other.time.step_seconds}
    (line,) = re.findall(r"^faster +(.*)$", str(found), re.M)
    seconds = f"{other.time.step_seconds:.1f} s ({show.span(other.time.step_seconds)})"
    assert line.startswith(f"{seconds} with --placement gpu8bit: bf16 weights rounded at random")
    assert not other.advice.faster and "\nfaster" not in str(other)


HYBRIDS = {
    "qwen3_5_text": {"num_hidden_layers": 4},
    "nemotron_h": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
}


@tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
@pytest.mark.parametrize("family", longer(list(HYBRIDS)))
def test_a_hybrid_s_plan_is_what_its_whole_length_takes(family):
    """What is told by steps of three to five tiles, beside a simulated step of eight."""
    from hfpatch.decoder.small_instance import scaled_config
    from hfpatch.lab.simulate.implementations import build, config_class, prepare
    from hfpatch.lab.simulate.simulator import simulate

    small = scaled_config(config_class(family)(**HYBRIDS[family]), 4).to_dict()
    asked = {"placement": "gpu8bit", "checkpointing": Checkpointing(tile=256)}
    found = plan(small, seq_len=2048, **asked)
    step = simulate(prepare(build(small), "hfpatch"), 1, 2048, policy=found.policy)
    taken = step.peak_bytes - step.categories["parameters"]
    planned = found.gpu.parts["activations"] + found.gpu.parts["gradients"]
    assert planned == pytest.approx(taken, rel=0.05)
    on_host = found.host.peak_bytes - answer.PROCESS_BYTES
    assert on_host == pytest.approx(step.host_peak_bytes, rel=0.05)
    assert found.time.flops == pytest.approx(step.flops["total"], rel=0.05)
