"""The command as people and machines call it: processes, notes, exit codes, no colours in a
pipe.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from hfpatch.cli.main import main
from hfpatch.lab.profile import run as runner
from hfpatch.lab.profile.options import Options

ROOT = Path(__file__).resolve().parents[2]


def call(capfd, *arguments):
    code = main(["profile", *map(str, arguments)])
    said = capfd.readouterr()
    return code, said.out, said.err


@pytest.mark.long
def test_stock_runs_where_liger_cannot(capfd, tmp_path):
    """One real run through its own process; Liger has no CPU path, says so in one line, and the
    rest goes on.
    """
    code, out, _ = call(
        capfd, "--model", "llama-tiny", "--seq-len", 64, "--impl", "hf,liger", "--steps", 1,
        "--warmup", 0,
        "--device", "cpu", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0 and "\x1b" not in out
    notes = [text for text in out.splitlines() if "Liger" in text]
    assert len(notes) == 1 and notes[0].startswith("hfpatch: ")
    assert {p.name for p in tmp_path.iterdir()} == {"memory.png", "report.md", "results.json"}
    assert notes[0] in (tmp_path / "report.md").read_text()


def test_json_of_a_simulated_run(capfd, tmp_path):
    code, out, _ = call(
        capfd,
        "--model",
        "llama-tiny",
        "--seq-len",
        4096,
        "--impl",
        "hf",
        "--simulate",
        "--json",
        "--optimizer",
        "none",
        "--out",
        tmp_path,
    )
    values = json.loads(out)
    assert code == 0 and values["runs"][0]["source"] == "simulated"
    assert values["runs"][0]["peak_bytes"] == sum(values["runs"][0]["peak_split"].values())
    assert "(simulated)" in (tmp_path / "report.md").read_text()


def test_a_killed_process_is_in_the_report(monkeypatch, tmp_path):
    """The system's out-of-memory killer leaves neither message nor result."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    done = runner.profile("llama-tiny", seq_len=64, impl="hf", out=tmp_path / "out")
    assert "killed by the system" in done.runs[0].error
    assert "killed by the system" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("wrong, word", [
    ({"seq_len": 1}, "seq_len"), ({"seq_len": "8k"}, "seq_len"), ({"seq_len": []}, "seq_len"),
    ({"impl": []}, "impl"),
    ({"seq_len": None}, "seq_len"), ({"impl": "foo"}, "impl"), ({"batch": "x"}, "batch"),
    ({"batch": True}, "batch"),
    ({"steps": 0}, "steps"), ({"warmup": -1}, "warmup"), ({"dtype": "int8"}, "dtype"),
    ({"device": "tpu"}, "device"),
    ({"optimizer": "lion"}, "optimizer"), ({"checkpointing": "hots"}, "checkpointing"),
    ({"checkpointing": {"tile": 0}}, "tile"), ({"checkpointing": "tile=0"}, "tile"),
    ({"model": 3}, "got int"),
    ({"impl": "hf", "checkpointing": "tile=4"}, "checkpointing works with impl hfpatch only"),
])  # fmt: skip
def test_options_are_refused_before_any_process_starts(wrong, word, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_in_process", lambda *_: pytest.fail("a process started"))
    with pytest.raises(ValueError, match=f"^hfpatch: .*{word}[^\n]*[.?]$"):
        runner.profile(**{"model": "llama-tiny", "seq_len": 64, "out": tmp_path / "out"} | wrong)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokens, words", [
    ("1000M", "seq_len must be at most 16,777,215 tokens, got 1,048,576,000. Pass fewer."),
    ("16000k", "16,384,000 tokens must fit this machine's"),
])  # fmt: skip
def test_more_tokens_than_a_machine_holds_are_refused_without_a_step(
    tokens, words, capfd, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "_in_process", lambda *_: pytest.fail("a process started"))
    arguments = "llama-3.1-8b", "--seq-len", tokens, "--out", tmp_path / "out"
    code, _, err = call(capfd, *arguments)
    assert code == 2 and words in err


def test_a_model_that_a_machine_cannot_hold_is_refused_before_it_is_made(
    monkeypatch, capfd, tmp_path
):
    """Else the system kills what it likes when memory runs out."""
    monkeypatch.setenv("HFPATCH_HOST_MEMORY", str(1 << 20))
    arguments = "llama-tiny", "--seq-len", "64", "--impl", "hf", "--out", tmp_path / "out"
    code, _, err = call(capfd, *arguments)
    assert code == 2 and "weights and gradients must fit" in err and "--simulate" in err


def test_a_gpu_that_is_not_here_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError,
        match="^hfpatch: device cuda needs a GPU that torch sees, and there is none. Pass cpu",
    ):
        Options(model="llama-tiny", device="cuda").on  # noqa: B018


@pytest.mark.parametrize("name", tiny.longer(["SIGTERM", "SIGHUP", "SIGKILL", "SIGINT"], "SIGKILL"))
def test_the_worker_ends_with_its_parent(name, tmp_path, request):
    """It holds the memory of a step, on a GPU too."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "hfpatch", "profile", "--model", "llama-tiny", "--impl", "hf",
         "--seq-len", "4096", "--steps", "100000", "--device", "cpu", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
        preexec_fn=default_signals,
    )  # fmt: skip
    request.addfinalizer(parent.kill)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    worker, end = "", time.monotonic() + 120
    while not worker and time.monotonic() < end:
        time.sleep(0.05)
        worker = next((p for p in children.read_text().split() if b"worker" in cmdline(p)), "")
    assert worker, "no worker began"
    parent.send_signal(getattr(signal, name))
    parent.wait(60)
    end = time.monotonic() + 30
    while cmdline(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not cmdline(worker)


def default_signals() -> None:
    """A parent in the background may ignore SIGINT, one under nohup SIGHUP; both are inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def cmdline(process: str) -> bytes:
    """Empty if the process is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
