"""Whatever kills a run or damages its folder, it goes on from a whole checkpoint, and says from
which.
"""

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hfpatch.trainer import folders, resume
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


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)


SAVED = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "config.json",
)


def test_what_is_not_whole_is_never_chosen(folder, monkeypatch):
    begin = lambda: resume.begin(str(folder), "True")  # noqa: E731
    newest, before = folder / "checkpoint-6", folder / "checkpoint-4"
    assert begin() == (str(newest), [])
    assert {p.name for p in folder.iterdir() if p.name.startswith("_")} == set(), (
        "no lock, no half a checkpoint"
    )
    kept = shutil.copytree(newest, folder / "kept")

    def damaged(damage):
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
        damage()
        assert begin() == (str(before), [str(newest)])

    for name in SAVED:
        damaged(lambda name=name: cut(newest / name))
        damaged(lambda name=name: (newest / name).unlink())
    # The same sizes, another step: a new model with the old optimizer.
    for name in ("model.safetensors", "optimizer.pt"):
        damaged(lambda name=name: shutil.copyfile(before / name, newest / name))
    damaged(lambda: (newest / "trainer_state.json").write_text("{}"))
    for text in (
        "[]",
        '{"files": []}',
        '{"files": {"config.json": 5}}',
        '{"files": {"config.json": [5]}}',
    ):
        damaged(lambda text=text: (newest / folders.RUN_FILE).write_text(text))

    # --save_only_model: nothing was cut, and there is no optimizer to go on with.
    def weights_alone():
        record = json.loads((newest / folders.RUN_FILE).read_text())
        for name in SAVED[1:4]:
            del record["files"][name]
            (newest / name).unlink()
        (newest / folders.RUN_FILE).write_text(json.dumps(record))

    damaged(weights_alone)
    assert folders.flaw(newest) == "optimizer.pt is missing"
    # A checkpoint of another script has no list of files: those that it needs are there.
    for name in SAVED[:5]:
        damaged(lambda name=name: [(newest / folders.RUN_FILE).unlink(), (newest / name).unlink()])
    shutil.rmtree(newest)
    shutil.copytree(kept, newest)
    (newest / folders.RUN_FILE).unlink()
    assert begin() == (str(newest), []), "and a whole one of another script is taken"
    # What the system does not let us read is not cut.
    monkeypatch.setattr(folders, "digest_of", lambda file: Path("/proc/self/mem").read_bytes())
    shutil.copy(kept / folders.RUN_FILE, newest)
    with pytest.raises(OSError):
        begin()


def test_the_run_goes_on_as_if_nothing_had_happened(folder, run_train):  # noqa: F811
    wanted = load_file(folder / "model.safetensors")
    cut(folder / "checkpoint-6" / "optimizer.pt")
    with pytest.raises(
        ValueError, match=r"optimizer.pt is cut \(\d+ of \d+ bytes\); .*checkpoint-4 is whole"
    ):
        resume.begin(str(folder), str(folder / "checkpoint-6"))
    code, out, err, _ = run_train("run", *RESUME, **STEPS)
    assert code == 0, err
    assert f"resuming from {folder}/checkpoint-4" in out and "checkpoint-6 set aside" in out
    assert (folder / "_set_aside" / "checkpoint-6").is_dir() and not folders.flaw(
        folder / "checkpoint-6"
    )
    got = load_file(folder / "model.safetensors")
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("steps", [6, 4])
def test_never_a_step_past_max_steps(folder, run_train, steps):  # noqa: F811
    (folder / "model.safetensors").unlink()  # killed before the final save
    code, out, err, _ = run_train("run", *RESUME, **STEPS | {"max_steps": steps})
    assert code == 0, err
    assert (
        "6 steps, total" in out
        and json.loads((folder / "trainer_state.json").read_text())["global_step"] == 6
    )
    got, saved = (
        load_file(folder / "model.safetensors"),
        load_file(folder / "checkpoint-6" / "model.safetensors"),
    )
    assert all(torch.equal(got[name], saved[name]) for name in saved)
    if steps == 4:
        assert "max_steps 6 there, 4 here" in out


def test_an_older_one_sets_the_later_ones_aside(folder, run_train):  # noqa: F811
    older = str(folder / "checkpoint-2")
    code, out, err, _ = run_train(
        "run", "--resume_from_checkpoint", older, **STEPS | {"max_steps": 3}
    )
    assert code == 0, err
    assert "checkpoint-6, checkpoint-4 set aside" in out
    assert [p.name for p in folders.checkpoints(folder)] == ["checkpoint-3", "checkpoint-2"]
    # Into a folder that holds another run it does not go.
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    code, _, err, _ = run_train("other", "--resume_from_checkpoint", older, **STEPS)
    assert code == 2 and "holds another run (checkpoint-3)" in err


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

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders, "finish", killed)
        # a killed process tidies nothing
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            run_train(**STEPS)
    run = tmp_path / "run"
    assert (
        run / "_saving" / "checkpoint-2" / "optimizer.pt"
    ).is_file() and not folders.checkpoints(run)
    again = shutil.copytree(run, tmp_path / "again")
    code, out, err, _ = run_train("run", *RESUME, **STEPS)
    assert code == 0 and "starting from the first step" in out and "6 steps, total" in out, err
    # As the stock Trainer leaves it: the name without the state, which is written last.
    os.rename(again / "_saving" / "checkpoint-2", again / "checkpoint-2")
    (again / "checkpoint-2" / "trainer_state.json").unlink()
    code, out, err, _ = run_train("again", **STEPS)
    assert code == 0 and "checkpoint-2 set aside" in out, err


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
    assert code == 1 and line.startswith("hfpatch: the disk is full at optimizer.pt; ")
    assert [p.name for p in folder.iterdir()] == ["checkpoint-2"] and not folders.flaw(
        folder / "checkpoint-2"
    )


def test_the_final_model_is_all_old_or_all_new(tmp_path, monkeypatch):
    """Stopped at every move: what stands there loads as one model, or does not load."""
    parts = ("a-1.safetensors", "model.safetensors.index.json", "z-2.safetensors")

    def write(folder, word):
        folder.mkdir(exist_ok=True)
        for name in parts:
            (folder / name).write_text(word)

    replace = os.replace
    for stop in range(len(parts) + 1):
        target, saved = tmp_path / f"target{stop}", tmp_path / f"saved{stop}"
        write(target, "old")
        write(saved, "new")
        moved = []

        def move(*names, moved=moved, stop=stop):
            if len(moved) == stop:
                raise KeyboardInterrupt
            moved.append(replace(*names))

        monkeypatch.setattr(os, "replace", move)
        try:
            folders.publish(saved, target)
        except KeyboardInterrupt:
            assert stop < len(parts)
        there = {name: (target / name).read_text() for name in parts if (target / name).exists()}
        assert parts[1] not in there or set(there.values()) == {"new"}, there


def test_one_run_a_folder(run_train, tmp_path):  # noqa: F811
    lock = folders.Lock(tmp_path / "run")
    code, _, err, folder = run_train(max_steps=1)
    assert (
        code == 2
        and f"another run writes to {folder} (process {os.getpid()} on {os.uname().nodename})"
        in err
    )
    lock.close()
    assert not folder.exists(), "a lock leaves nothing behind"
    # A dead owner's file is no lock.
    folder.mkdir()
    (folder / folders.LOCK).write_text("process 1 on elsewhere\n")
    assert run_train(max_steps=1)[0] == 0


def test_a_lock_on_a_disk_that_turned_read_only(tmp_path, monkeypatch):
    """Its file stays; what ended the run is not hidden by that, and the same process may go on
    there.
    """
    lock = folders.Lock(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "unlink",
            lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")),
        )
        lock.close()
    assert lock.path.exists()
    folders.Lock(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_save_total_limit_keeps_the_newest_and_the_best(tmp_path, monkeypatch):
    for step in (2, 10, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    folders.rotate(tmp_path, 2, str(tmp_path / "checkpoint-2"))
    assert {p.name for p in folders.checkpoints(tmp_path)} == {"checkpoint-10", "checkpoint-2"}
    assert not (tmp_path / folders.SAVING).exists()
    # Killed while it deletes: no half a checkpoint carries the name.
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    folders.rotate(tmp_path, 1, None)
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-10"]


def test_the_hub_token_is_not_saved(run_train, monkeypatch):  # noqa: F811
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    pushed = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, path: pushed.append(folders.flaw(Path(path)))
    )
    token = "hf_" + "s" * 30
    code, out, err, folder = run_train(
        push_to_hub=True, hub_model_id="a/b", hub_token=token, **STEPS
    )
    assert code == 0, err
    assert pushed == [None] * 3, (
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
        assert all(folders.flaw(p) is None for p in folders.checkpoints(tmp_path / "run"))
        if code == 0:
            break
    argv = flags(tmp_path, saved_tokenizer, **steps, output_dir=tmp_path / "straight")
    process = spawn([ROOT / "scripts" / "train.py", *argv], tmp_path / "straight.txt")
    assert process.wait(timeout=300) == 0
    got, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "straight"))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
