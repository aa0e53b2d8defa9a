"""Whatever kills a run or damages its folder, it goes on from a whole checkpoint, and says from
which.
"""

import errno
import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from hfpatch.trainer import locks, runs
from tests.faults.runs import (  # noqa: F401
    ROOT,
    end_group,
    flags,
    run_train,
    saved_tokenizer,
    spawn,
    texts,
    tokenizer,
    until,
)

STEPS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
RESUME = ("--resume_from_checkpoint", "True")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder kept over this module's tests: made once, by the first test that asks."""
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def folder(finished, run_train, tmp_path):  # noqa: F811
    """A copy of a run's folder with checkpoints 2, 4 and 6 and the final model."""
    if not (finished / "run").exists():
        code, _, err, made = run_train("made", **STEPS)
        assert code == 0, err
        shutil.copytree(made, finished / "run")
    return Path(shutil.copytree(finished / "run", tmp_path / "run", dirs_exist_ok=True))


def test_the_newest_with_a_state_is_chosen(folder, run_train):  # noqa: F811
    """That of a run which had all its steps is not trained further."""
    newest = folder / "checkpoint-6"
    wanted = load_file(folder / "model.safetensors")
    for chosen in (newest, folder / "checkpoint-4"):
        assert runs.begin(str(folder), "True") == str(chosen)
        code, out, err, _ = run_train("run", *RESUME, **STEPS)
        assert code == 0 and f"resuming from {chosen}" in out and "6 steps, total" in out, err
        got = load_file(folder / "model.safetensors")
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        (newest / runs.STATE_FILE).unlink()


def test_an_older_one_replaces_the_later_ones(folder, run_train):  # noqa: F811
    older = str(folder / "checkpoint-2")
    code, out, err, _ = run_train(
        "run", "--resume_from_checkpoint", older, **STEPS | {"max_steps": 4}
    )
    assert code == 0, err
    states = [json.loads((p / runs.STATE_FILE).read_text()) for p in runs.checkpoints(folder)]
    assert [state["global_step"] for state in states] == [6, 4, 2] and states[1]["max_steps"] == 4


def test_what_differs_is_listed_in_one_sentence(folder, run_train):  # noqa: F811
    code, _, err, _ = run_train(
        "run", *RESUME, **STEPS | {"learning_rate": 0.02, "seed": 7, "data_glob": "decoder.py"}
    )
    (line,) = [line for line in err.splitlines() if line.startswith("hfpatch:")]
    assert code == 2 and "learning_rate 0.01 there, 0.02 here" in line
    assert "seed 42 there, 7 here" in line and "data " in line


def test_killed_in_the_first_checkpoint(run_train, monkeypatch, tmp_path):  # noqa: F811
    """What a kill leaves is a folder that the same command starts in anew, with and without the
    flag to resume.
    """

    class Killed(BaseException):
        pass

    def killed(self, path):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TrainerState, "save_to_json", killed)  # Trainer writes the state last
        with pytest.raises(Killed):
            run_train(**STEPS)
    run = tmp_path / "run"
    assert (run / "checkpoint-2" / "optimizer.pt").is_file() and not runs.checkpoints(run)
    code, out, err, _ = run_train("run", *RESUME, **STEPS)
    assert code == 0 and "starting from the first step" in out and "6 steps, total" in out, err


def test_a_full_disk_keeps_what_was_saved(run_train, monkeypatch, tmp_path):  # noqa: F811
    save, count = torch.save, []

    def full(*args, **kwargs):
        count.append(1)
        if len(count) > 4:  # training_args, optimizer, scheduler, rng_state a checkpoint
            raise OSError(errno.ENOSPC, "No space left on device", "optimizer.pt")
        return save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    code, _, err, folder = run_train(**STEPS)
    (line,) = [line for line in err.splitlines() if line.startswith("hfpatch:")]
    assert code == 1 and line.startswith("hfpatch: the disk is full at optimizer.pt. ")
    assert [p.name for p in runs.checkpoints(folder)] == ["checkpoint-2"]


def test_one_run_a_folder(run_train, tmp_path):  # noqa: F811
    with locks.alone_in(tmp_path / "run"):
        code, _, err, folder = run_train(max_steps=1)
        assert code == 2 and f"another run writes to {folder}. Wait for it" in err
    assert not folder.exists(), "a lock leaves nothing behind"
    assert run_train(max_steps=1)[0] == 0


def test_save_total_limit_keeps_the_newest_and_the_best(run_train):  # noqa: F811
    flags = {"save_total_limit": 2, "validation_split": 0.2, "eval_strategy": "steps",
             "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1.0}  # fmt: skip
    code, _, err, folder = run_train(**STEPS | flags)
    assert code == 0, err
    best = json.loads((folder / "trainer_state.json").read_text())["best_model_checkpoint"]
    kept = [str(p) for p in runs.checkpoints(folder)]
    assert len(kept) == 2 and best in kept and kept[0].endswith("checkpoint-6")


def test_the_hub_token_is_not_saved(run_train, monkeypatch):  # noqa: F811
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    pushed = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, path: pushed.append(Path(path).name)
    )
    token = "hf_" + "s" * 30
    code, out, err, folder = run_train(
        push_to_hub=True, hub_model_id="a/b", hub_token=token, **STEPS
    )
    assert code == 0, err
    assert pushed == ["checkpoint-2", "checkpoint-4", "checkpoint-6"], (
        "what is pushed is a checkpoint that is finished, under its own name"
    )
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) > 20 and not [p for p in files if token.encode() in p.read_bytes()]
    code, out, err, _ = run_train("wrong", f"--hub_tokn={token}")
    assert code == 2 and token not in out + err and "hub_tokn" in err


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random(seed, saved_tokenizer, tmp_path, run_train):  # noqa: F811
    """kill -9 at any moment, again and again: it goes on each time, and ends at the weights of a
    run never killed.
    """
    draw = random.Random(seed)
    steps = {"max_steps": 40, "save_steps": 2, "save_strategy": "steps", "save_total_limit": 2}
    script = [ROOT / "scripts" / "train.py", *flags(tmp_path, saved_tokenizer, **steps)]
    for attempt in range(15):
        out = tmp_path / f"out{attempt}"
        process = spawn([*script, *(RESUME if (tmp_path / "run").exists() else ())], out)
        until(lambda text: "'loss'" in text or "total training" in text, process, out)
        try:
            time.sleep(draw.uniform(0, 2))
            if process.poll() is None and attempt < 14:
                process.send_signal(signal.SIGKILL)
            code = process.wait(timeout=120)
        finally:
            end_group(process)
        assert code in (0, -signal.SIGKILL), out.read_text()[-3000:]
        if code == 0:
            break
    argv = flags(tmp_path, saved_tokenizer, **steps, output_dir=tmp_path / "straight")
    process = spawn([ROOT / "scripts" / "train.py", *argv], tmp_path / "straight.txt")
    assert process.wait(timeout=300) == 0
    got, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "straight"))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
