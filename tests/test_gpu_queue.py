"""The scripts for a GPU, run untiled on a CPU at tiny size, and what their rows are made of."""

import ast
import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "gpu"
sys.path.insert(0, str(FOLDER))

import common  # noqa: E402
import nine  # noqa: E402
import speed  # noqa: E402

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


def test_parts_after_a_worker_that_died_still_run(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setenv("HFPATCH_COMMIT", "abc1234")  # git runs by subprocess.run too

    def dies(command, **_):
        names = command[command.index("--parts") + 1 :]
        begun.append(names)
        rows = rows_in(tmp_path, stamp=False)
        rows.add(part=names[0], begins=True)
        return subprocess.CompletedProcess(command, -11 if len(begun) == 1 else 0)

    monkeypatch.setattr(nine.subprocess, "run", dies)
    nine.main(["--small", "--out", str(tmp_path), "--parts", "machine", "loss", "step_8k"])
    assert begun == [["machine", "loss", "step_8k"], ["loss", "step_8k"]]
    assert [r["died"] for r in rows_of(tmp_path / "nine.jsonl") if "died" in r] == ["machine"]


def test_time_that_is_over_is_a_row(tmp_path, monkeypatch):
    rows = rows_in(tmp_path, "--seconds", "5")
    rows.args.small = False  # from here on as on a GPU
    nine.work(rows, ["step_131k_32"])
    assert any("120 needed" in r.get("left_out", "") for r in rows_of(rows.path))


def test_copies_that_no_kernel_hides_are_those_in_a_gap():
    kernels = [(0.0, 2.0), (3.0, 5.0), (5.5, 6.0)]
    copies = [(1.0, 2.5), (4.0, 4.5)]
    assert speed.covered(kernels) == pytest.approx(4.5)
    assert speed.covered(kernels + copies) - speed.covered(kernels) == pytest.approx(0.5)
    assert speed.kind_of("Memcpy DtoH (Device -> Pinned)") == "copy_host"
    assert speed.kind_of("nvjet_tst_256x128") == "matmul"


def test_model_flops_are_those_of_the_8b_model():
    """6 FLOPs a matmul weight and token, and causal attention: 2.35e16 less what tiles repeat."""
    from hfpatch.lab.made import made

    model = made("llama-3.1-8b", {"num_hidden_layers": 2}, "meta", torch.bfloat16)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    expected = 6 * (2 * layer + 128256 * 4096) * 8192 + 6 * 2 * 4096 * 8192**2
    assert speed.model_flops(model, 8192) == expected


def test_scripts_need_no_test_package():
    """pytest runs in kernel_tests.py alone, in a process of its own: a bare machine has none."""
    for path in (*FOLDER.glob("*.py"), *FOLDER.parents[1].glob("hfpatch/lab/*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        assert "pytest" not in names, path.name


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


@pytest.mark.parametrize("wheel, tree, code", [(40, 30, 1), (30, 20, 0)])
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


def test_a_copy_without_history_says_what_it_is_a_copy_of(tmp_path, monkeypatch):
    """By the hash that git itself gives the package's folder, whatever Python left in it."""
    package = tmp_path / "hfpatch"
    (package / "ops").mkdir(parents=True)
    (package / "__pycache__").mkdir()
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
