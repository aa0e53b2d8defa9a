"""The command as people and machines call it: processes, notes, exit codes, no colours in a pipe."""

import json
import stat
import sys

import pytest
import torch

import hfpatch
from hfpatch.commands.main import main
from hfpatch.commands.profile import checkpointing_fields
from hfpatch.memory.limits import parse_lengths
from hfpatch.profiling import run as runner
from hfpatch.profiling.options import Options, settings_of


def call(capfd, *arguments):
    code = main(["profile", *map(str, arguments)])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_stock_runs_where_liger_cannot(capfd, tmp_path):
    """One real run through its own process; Liger has no CPU path, says so in one line, and the rest goes on."""
    code, out, _ = call(
        capfd, "--model", "llama-tiny", "--seq-len", 64, "--impl", "hf,liger", "--steps", 1, "--warmup", 0,
        "--device", "cpu", "--no-stacks", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0 and "\x1b" not in out
    notes = [text for text in out.splitlines() if "Liger" in text]
    assert len(notes) == 1 and notes[0].startswith("hfpatch: ")
    assert "trace of one step" in out and "KiB" in out
    assert {p.name for p in tmp_path.iterdir()} == {
        "memory.png", "report.html", "report.md", "results.json", "trace-hf-64.json.gz",
    }  # fmt: skip
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
    assert "curve" not in values["runs"][0]
    planned = values["runs"][0]["planned"]["gpu_peak_bytes"]
    assert planned == pytest.approx(values["runs"][0]["peak_bytes"], rel=0.03), "closed form and simulator agree"
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
    assert "killed by the system" in (tmp_path / "out" / "report.html").read_text()


def test_nothing_to_run_is_an_error(capfd, tmp_path):
    code, _, err = call(capfd, "--model", "llama-tiny", "--impl", "nonsense", "--out", tmp_path)
    assert code == 2 and "hf, liger, hfpatch" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_checkpointing_fields():
    assert checkpointing_fields([]) is None
    found = checkpointing_fields(["offload=host", "tile=4096", "save_attention=false"])
    assert found == {"offload": "host", "tile": 4096, "save_attention": False}
    assert checkpointing_fields(["keep=qkv,mid", "plain=2"]) == {"keep": ("qkv", "mid"), "plain": 2}
    assert settings_of({"keep": ["qkv"], "plain": 2}) == hfpatch.Checkpointing(keep=("qkv",), plain=2)


@pytest.mark.parametrize("wrong, word", [
    ({"seq_len": 1}, "seq_len"), ({"seq_len": "8k"}, "seq_len"), ({"seq_len": []}, "seq_len"), ({"impl": []}, "impl"),
    ({"seq_len": None}, "seq_len"), ({"impl": "foo"}, "impl"), ({"batch": "x"}, "batch"), ({"batch": True}, "batch"),
    ({"steps": 0}, "steps"), ({"warmup": -1}, "warmup"), ({"dtype": "int8"}, "dtype"), ({"device": "tpu"}, "device"),
    ({"optimizer": "lion"}, "optimizer"), ({"checkpointing": "host"}, "checkpointing"),
    ({"checkpointing": {"tiles": 4}}, "checkpointing"), ({"checkpointing": {"tile": 0}}, "tile"), ({"model": 3}, "int came"),
    ({"impl": "hf", "checkpointing": {"tile": 4}}, "checkpointing is for hfpatch"),
])  # fmt: skip
def test_options_are_refused_before_any_process_starts(wrong, word, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_in_process", lambda *_: pytest.fail("a process started"))
    with pytest.raises(ValueError, match=f"^hfpatch: .*{word}[^\n]*[.]$"):
        runner.profile(**{"model": "llama-tiny", "seq_len": 64, "out": tmp_path / "out"} | wrong)
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_here_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="^hfpatch: expected a GPU for device cuda, torch sees none here; pass cpu"):
        Options(model="llama-tiny", device="cuda").on  # noqa: B018


def test_lengths():
    assert parse_lengths("8k,32768, 128K,1M") == [8192, 32768, 131072, 1 << 20]
    for text in ("8k,many", "0", "-1k", "", "k", "1.5k", "9" * 30):
        with pytest.raises(ValueError, match="^hfpatch: a length"):
            parse_lengths(text)
