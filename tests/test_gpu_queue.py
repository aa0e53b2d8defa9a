"""The scripts for a GPU, run in full on a CPU at tiny size, and what their rows are made of."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "gpu"
sys.path.insert(0, str(FOLDER))

import common  # noqa: E402
import nine  # noqa: E402

# torchao, peft and deepspeed warn on import of versions that are not ours to change.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def load(name: str):
    spec = importlib.util.spec_from_file_location("gpu_" + name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_in(folder: Path, *arguments, stamp: bool = True) -> common.Rows:
    args = common.parse(common.parser("nine", "x"), ["--small", "--out", str(folder), *arguments])
    return common.Rows(args, "nine", stamp=stamp)


def in_this_process(monkeypatch):
    """The worker of nine.py without a process of its own."""

    def run(command, **_):
        nine.main(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(nine.subprocess, "run", run)


@pytest.mark.parametrize("parts", ["first", pytest.param("second", marks=pytest.mark.long)])
def test_nine_minutes_at_small_size(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("HFPATCH_COMMIT", "abc1234")
    in_this_process(monkeypatch)
    assert nine.main(["--small", "--out", str(tmp_path), "--parts", parts]) == 0
    stamp, *rows = rows_of(tmp_path / "nine.jsonl")
    assert stamp["commit"] == "abc1234" and "torch=" in stamp["versions"] and stamp["device"]
    # Whatever fails here fails on a GPU too.
    assert not [r for r in rows if r.get("failed") or r.get("error") or r.get("died")]
    assert all(r["passed"] and 0 < r.get("share", 0.5) <= 1 for r in rows if "passed" in r)
    ran = {r["part"] for r in rows if not r.keys() & {"begins", "ends"} and "part" in r}
    wanted = nine.FIRST if parts == "first" else nine.SECOND
    assert ran == {name for name in wanted if not name.startswith(nine.NO_CPU)}
    steps = [r for r in rows if "s" in r]
    assert steps and all(r["s"] > 0 for r in steps)

    assert nine.main(["--tables", str(tmp_path / "nine.jsonl"), "--out", str(tmp_path)]) == 0
    for name in ran:
        table = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
        assert table and all(row["commit"] == "abc1234" and row["device"] for row in table)


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    def fails(rows, part):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def breaks(rows, part):
        {}["a kernel's name"]

    def works(rows, part):
        rows.add(part=part, s=1.23456789)

    parts = {"fails": (0, fails), "breaks": (0, breaks), "works": (0, works)}
    monkeypatch.setattr(nine, "PARTS", parts)
    rows = rows_in(tmp_path)
    nine.work(rows, list(parts))
    found = {r["part"]: r for r in rows_of(rows.path) if r.keys() & {"failed", "s"}}
    assert found["fails"]["error"] == "out of memory" and found["works"]["s"] == 1.2346
    assert found["breaks"]["error"].startswith("KeyError")
    assert "Traceback" in capsys.readouterr().err


def test_a_machine_without_gpu_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        nine.main(["--out", str(tmp_path)])
    assert "--small" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "name, arguments",
    [("kernel_tests", ["--tests", "tests/ops/test_linear_cross_entropy.py"]), ("engines", [])],
)
def test_the_other_scripts_at_small_size(name, arguments, tmp_path):
    assert load(name).main(["--small", "--out", str(tmp_path), *arguments]) == 0
    rows = rows_of(tmp_path / f"{name}.jsonl")
    assert len(rows) > 1 and not any(r.get("error") or r.get("left_out") for r in rows)


def test_the_readme_names_every_script():
    text = (FOLDER / "README.md").read_text()
    scripts = {path.name for path in FOLDER.glob("*.*")} - {"README.md"}
    assert not [name for name in scripts if name not in text]
