"""SIGTERM, Ctrl-C and a launcher that is gone: a checkpoint, one sentence, the exit code; no
traceback, no orphan.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from tiny import LONG

from hfpatch.cli.failures import guarded
from hfpatch.trainer import runs, stop
from tests.faults.runs import (  # noqa: F401
    ROOT,
    end_group,
    flags,
    saved_tokenizer,
    spawn,
    texts,
    tokenizer,
    until,
)

SCRIPT = ROOT / "scripts" / "train.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--num_machines", 1, "--mixed_precision", "no",
          "--dynamo_backend", "no",
          "--cpu")  # fmt: skip
CASES = {
    "SIGTERM": ([SCRIPT], signal.SIGTERM, 143),
    "Ctrl-C": ([SCRIPT], signal.SIGINT, 130),
    # accelerate's launcher of one process dies of SIGTERM without a word to its worker.
    "orphan": ([*LAUNCH, "--num_processes", 1, SCRIPT], signal.SIGTERM, None),
}


@pytest.mark.parametrize("names", [("Ctrl-C", "orphan"), pytest.param(("SIGTERM",), marks=LONG)])
def test_a_stop_saves_a_whole_checkpoint(names, saved_tokenizer, tmp_path):  # noqa: F811
    """Side by side, for a process takes its time to begin."""
    began, workers, cases = {}, [], {name: CASES[name] for name in names}
    try:
        for name, (command, _, _) in cases.items():
            folder = tmp_path / name
            folder.mkdir()
            argv = [*command, *flags(folder, saved_tokenizer, cache_dir=tmp_path / "cache")]
            began[name] = spawn(argv, folder / "out")
        for name, (_, number, code) in cases.items():
            process, out = began[name], tmp_path / name / "out"
            until(lambda text: "'loss'" in text, process, out)
            workers += children(process.pid) if name == "orphan" else []
            process.send_signal(number)
            got = process.wait(timeout=60)
            if code is not None:
                assert got == code, out.read_text()
        for name in cases:
            out, run = tmp_path / name / "out", tmp_path / name / "run"
            end = time.monotonic() + 60
            while not (
                found := re.search(r"(\S+) at step (\d+): a checkpoint is saved", out.read_text())
            ):
                assert time.monotonic() < end, out.read_text()[-3000:]
                time.sleep(0.1)
            assert found[1] == ("Ctrl-C" if name == "Ctrl-C" else "SIGTERM")
            assert "Traceback" not in out.read_text()
            assert run / f"checkpoint-{found[2]}" in runs.checkpoints(run)
            assert not (run / "model.safetensors").exists(), (
                "an unfinished run leaves no final model"
            )
        await_end(workers)
    finally:
        for process in began.values():
            end_group(process)
        kill(workers)


def children(pid: int) -> list[int]:
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert found
    return found


def await_end(pids) -> None:
    """Fails where one of them is still there after a minute: an orphan trains on."""
    end = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"{left} train on without their launcher"
        time.sleep(0.1)


def kill(pids) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.long
def test_two_ranks_stop_together(saved_tokenizer, tmp_path):  # noqa: F811
    """SIGTERM to one rank of two: both stop at the same step, with one checkpoint; the launcher's
    death stops both too.
    """
    for case in ("rank", "launcher"):
        folder = tmp_path / case
        folder.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, SCRIPT]
        process, workers = (
            spawn(
                [*command, *flags(folder, saved_tokenizer, cache_dir=tmp_path / "cache")],
                folder / "out",
            ),
            [],
        )
        try:
            until(lambda text: "'loss'" in text, process, folder / "out")
            workers = children(process.pid)  # torchrun gives each a session of its own
            if case == "launcher":
                process.send_signal(signal.SIGKILL)
            else:
                os.kill(workers[-1], signal.SIGTERM)
            process.wait(timeout=120)
            await_end(workers)
        finally:
            end_group(process)
            kill(workers)
        said = re.findall(
            r"SIGTERM at step (\d+): a checkpoint is saved", (folder / "out").read_text()
        )
        assert len(said) == 1, (folder / "out").read_text()[-3000:]
        assert folder / "run" / f"checkpoint-{said[0]}" in runs.checkpoints(folder / "run")
        assert sorted(p.name
                      for p in (folder / "run" / f"checkpoint-{said[0]}").glob("rng_state*")) == [
            "rng_state_0.pth", "rng_state_1.pth",
        ]  # fmt: skip


def test_ctrl_c_before_training_is_a_sentence(capsys):
    def command(argv):
        raise KeyboardInterrupt

    assert guarded(command, []) == 130
    assert capsys.readouterr().err == "hfpatch: stopped by Ctrl-C.\n"


def test_a_shell_is_no_launcher(monkeypatch):
    """Under nohup the shell goes first, and the run is meant to stay."""
    for name in ("LOCAL_RANK", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert stop.launcher() is None
    for name in ("LOCAL_RANK", "ACCELERATE_DYNAMO_MODE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert stop.launcher() == os.getppid()
