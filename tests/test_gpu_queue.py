"""The GPU queue's entries, each run whole on a CPU at tiny size, and what their figures are made
of.
"""

import ast
import contextlib
import csv
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "gpu"
sys.path.insert(0, str(FOLDER))

import cases  # noqa: E402
import common  # noqa: E402
import floor  # noqa: E402
import slot  # noqa: E402
import step  # noqa: E402

import hfpatch  # noqa: E402
from hfpatch.budget import hardware  # noqa: E402
from hfpatch.budget.adapters import Adapters  # noqa: E402
from hfpatch.budget.policy import Policy  # noqa: E402
from hfpatch.budget.shape import ModelShape  # noqa: E402
from hfpatch.lab.first_step import first_step  # noqa: E402
from hfpatch.lab.presets import preset_config  # noqa: E402
from hfpatch.lab.stock import STOCK_CHECKPOINTING, flops_of, memory_of  # noqa: E402
from hfpatch.planner.placements import Resident  # noqa: E402
from hfpatch.planner.seconds import run_time  # noqa: E402
from hfpatch.store.device import CudaDevice  # noqa: E402

# torchao and deepspeed warn on import of versions that are not ours to change.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

# Entry, arguments, columns that a row must fill.
ENTRIES = {
    "01b_float64": ([], ["what", "passed", "share", "where"]),
    "01c_model": ([], ["check", "passed", "way"]),
    "02a_elementwise": ([], ["op", "impl", "fwd_ms", "bwd_share", "err_grad"]),
    "02b_loss": ([], ["impl", "both_ms", "share"]),
    "03_models": ([], ["impl", "tokens"]),
    "04_attention": ([], ["backend", "group", "bwd_tflop_s", "err_grad"]),
    "05_step_128k": ([], ["step_s", "floor_s", "ratio", "attention_s", "copy_wait_s", "policy"]),
    "06_offload_peer": ([], ["step_s", "tokens_s"]),
    "07_short_steps": ([], ["impl", "tier"]),
    "08_longest": (
        ["--layers", "4", "--tokens", "48", "--placement", "gpu8bit"],
        ["layers", "run", "fits", "needs_host_gib", "plan_max"],
    ),
    "09_gpu8bit": ([], ["first_loss", "last_loss", "used_ids", "policy"]),
    "12_tiles": ([], ["what"]),
    "13_qlora": (["--rivals", "trl"], ["tokens", "fits", "step_s"]),
    "15_streamed": (["--bases", "bf16"], ["base", "weights", "step_s", "loss"]),
    "17_changes": ([], ["check", "backend", "share", "again", "pinned_gib", "apart", "policy"]),
    "18_timeline": ([], ["clock_s", "exposed_share", "clock_exposed_s", "idle_s", "policy"]),
    "19_experts": ([], ["fwd_ms", "bwd_ms", "tflop_s", "err_out", "err_grad"]),
    "20_families": ([], ["what", "kernels", "step_s", "tokens_s", "loss", "policy"]),
    "14_sequence": ([], ["step_s", "tokens_s", "plan_step_s", "loss"]),
}
# they start programs that import everything again
SLOW = {"01a_tests", "11_learning", "16_engines"}


def load(name: str):
    spec = importlib.util.spec_from_file_location("gpu_" + name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(folder: Path) -> list[dict]:
    (path,) = folder.glob("*.csv")
    return list(csv.DictReader(path.open()))


def test_every_entry_is_tested():
    entries = {p.stem for p in FOLDER.glob("[0-9]*.py")}
    assert entries == {*ENTRIES, *SLOW, "10_plan"}


@pytest.mark.parametrize(
    # Half a minute, and its parts have tests of their own.
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "01b_float64" else [])
        for name in ENTRIES
    ],
)
def test_entry_at_small_size(name, tmp_path):
    arguments, columns = ENTRIES[name]
    module = load(name)
    assert module.main(["--small", "--commit", "abc1234", "--out", str(tmp_path), *arguments]) == 0
    rows = rows_of(tmp_path)
    assert rows and all(row["commit"] == "abc1234" and "torch=" in row["versions"] for row in rows)
    for column in columns:
        assert any(row.get(column) not in (None, "") for row in rows), (
            f"no row of {name} has {column}"
        )
    for row in rows:
        # Liger alone has no CPU path; anything else that fails here fails on a GPU too.
        assert not row.get("error") or row.get("impl") == "liger", row["error"]
        assert row.get("passed", "True") == "True", row
    (page,) = tmp_path.glob("*.md")
    assert "code path was tried" in page.read_text()
    assert [p.name for p in tmp_path.glob("*.png")] == (
        [] if name == "01b_float64" or name == "01c_model" else [f"{page.stem}.png"]
    )


def test_entries_need_no_test_package():
    """pytest runs in 01a alone, in a process of its own: a bare machine has none."""
    tests = {path.stem for path in FOLDER.parents[1].glob("tests/*.py")}
    for path in (*FOLDER.glob("*.py"), *FOLDER.parents[1].glob("hfpatch/lab/*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not names & (tests | {"pytest"}), path.name


def test_what_compute_waited_for_is_read_from_a_recorded_step():
    """A card's events, played: copies beside kernels are hidden, those in a gap are exposed; a gap
    without a copy is the host's.
    """
    from hfpatch.lab.profile.families import copy_wait

    events = [
        ("gemm", 7, 0.0, 2.0), ("gemm", 7, 3.0, 5.0), ("gemm", 7, 5.5, 6.0),
        ("Memcpy DtoH (Device -> Pinned)", 13, 1.0, 2.5),
        ("Memcpy HtoD (Pinned -> Device)", 14, 4.0, 4.5),
    ]  # fmt: skip
    seen = load("18_timeline").Seen(events, "")
    assert seen.span == (0.0, 6.0) and seen.idle == pytest.approx(1.5)
    assert copy_wait(seen.events) == pytest.approx(0.5)
    assert seen.seconds_of("DtoH") == 1.5 and seen.seconds_of("HtoD") == 0.5


def test_an_entry_refuses_a_machine_without_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        load("02b_loss").main(["--out", str(tmp_path)])
    assert "--small" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("01a_tests", ["--tests", "tests/ops/test_linear_cross_entropy.py"]),
        ("11_learning", []),
        ("16_engines", []),
    ],
)
def test_slow_entry_at_small_size(name, arguments, tmp_path):
    assert load(name).main(["--small", "--out", str(tmp_path), *arguments]) == 0
    assert rows_of(tmp_path)


@pytest.mark.long
def test_cases_in_a_process_of_their_own(tmp_path):
    args = common.parse(common.parser("03_models", "x"), ["--small", "--out", str(tmp_path)])
    sheet = common.Sheet(args)
    wanted = step.small(
        sheet,
        [
            {"impl": "hfpatch", "layers": 32, "tokens": 8192},
            {"impl": "stock", "layers": 32, "tokens": 8192},
        ],
    )
    args.small = False  # from here on as on a GPU
    rows = step.run_cases(sheet, wanted)
    assert [r["impl"] for r in rows] == ["hfpatch", "stock"] and all(r["step_s"] > 0 for r in rows)


def test_a_training_whose_time_is_over_gives_the_steps_it_took(tmp_path):
    module = load("09_gpu8bit")
    assert module.main(["--small", "--seconds", "0.2", "--out", str(tmp_path)]) == 0
    (row,) = rows_of(tmp_path)
    assert len(row["steps_s"].split()) == len(row["losses"].split()) == 1 and not row.get("error")


def test_a_case_that_is_stopped_leaves_what_was_known_of_it(tmp_path, monkeypatch):
    """A step that takes longer than the plan thought is ended from outside: its first one, already
    timed, is in the row.
    """
    sheet = common.Sheet(
        common.parse(common.parser("03_models", "x"), ["--small", "--out", str(tmp_path)])
    )
    (case,) = step.small(sheet, [{"impl": "hfpatch", "layers": 32, "tokens": 8192}])
    known, seen = [], []
    monkeypatch.setattr(step, "GradWatch", lambda model: 1 / 0)  # behind the first step
    step.run(
        [case], lambda case, result: seen.append(result), lambda result: known.append(dict(result))
    )
    assert known[-1]["first_step_s"] > 0 and known[-1]["policy"] and "step_s" not in known[-1]
    assert (
        seen[0]["first_step_s"] == known[-1]["first_step_s"]
        and "ZeroDivisionError" in seen[0]["error"]
    )
    # And from a process that hangs, whose time is over.
    played = tmp_path / "step.py"
    played.write_text(
        "import sys, time\nopen(sys.argv[2], 'w').write('{\"step_s\": 1.5}\\n')\n"
        "open(sys.argv[3], 'w').write('{\"first_step_s\": 2.5}')\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(step, "__file__", str(played))
    monkeypatch.setattr(common, "OVERTIME", 0)
    sheet.args.small, sheet.args.seconds = False, time.monotonic() - sheet.began + 2
    first, second, third = step.run_cases(sheet, [case] * 3)
    assert first["step_s"] == 1.5 and "error" not in first
    assert second["first_step_s"] == 2.5 and "time of this run was over" in second["error"]
    assert "first_step_s" not in third and "time of this run was over" in third["error"]


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    args = common.parse(common.parser("03_models", "x"), ["--small", "--out", str(tmp_path)])
    sheet = common.Sheet(args)
    wanted = step.small(
        sheet, [{"impl": "hfpatch", "checkpointing": "off", "label": {"run": i}} for i in (1, 2)]
    )
    real, seen = step.measure, []

    def once(*arguments):
        seen.append(1)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(*arguments)

    monkeypatch.setattr(step, "measure", once)
    first, second = step.run_cases(sheet, wanted)
    assert first["error"] == "out of memory" and "step_s" in second
    with monkeypatch.context() as patch:
        patch.setattr(step, "measure", lambda *_: {}["a kernel's name"])
        (row,) = step.run_cases(sheet, wanted[:1])
    assert (
        row["error"].startswith("KeyError")
        and "test_gpu_queue.py" in row["at"]
        and "step.py" in row["at"]
    )
    assert "Traceback" in capsys.readouterr().err
    assert slot._telling({"impl": "hfpatch", "floor_s": 1.0} | row)[0] == "error", (
        "a line that is cut begins with it"
    )


# A stage's time is the time between its mark and the one before: the second of these does ten times
# the first's work.
def test_timed_gives_each_stage_its_own_time():
    x = torch.randn(200, 200)

    def stages(i, mark):
        x @ x
        mark()
        for _ in range(50):
            x @ x
        mark()

    first, second = common.timed(stages, budget_ms=50)
    assert second > 5 * first > 0


def test_rows_are_on_disk_before_the_run_ends(tmp_path):
    sheet = common.Sheet(
        common.parse(common.parser("02b_loss", "x"), ["--small", "--out", str(tmp_path)])
    )
    sheet.add(impl="a", ms=1.23456789)
    sheet.add(impl="b", share=0.5)
    first, second = rows_of(tmp_path)
    assert (first["impl"], first["ms"], first["share"], second["share"]) == (
        "a",
        "1.2346",
        "",
        "0.5",
    )
    assert (
        first["device"] == second["device"]
        and first["command"] == "python scripts/gpu/02b_loss.py --small"
    )


def test_time_that_is_over_is_said(tmp_path):
    sheet = common.Sheet(
        common.parse(
            common.parser("02b_loss", "x"), ["--small", "--out", str(tmp_path), "--seconds", "0"]
        )
    )
    assert sheet.late("liger 4096") and "liger 4096" in sheet.page("t", "w").read_text()


@pytest.mark.parametrize("name", cases.OPS)
def test_errors_pass_a_right_op_and_name_a_wrong_one(name):
    op = cases.OPS[name]
    rows, shared, fixed = op.make(37, cases.TINY, torch.bfloat16, torch.device("cpu"), seed=3)
    ups = [torch.randn_like(o) for o in op.plain(*rows, *shared, *fixed)]

    def wrong(*tensors):
        return tuple(o * 1.06 for o in op.ours(*tensors))  # an error of some rounding steps of bf16

    def broken(*tensors):
        return tuple(
            o.masked_fill(torch.arange(o.numel()).view(o.shape) == 5, float("nan"))
            for o in op.ours(*tensors)
        )

    verdicts = []
    for function in (op.ours, wrong, broken):
        # Chunks of 16 do not divide 37.
        found = cases.errors(op, function, rows, shared, fixed, ups, chunk=16)
        assert {k[:3] for k in found} == {"out", "gra"}
        verdicts.append(all(e.within(torch.bfloat16) for e in found.values()))
    assert verdicts == [True, False, False]


def test_errors_in_chunks_are_those_of_the_whole():
    op = cases.OPS["add_rms_norm"]
    rows, shared, fixed = op.make(37, cases.TINY, torch.bfloat16, torch.device("cpu"), seed=3)
    ups = [torch.randn_like(o) for o in op.plain(*rows, *shared, *fixed)]
    whole, parts = (cases.errors(op, op.ours, rows, shared, fixed, ups, chunk=c) for c in (64, 10))
    for key in whole:
        assert whole[key].got == pytest.approx(parts[key].got, rel=1e-9)
        assert whole[key].relative == pytest.approx(parts[key].relative, rel=1e-9)


# A device's counters, played: the highest total comes at the second gradient, when one gradient
# (400 bytes) is alive.
def test_grad_watch_takes_the_gradients_alive_at_the_peak(monkeypatch):
    totals = iter([5000, 9000, 8700])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(totals))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 10000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False)
    )
    watch = step.GradWatch(model)
    model(torch.randn(3, 10)).sum().backward()
    found = watch.close(before=1000)
    GiB = common.GiB
    assert found["parameters_gib"] == 800 / GiB and found["gradients_gib"] == 800 / GiB
    assert found["peak_gib"] == 8000 / GiB and found["beyond_gib"] == pytest.approx(
        (9000 - 400 - 800 - 1000) / GiB
    )
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# The model's figures by hand: 8B at 131,072 tokens takes 2.35e16 FLOPs where attention forward is
# not repeated.
def test_floor_counts_the_least_flops_of_a_step(monkeypatch):
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    rate = 1e15
    per_token = 2 * (shape.layer_parameters - 2 * shape.hidden_size) / rate
    gemm = {
        "forward": per_token * 8192,
        "input gradient": per_token * 8192,
        "weight gradient": per_token * 8192,
    }
    one_way = 2 * 131072**2 * shape.q_size / rate
    monkeypatch.setattr(floor, "gemm_seconds", lambda *a: gemm)
    monkeypatch.setattr(floor.common, "matmul_rate", lambda *a: rate)
    monkeypatch.setattr(
        floor,
        "attention_seconds",
        lambda *a: {"backend": "x", "group": 1, "forward": one_way, "backward": 2.5 * one_way},
    )
    found = floor.floor(shape, 131072, torch.device("cpu"), False)
    assert found["floor_s"] == pytest.approx(2.35e16 / rate, rel=0.005)
    assert found["floor_cube_s"] == pytest.approx(found["floor_s"], rel=1e-6)
    assert found["gemm_tflop_s"] == pytest.approx(rate / 1e12)


def test_longest_counts_host_memory_as_the_engine_reserves_it():
    longest = load("08_longest")
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    GiB = common.GiB
    assert longest.host_bytes(shape, 131072, 32, 1, True) == 32 * (2 * GiB + 131072 * 32 * 4)
    assert longest.host_bytes(shape, 524288, 32, 1, False) == 128 * GiB
    assert longest.kept_for(shape, 524288, 32, 100.0) == {
        "offload": "host",
        "every": 2,
        "save_attention": False,
        "plain": 0,
        "keep": [],
    }
    assert longest.kept_for(shape, 131072, 32, 100.0)["save_attention"] is True


# One row as 05 writes it, its figures set to the closed form's own, times a known error.
def test_plan_is_held_against_measured_rows(tmp_path):
    plan = load("10_plan")
    row = {
        "impl": "hfpatch",
        "layers": "32",
        "tokens": "131072",
        "policy": "host every=1 save=1 tile=8192",
    }
    expected = plan.planned(row, plan.gpu_row("h100"))
    assert (
        plan.policy_from(row["policy"]) == Policy("host", 1, True, 8192)
        and plan.policy_from("") is None
    )
    kept = plan.policy_from("gpu every=1 save=1 again=3 wide=1 tile=8192 plain=2 keep=qkv,mid")
    assert kept == Policy("gpu", 1, True, 8192, plain=2, keep=("qkv", "mid"), again=3, wide=True)
    GiB = common.GiB
    row |= {
        "peak_gib": expected["gpu"] / GiB,
        "pinned_gib": expected["host"] / GiB / 1.1,
        "step_s": expected["seconds"] * 2,
    }
    row |= {"device": "NVIDIA H100 80GB HBM3", "commit": "abc"}
    other = row | {"impl": "liger", "policy": ""}
    with (tmp_path / "05_step_128k.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([row, other])
    out = tmp_path / "out"
    assert plan.main(["--results", str(tmp_path), "--out", str(out)]) == 0
    (found,) = rows_of(out)
    # Without a warm-up the step that was timed pinned 64 GiB, which the plan knows of.
    cold = (
        plan.planned(row | {"first_step_s": row["step_s"]}, plan.gpu_row("h100"))["seconds"]
        - expected["seconds"]
    )
    assert (
        cold > 20
        and plan.planned(row | {"first_step_s": 1.0}, plan.gpu_row("h100"))["seconds"]
        == expected["seconds"]
    )
    assert float(found["gpu_off"]) == pytest.approx(0, abs=1e-4)
    assert float(found["host_off"]) == pytest.approx(0.1, abs=1e-4)
    assert (
        float(found["seconds_off"]) == pytest.approx(-0.5, abs=1e-4) and found["right"] == "False"
    )


# gpu8bit holds 6.03 bytes a parameter in place of the 4 of a step without optimizer.
def test_plan_adds_the_optimizer_that_a_placement_brings():
    plan = load("10_plan")
    row = {
        "impl": "hfpatch",
        "layers": "32",
        "tokens": "131072",
        "policy": "host every=1 save=1 wide=1 tile=8192",
    }
    without, with_it = (
        plan.planned(r, plan.gpu_row("h100"))["gpu"] for r in (row, row | {"placement": "gpu8bit"})
    )
    parameters = ModelShape.from_config(preset_config("llama-3.1-8b")).parameters
    assert with_it - without == pytest.approx((2 + 2 * 4 / 256) * parameters, rel=1e-6)
    # and what `hfpatch plan` says itself, but for the allocator's slack
    policy = hfpatch.Checkpointing(
        offload="host", every=1, save_attention=True, tile=8192, plain=0, keep=()
    )
    said = hfpatch.plan(
        "llama-3.1-8b", seq_len=131072, gpu="h100", placement="gpu8bit", checkpointing=policy
    )
    assert with_it == said.gpu_peak_bytes - said.gpu_bytes["slack"]
    seconds = plan.planned(row | {"placement": "gpu8bit"}, plan.gpu_row("h100"))["seconds"]
    assert seconds == pytest.approx(said.step_seconds)
    # of a step that ran forward and backward
    alone = plan.planned(row, plan.gpu_row("h100"))["seconds"]
    assert seconds - alone == pytest.approx(said.seconds["optimizer"])


def test_plan_of_adapters_over_four_bits_is_what_the_plan_says():
    plan = load("10_plan")
    row = {"impl": "hfpatch", "layers": "32", "tokens": "131072", "rank": "16", "base": "4bit"}
    row["policy"] = "host every=1 save=1 wide=1 tile=8192"
    policy = hfpatch.Checkpointing(
        offload="host", every=1, save_attention=True, tile=8192, plain=0, keep=()
    )
    said = hfpatch.plan(
        "llama-3.1-8b",
        seq_len=131072,
        gpu="h100",
        placement="adamw",
        checkpointing=policy,
        adapters=Adapters(16, "4bit"),
    )
    got = plan.planned(row, plan.gpu_row("h100"))
    assert got["gpu"] == said.gpu_peak_bytes - said.gpu_bytes["slack"] - said.gpu_bytes["optimizer"]
    assert got["seconds"] == pytest.approx(said.step_seconds - said.seconds["optimizer"])
    assert "13_qlora" in plan.SOURCES


def test_another_family_takes_the_same_path(tmp_path):
    assert (
        load("05_step_128k").main(
            ["--small", "--model", "Qwen/Qwen3-8B", "--layers", "8", "--out", str(tmp_path)]
        )
        == 0
    )
    (row,) = rows_of(tmp_path)
    assert row["preset"] == "Qwen/Qwen3-8B" and float(row["step_s"]) > 0 and not row.get("error")
    assert float(row["step_whole_s"]) == pytest.approx(float(row["step_s"]) * 36 / 8, rel=1e-3)


def test_every_part_is_made_of_entries_and_fits_nine_minutes():
    for part, jobs in slot.PARTS.items():
        assert {job.entry for job in jobs} <= {p.stem for p in FOLDER.glob("[0-9]*.py")}, part
        whole = [job for job in jobs if not job.small and not job.spare]
        # Of those at tiny size the first compiles; the rest take seconds each, and what stands last
        # may be left out.
        before = [job for job in jobs[: jobs.index(whole[-1])] if job.small]
        tiny_ones = sum(75 if i == 0 else 6 for i in range(len(before)))
        assert sum(job.seconds for job in whole) + tiny_ones < 525, part
    parts = {
        part: {job.entry for job in jobs if not job.small} for part, jobs in slot.PARTS.items()
    }
    assert parts[2] | parts[3] <= {*slot.SMALL, "11_learning", "10_plan"} | parts[1], (
        "each is tried in the first part"
    )


# Seconds a process takes to import, build its model and compile, beside those of the plan's first
# step; a floor's measurements.
START, FLOOR = 20, 10
# for a layer whose Linears are of a class of one's own (nf4.py): each is asked what it does
ASKED = 0.5


def test_a_slots_steps_end_in_time_by_the_plans_arithmetic(monkeypatch, tmp_path):
    """On an H100: what an entry starts, at the closed form's seconds, ends before the slot stops
    it.
    """
    gpu, spent = hardware.gpu_row("h100"), []

    def price(sheet, cases, **environment):
        total = START
        for case in cases:
            stock = case["impl"] != "hfpatch"
            kept = {
                "offload": "host",
                **(case["checkpointing"] if isinstance(case.get("checkpointing"), dict) else {}),
            }
            config = preset_config(case.get("preset", "llama-3.1-8b")) | {
                "num_hidden_layers": case["layers"]
            }
            shape = ModelShape.from_config(config)
            policy = (
                STOCK_CHECKPOINTING
                if stock
                else Policy(kept["offload"], tile=kept.get("tile", 8192))
            )
            sizes = {"batch": 1, "tokens": case["tokens"]}
            memory = memory_of(shape, policy, **sizes)
            flops = flops_of(shape, policy, **sizes)
            once, _ = run_time(gpu, flops, memory, policy, shape, Resident(), **sizes)
            first = sum(first_step(gpu, memory, policy, shape, tokens=case["tokens"]).values())
            total += (
                first
                + (case["warmup"] + case["steps"] + 1.5 * bool(case.get("split"))) * once.total
            )
            total += FLOOR * bool(case.get("floor")) + ASKED * case["layers"] * bool(
                case.get("lora")
            )
        spent.append(total)
        return [
            {"tokens": c["tokens"], "step_s": 1.0, "floor_s": 1.0, **c.get("label", {})}
            for c in cases
        ]

    monkeypatch.setattr(common, "device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(step, "run_cases", price)
    for part, jobs in slot.PARTS.items():
        for job in jobs:
            if (
                job.entry
                in ("05_step_128k", "06_offload_peer", "07_short_steps", "08_longest", "13_qlora")
                and not job.small
            ):
                spent.clear()
                module = load(job.entry)
                monkeypatch.setattr(module.common.Sheet, "picture", lambda *args, **kwargs: None)
                assert module.main([*job.arguments.split(), "--out", str(tmp_path)]) == 0
                assert 0 < sum(spent) < job.seconds + slot.GRACE, (part, job, spent)


def test_liger_is_gone_from_a_process_that_goes_on(monkeypatch):
    """Its patch of one model puts its classes into the family's file, where the next entry's model
    would find them.
    """
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: sys._getframe(1).f_code.co_name == "become"
    )
    monkeypatch.setattr(step, "checkpoint", lambda *_: None)
    case, rows = (
        {
            "preset": "llama-tiny",
            "layers": 2,
            "tokens": 48,
            "steps": 1,
            "changes": {"vocab_size": 128},
        },
        [],
    )
    for impl in ("liger", "hfpatch"):
        step.run([case | {"impl": impl}], lambda case, result: rows.append(result))
    liger, *others = rows
    assert "error" in liger and "Liger" not in liger["error"]  # applied, and no GPU for its kernels
    assert not any("error" in row for row in others), others


def test_the_split_of_a_device_is_read_from_its_events(monkeypatch):
    """Played: two streams, a wait of half a second for a copy between two matmuls, in the
    profiler's own words and microseconds.
    """
    kind = torch.autograd.DeviceType
    rows = [
        ("cutlass_80_tensorop_bf16_s16816gemm", 7, 0.0, 1e6, kind.CUDA),
        ("Memcpy HtoD (Pinned -> Device)", 13, 0.5e6, 1.5e6, kind.CUDA),
        ("void flash_fwd_kernel", 7, 1.5e6, 3e6, kind.CUDA),
        ("cudaLaunchKernel", 0, 0.0, 9e6, kind.CPU),
    ]  # fmt: skip
    events = [
        SimpleNamespace(
            name=n, device_resource_id=s, time_range=SimpleNamespace(start=a, end=b), device_type=d
        )
        for n, s, a, b, d in rows
    ]
    played = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: played)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(step, "one_step", lambda *_: None)
    found = step.kernel_split(torch.nn.Linear(1, 1), {})
    assert (found["split_step_s"], found["matmul_s"], found["attention_s"], found["copies_s"]) == (
        3.0,
        1.0,
        1.5,
        1.0,
    )
    assert found["copy_wait_s"] == 0.5 and found["other_s"] == 0.0


def test_copies_are_delayed_on_the_streams_they_use(monkeypatch):
    """Played: a wait on the stream that copies, and on the one that others wait for; none
    afterwards.
    """
    now, waits = [None], []

    @contextlib.contextmanager
    def on(stream):
        before, now[0] = now[0], stream or now[0]
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: waits.append((now[0], cycles)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    device, real = CudaDevice(torch.device("cuda")), (CudaDevice.on, CudaDevice.mark)
    with load("01c_model").delays(0):
        for _ in range(20):
            with device.on("copies"):
                assert now == ["copies"]
            device.mark("copies"), device.mark()
    assert [stream for stream, _ in waits] == ["copies", "copies", None] * 20 and len(
        {cycles for _, cycles in waits}
    ) > 2
    assert (CudaDevice.on, CudaDevice.mark) == real


def test_a_run_that_is_late_leaves_out_what_can_be(tmp_path, monkeypatch):
    """A first timed step comes in any case, the rest where it fits; a case whose time is over is
    said not to have begun. A recorded step that fails takes nothing away.
    """
    args = common.parse(common.parser("03_models", "x"), ["--small", "--out", str(tmp_path)])
    (case,) = step.small(
        common.Sheet(args), [{"impl": "hfpatch", "layers": 32, "tokens": 8192, "split": True}]
    )
    model = step.build(case, torch.device("cpu"))
    runs = {"warmup": 3, "steps": 3, "split": True}
    found = step.measure(model, case | runs | {"until": time.time() + 1e-3}, torch.device("cpu"))
    assert (
        len(found["steps_s"].split()) == 1
        and found["first_step_s"] != found["step_s"]
        and "attention_s" not in found
    )
    found = step.measure(model, case | runs | {"until": time.time() + 1e3}, torch.device("cpu"))
    assert len(found["steps_s"].split()) == 3 and "attention_s" in found
    monkeypatch.setattr(step, "kernel_split", lambda *_: 1 / 0)
    found = step.measure(model, case | runs, torch.device("cpu"))
    assert found["step_s"] > 0 and "ZeroDivisionError" in found["split_error"]
    rows = []
    step.run([case | {"until": time.time() - 1}], lambda case, result: rows.append(result))
    assert "not started" in rows[0]["error"] and "step_s" not in rows[0]


# Entries that need no torch: a good one, one that raises, one that ends the process, one that hangs
# with a child of its own, and one with a wrong row after them all. Those at tiny size share a
# process, which is started anew after it died.
FAKES = {
    "01_good": (
        "row(step_s=1.5, session=os.getsid(0), impl='liger', error='no GPU for it'); "
        "table(folder, 'step_s\\n1.5\\n'); return 0"
    ),
    "02_raises": (
        "sys.modules['torch'] = Fine; row(step_s=2); raise RuntimeError('the reason is here')"
    ),
    "02_x_breaks": (
        "sys.modules['torch'] = Broken; row(step_s=2.5, pid=os.getpid(), error='an illegal "
        "access'); return 0"
    ),
    "03_dies": "row(step_s=3, pid=os.getpid()); os._exit(7)",
    "04_hangs": (
        "child = subprocess.Popen(['sleep', '60']); "
        "pathlib.Path(__file__).with_name('child').write_text(str(child.pid)); "
        "row(step_s=4); time.sleep(60)"
    ),
    "05_wrong": "row(step_s=5, passed=False); return 0",
}


def test_a_slot_goes_on_after_entries_that_fail(tmp_path, monkeypatch, capsys):
    out, folder = tmp_path / "out", tmp_path / "entries"
    folder.mkdir()
    for name, body in FAKES.items():
        (folder / f"{name}.py").write_text(
            "import json, os, pathlib, subprocess, sys, time\n"
            "class Fine:\n"
            "    class cuda: is_available = staticmethod(lambda: False)\n"
            "class Broken:\n"  # a device that answers nothing any more
            "    class cuda: is_available = staticmethod(lambda: True)\n"
            "    def zeros(*args, **kwargs): raise RuntimeError('CUDA error')\n"
            "def row(**values):\n"
            "    open(os.environ['HFPATCH_GPU_ROWS'], 'a').write(json.dumps({'entry': __name__, "
            "**values}) + '\\n')\n"
            "def table(folder, text): (folder / '01_good.csv').write_text(text)\n"
            "def main(argv):\n"
            "    folder = pathlib.Path(argv[argv.index('--out') + 1]); folder.mkdir(parents=True, "
            "exist_ok=True)\n"
            f"    {body}\n"
        )
    monkeypatch.setattr(slot, "FOLDER", folder)
    monkeypatch.setattr(slot, "GRACE", 0.5)
    jobs = [slot.Job(name, "--small", 1, "step_s") for name in list(FAKES)[:4]]
    jobs += [
        slot.Job("04_hangs", "", 1),
        slot.Job("05_wrong", "", 5, "step_s"),
        slot.Job("01_good", "", 60, spare=True),
    ]
    began = time.monotonic()
    assert slot.Slot(1, jobs, out, 60).run() == 1
    assert time.monotonic() - began < 30
    rows = [json.loads(line) for line in (out / "slot1.jsonl").open()]
    assert [row["step_s"] for row in rows] == [1.5, 2, 2.5, 3, 4, 5] and rows[0][
        "session"
    ] == os.getsid(0)
    assert rows[2]["pid"] != rows[3]["pid"], (
        "a process whose device answers nothing runs no further entry"
    )
    said = capsys.readouterr().out
    for words in (
        "ok     01_good --small: 1 rows",
        "step_s=1.5",
        "the reason is here",
        "code 7",
        "its time was over",
        "1 of 7 entries",
        "FAILED 01_good: 0 rows",  # it wants a minute, and less is left
    ):
        assert words in said
    # a child that pins memory is gone before the next entry wants it
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "child").read_text()), 0)
    assert said.count("ended with code") == 1, (
        "an entry that had not begun is not blamed for the process before it"
    )
    assert "FAILED 05_wrong: 1 rows" in said and {p.name for p in out.iterdir()} == {
        "slot1.jsonl",
        "slot1.log",
        "slot1.tar.gz",
    }
    with tarfile.open(out / "slot1.tar.gz") as pack:
        assert "slot1/00_01_good/01_good.csv" in pack.getnames()


def test_what_a_part_leaves_is_at_most_eight_files_of_16_mib(tmp_path, monkeypatch):
    """However much an entry writes and prints: what is over stays out, and the next entry's table
    still comes back.
    """
    folder, out = tmp_path / "entries", tmp_path / "out"
    folder.mkdir()
    head = (
        "import os, pathlib, sys\n\n\ndef main(argv):\n"
        "    out = pathlib.Path(argv[argv.index('--out') + 1])\n    out.mkdir()\n"
    )
    (folder / "01_much.py").write_text(
        head + "    for i in range(8):\n"
        "        (out / f'{i}.bin').write_bytes(os.urandom(3 << 20))\n"
        "    (out / 'trace.json').write_bytes(os.urandom(5 << 20))\n"
        "    print('x' * (17 << 20))\n    return 0\n"
    )
    (folder / "02_little.py").write_text(
        head + "    (out / 'table.csv').write_text('a\\n1\\n')\n    return 0\n"
    )
    monkeypatch.setattr(slot, "FOLDER", folder)
    jobs = [slot.Job("01_much", seconds=60), slot.Job("02_little", seconds=60)]
    assert slot.Slot(1, jobs, out, 120).run() == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) <= 8 and slot.FILE_BYTES == 16 << 20
    assert all(path.stat().st_size < 16 << 20 for path in files), [p.stat() for p in files]
    with tarfile.open(out / "slot1.tar.gz") as pack:
        names = pack.getnames()
    assert "slot1/01_02_little/table.csv" in names and "slot1/00_01_much/trace.json" not in names
    assert len([name for name in names if name.endswith(".bin")]) == 4


@pytest.mark.parametrize(
    "wheel, tree, code", [(40, 10, 0), (50, 20, 1), (70, 1, 1)], ids=["fits", "together", "alone"]
)
def test_wheels_that_would_not_travel_are_refused(wheel, tree, code, tmp_path):
    """MiB of wheels and of the tree, git-ignored files left out: 64 together. Sparse files, and a
    Python that only makes such a wheel.
    """
    script = tmp_path / "scripts" / "gpu" / "wheels.sh"
    script.parent.mkdir(parents=True)
    script.write_text((FOLDER / "wheels.sh").read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text(".whl/\nbuild/\n")
    (tmp_path / "build").mkdir()
    for name, size in (("new.bin", tree), ("build/ignored.bin", 60)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size << 20)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(
        f"#!/bin/sh\nmkdir -p .whl && truncate -s {wheel}M .whl/one-1-py3-none-any.whl\n"
    )
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(["bash", script, "one"], env={**os.environ, "PATH": path},
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert "must stay below 64" in ran.stdout


def test_the_tree_leaves_the_wheels_their_room():
    """Those that wheels.sh names by itself weigh 13 MiB."""
    if not (FOLDER.parents[1] / ".git").exists():
        pytest.skip("a copy without git")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=FOLDER.parents[1], check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    paths = [FOLDER.parents[1] / name for name in listed.split("\0") if name]
    assert sum(p.stat().st_size for p in paths if p.is_file()) < 32 << 20


@pytest.mark.parametrize("pip", [pytest.param(True, marks=pytest.mark.long), False])
def test_wheels_are_used_where_there_is_no_pip_too(pip, tmp_path):
    """Two of them, and a broken one that keeps neither out; in a tree of its own with an entry that
    imports them.
    """
    (tmp_path / "scripts" / "gpu").mkdir(parents=True), (tmp_path / ".whl").mkdir()
    (tmp_path / "scripts" / "gpu" / "slot.py").write_text(
        "import importlib.util as u\nimport one, two\nprint(one.__name__, two.__name__, "
        "bool(u.find_spec('engine')))"
    )
    script = tmp_path / "scripts" / "gpu" / "slot.sh"
    script.write_text((FOLDER / "slot.sh").read_text())
    (tmp_path / ".whl" / "engines").mkdir()
    for name in ("one", "two", "engine"):
        where = tmp_path / ".whl" / "engines" if name == "engine" else tmp_path / ".whl"
        with zipfile.ZipFile(where / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(
                f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
            )
            wheel.writestr(
                f"{name}-1.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}-1.dist-info/RECORD", "")
    (tmp_path / ".whl" / "broken-1-py3-none-any.whl").write_text("none")
    python = tmp_path / "python"
    without = "" if pip else '[ "$2" != pip ] || exit 1; '
    python.write_text(f'#!/bin/sh\n{without}exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    run = partial(
        subprocess.run, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True
    )
    assert run(["bash", script, "4"]).stdout.split() == ["one", "two", "True"], (
        "the engines' part alone has theirs"
    )
    ran = run(["bash", script])
    assert (
        ran.stdout.split() == ["one", "two", "False"]
        and "broken-1-py3-none-any.whl does not install" in ran.stderr
    )


def test_a_slot_whose_time_is_over_says_what_it_left_out(tmp_path, capsys):
    assert slot.Slot(1, [slot.Job("01b_float64", "--small")], tmp_path, 1).run() == 1
    assert "not started: the time of the slot was over" in capsys.readouterr().out


def test_the_journal_gets_each_row_at_once(tmp_path, monkeypatch):
    assert slot.ROWS == common.JOURNAL
    monkeypatch.setenv(common.JOURNAL, str(tmp_path / "rows.jsonl"))
    sheet = common.Sheet(
        common.parse(common.parser("02b_loss", "x"), ["--small", "--out", str(tmp_path)])
    )
    sheet.add(impl="a", ms=1.5)
    sheet.skip("liger", "absent")
    row, skip = map(json.loads, (tmp_path / "rows.jsonl").open())
    assert (row["entry"], row["ms"]) == ("02b_loss", 1.5) and "torch=" in row["versions"]
    assert (skip["left_out"], skip["why"]) == ("liger", "absent")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_no_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(common.JOURNAL, "/dev/full")
    sheet = common.Sheet(
        common.parse(common.parser("02b_loss", "x"), ["--small", "--out", str(tmp_path)])
    )
    sheet.add(impl="a", ms=1.5)
    made = slot.Slot(1, [], tmp_path / "slot", 1)
    made.log, made.pack = Path("/dev/full"), tmp_path / "slot" / "none" / "x.tar.gz"
    made.print("said")
    made._pack(tmp_path)
    said = capsys.readouterr().out
    assert (
        rows_of(tmp_path)
        and "not in the journal" in said
        and "said" in said
        and "not packed" in said
    )


@pytest.mark.long
@pytest.mark.parametrize("part", slot.PARTS)
def test_a_part_at_small_size(part, tmp_path):
    assert slot.main([str(part), "--small", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.iterdir())) <= 8 and rows_in(tmp_path / f"slot{part}.jsonl")


def rows_in(path: Path) -> list[dict]:
    return [row for row in map(json.loads, path.open()) if "left_out" not in row]


def test_the_readme_names_every_entry():
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("[0-9]*.py"):
        assert path.name in text


def test_cases_survive_json():
    case = {
        "impl": "hfpatch",
        "tokens": 8,
        "checkpointing": {"offload": "host", "every": 1, "save_attention": True},
    }
    assert json.loads(json.dumps(case)) == case


def test_mfu_of_a_timed_step_is_that_of_the_plan(monkeypatch):
    """On a device with a data sheet, which no CPU is: there alone it raised, behind the step that
    was timed.
    """
    shape = ModelShape.from_config(preset_config("llama-3.1-8b"))
    found = hfpatch.plan("llama-3.1-8b", seq_len=8192, gpu="h100", placement="gpu8bit")
    assert step.mfu_of(shape, 8192, found.step_seconds) is None
    monkeypatch.setattr(common, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert step.mfu_of(shape, 8192, found.step_seconds) == pytest.approx(found.mfu)


def test_a_copy_without_history_says_what_it_is_a_copy_of(tmp_path, monkeypatch):
    """By the hash that git itself gives the package's folder, whatever Python left in it."""
    package = tmp_path / "hfpatch"
    (package / "ops").mkdir(parents=True), (package / "__pycache__").mkdir()
    for name in ("ops.py", "ops/a.py", "b.py"):
        (package / name).write_text(f"# {name}\n")
    (package / "b.py").chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    theirs = subprocess.run(
        [*git, "rev-parse", "HEAD:hfpatch"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (package / "__pycache__" / "b.pyc").write_text("left by a run")
    assert common.tree_hash(package) == theirs
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit_of("abc") == "abc" and "=" not in common.commit_of(None)
    (tmp_path / ".git").rename(tmp_path / "none")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert common.commit_of(None) == f"hfpatch/={theirs[:12]}"


# TRL wraps the older of two names of the call that turns checkpointing on: by the newer one its
#     policy would not be asked.
def test_selective_checkpointing_is_on_where_a_row_says_so(monkeypatch):
    pytest.importorskip("trl")
    import transformers.modeling_utils as theirs
    from trl.models import selective_activation_checkpointing as selective

    asked, offloaded = [], []
    real = selective.create_selective_checkpoint_contexts
    monkeypatch.setattr(
        selective, "create_selective_checkpoint_contexts", lambda *a: (asked.append(1), real(*a))[1]
    )
    monkeypatch.setattr(
        theirs, "save_on_cpu", lambda **_: (offloaded.append(1), contextlib.nullcontext())[1]
    )
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: sys._getframe(1).f_code.co_name == "checkpoint"
    )
    case = {
        "impl": "stock",
        "preset": "llama-tiny",
        "layers": 2,
        "tokens": 24,
        "warmup": 0,
        "steps": 1,
    }
    for kept, count in (("selective", (2, 2)), ("offload", (0, 2)), ("plain", (0, 0))):
        rows = []
        step.run(
            [case | {"checkpointing": kept}], lambda case, result, rows=rows: rows.append(result)
        )
        assert "error" not in rows[0], rows[0]
        assert (len(asked), len(offloaded)) == count, kept
        asked.clear(), offloaded.clear()


def test_curves_of_runs_that_were_stopped_are_compared_as_far_as_they_came(tmp_path, monkeypatch):
    learning = load("11_learning")
    stock = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    curves = {"hf": stock, "hfpatch": [x + 0.5 for x in stock[:4]]}
    monkeypatch.setattr(learning, "learn", lambda *a: (curves[a[3]], [], [""], 1.0))
    assert learning.main(["--small", "--impls", "hf", "hfpatch", "--out", str(tmp_path)]) == 0
    assert [float(row["apart"]) for row in rows_of(tmp_path)] == [0.0, 0.5]


def test_long_bf16_comes_first_among_the_comparisons_with_float64():
    first = load("01b_float64").first
    jobs = [
        ("a", None, (dtype, T)) for dtype in (torch.float32, torch.bfloat16) for T in (127, 131073)
    ]
    assert [job[2] for job in sorted(jobs, key=first)] == [
        (torch.bfloat16, 131073), (torch.bfloat16, 127), (torch.float32, 131073),
        (torch.float32, 127)
    ]  # fmt: skip


# A training program that logs two steps and would go on to save for a minute, and one that ends
# before its first step.
@pytest.mark.parametrize("ends", [False, True])
def test_a_run_under_an_engine_is_over_with_its_last_step(ends, tmp_path, monkeypatch):
    engines = load("16_engines")
    (tmp_path / "scripts").mkdir()
    body = "print('the reason'); raise SystemExit(3)" if ends else "".join(
        f"print({{'loss': '{loss}', 'step_seconds': '{s}', 'peak_gpu_gib': '7.5'}}); " for loss,
        s in ((6, 9), (5, 2))
    ) + "import time; time.sleep(60)"  # fmt: skip
    (tmp_path / "scripts" / "train.py").write_text(body)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    args = SimpleNamespace(
        model="llama-3.2-3b", small=False, steps=2, cuda=True, host_gib=None, gpu="h100"
    )
    began = time.monotonic()
    found = engines.train(args, "gpu8bit", 32768, "", tmp_path, 30)
    assert time.monotonic() - began < 20
    if ends:
        assert "code 3" in found["error"] and "the reason" in found["error"]
        return
    assert (found["step_s"], found["first_loss"], found["peak_gpu_gib"]) == (
        2.0,
        6.0,
        7.5,
    ) and "error" not in found
    plan = engines.planned(args, 32768, "gpu8bit")
    assert (
        plan["plan_step_s"] > 0
        and plan["plan_host_gib"] > 0
        and engines.planned(args, 32768, None) == {}
    )


def changes(tmp_path):
    module = load("17_changes")
    return module, common.Sheet(
        common.parse(common.parser("17_changes", "x"), ["--small", "--out", str(tmp_path)])
    )


# A backend that takes a wrong plan for one layout, as cuDNN's may.
def test_a_wrong_gradient_of_one_layout_is_told(tmp_path, monkeypatch):
    module, sheet = changes(tmp_path)
    right = module.attention_backward

    def wrong(dout, *args, **options):
        dq, dk, dv = right(dout, *args, **options)
        return dq, dk * (1.5 if dout.stride(1) < dout.stride(2) else 1.0), dv

    monkeypatch.setattr(module, "attention_backward", wrong)
    module.layouts(sheet, "cpu", 45, cases.TINY)
    failed = {row["what"] for row in sheet.rows if not row["passed"]}
    assert len(failed) == 6 and all("dout heads first" in what for what in failed)
    assert {row["where"] for row in sheet.rows if not row["passed"]} == {"dk"}


# The step that meets the lack of memory may fail, the one behind it may not.
@pytest.mark.parametrize(
    "failing, passed", [((2,), [True, True, True]), ((2, 3), [True, True, False])]
)
def test_a_step_behind_an_out_of_memory_must_run(failing, passed, tmp_path, monkeypatch):
    module, sheet = changes(tmp_path)
    real, taken = module.one_step, []

    def short(*args, **options):
        taken.append(1)
        if len(taken) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args, **options)

    monkeypatch.setattr(module, "one_step", short)
    module.memory(sheet, 48)
    assert [row["passed"] for row in sheet.rows] == passed
    assert [row.get("error") for row in sheet.rows] == [
        "out of memory" if i in failing else None for i in (1, 2, 3)
    ]
