"""What someone gets who installs hfpatch: names that tools can see, bounds that are said, a wheel
that needs no checkout.
"""

import ast
import configparser
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hfpatch
from hfpatch.cli.env_problems import SUPPORTED
from hfpatch.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_completion_and_type_checkers_see_the_names_that_python_loads():
    tree = ast.parse(Path(hfpatch.__file__).read_text())
    block = next(
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {**hfpatch._PUBLIC, "ops": "hfpatch"}
    assert {*seen, "__version__"} == set(hfpatch.__all__) == set(dir(hfpatch))
    for name in hfpatch.__all__:
        assert getattr(hfpatch, name) is not None


# A user's script: its first half is well typed, each line of the second is one mistake.
SNIPPET = """
import hfpatch
from torch import nn


def main(model: nn.Module) -> list[tuple[str, str]]:
    kept = hfpatch.Checkpointing(offload="host", every=2, tile=8192)
    report: hfpatch.Report = hfpatch.apply(model, checkpointing=kept, loss=True)
    longest: int | None = hfpatch.plan("llama-3.1-8b", seq_len=8192).advice.max_seq_len
    hfpatch.undo(model)
    return report.skipped if longest else []


hfpatch.aply
hfpatch.apply(nn.Linear(1, 1), ropes=True)
hfpatch.Checkpointing(tiles=3)
hfpatch.ops.rms_norm(0, epsilon=1.0)
lines: int = hfpatch.apply(nn.Linear(1, 1)).details
"""


@pytest.mark.long
def test_a_type_checker_reads_a_users_script(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SNIPPET)
    # The stack's own types are not read: torch alone takes a minute.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\n"
        "[mypy-torch.*,transformers.*,numpy.*,triton.*,accelerate.*,datasets.*]\nfollow_imports = "
        "skip\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--follow-imports=silent",
        "script.py",
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    wrong = [line for line in done.stdout.splitlines() if ": error: " in line]
    begin = SNIPPET.splitlines().index("hfpatch.aply") + 1
    assert [int(line.split(":")[1]) for line in wrong] == [*range(begin, begin + 5)], (
        done.stdout + done.stderr
    )
    for line, word in zip(
        wrong, ('maybe "apply"', 'mean "rope"', 'mean "tile"', '"epsilon"', '"list[str]"')
    ):
        assert word in line


# What a reader of help() must find without the source: every parameter and field, and what is
# raised.
@pytest.mark.parametrize("name", ["apply", "verify", "Report", "Checkpointing"])
def test_docstrings_name_every_argument(name):
    thing = getattr(hfpatch, name)
    text = inspect.getdoc(thing)
    for parameter in inspect.signature(thing).parameters:
        assert f"{parameter}:" in text, f"{name}: {parameter} is not said"
    if name != "Report":
        assert "ValueError" in text
    assert ">>>" in text or "hfpatch." in text, "an example"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"hfpatch {hfpatch.__version__}"


def test_the_oldest_versions_are_those_of_the_metadata(setup):
    needs = setup["options"]["install_requires"].split()
    assert needs == ["torch>=2.11", "transformers>=5.5,<6"]
    assert hfpatch.OLDEST == {"torch": (2, 11), "transformers": (5, 5)}
    assert SUPPORTED["torch"][0] == (2, 11) and SUPPORTED["transformers"] == (
        (5, 5),
        (6,),
    )
    assert setup["options"]["python_requires"] == ">=3.10" and SUPPORTED["python"][0] == (
        3,
        10,
    )
    assert "HFPATCH_OLDEST_TORCH=2.11 " in (ROOT / "scripts" / "env.sh").read_text()
    script = (ROOT / "scripts" / "test.sh").read_text()
    for oldest in ("python3.10", "torch==2.11.*", "transformers==5.5.*"):
        assert oldest in script, f"test.sh --all does not run {oldest}"


@pytest.mark.parametrize(
    "package, version", [("transformers", "4.57.6"), ("torch", "2.10.1+cu128")]
)
def test_an_old_package_is_refused_with_a_sentence(package, version, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == package else real(name)
    )
    with pytest.raises(
        ImportError,
        match=f"^hfpatch: {package} must be .* or newer, got .*{version[:4]}.*pip install",
    ):
        _ = hfpatch.apply


# A python that says which torch is there and writes down what it is asked to do.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >>"$LOG"
case "$*" in *torch.__version__*) [ -n "$TORCH" ] && echo "$TORCH" ;; esac
"""


@pytest.mark.parametrize(
    "torch, code", [("2.11.0+cu130", 0), ("2.9.1+cu128", 2), ("2.13.0a0+git1", 0)]
)
def test_installing_never_replaces_the_torch_that_is_there(torch, code, tmp_path):
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(FAKE_PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "HFPATCH_VENV": str(folder),
        "LOG": str(log),
        "TORCH": torch,
        "PYTHON": sys.executable,
    }
    script = f"source {ROOT}/scripts/env.sh; make_env train"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    installs = [line for line in log.read_text().splitlines() if "pip install" in line]
    if code:
        assert (
            f"torch must be 2.11 or newer, got {torch}, which is not replaced" in done.stderr
            and not installs
        )
    else:
        assert installs == [f"-m pip install -q -c {folder}/.hfpatch-torch -e {ROOT}[train]"]
        assert (folder / ".hfpatch-torch").read_text() == f"torch=={torch}\n"


def copied(source: Path) -> Path:
    """What a build reads, copied to the folder `source`."""
    for name in ("hfpatch", "ds_configs", "fsdp_configs"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "DESCRIPTION.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, built without a network; of a copy, since a build leaves folders
    behind.
    """
    if tuple(map(int, importlib.metadata.version("setuptools").split(".")[:2])) < (70, 1):
        pytest.importorskip("wheel", reason="older setuptools make wheels by the package wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source = copied(folder / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    built = subprocess.run(
        [*command, "-w", str(folder), str(source)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_its_configs(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = file.read(next(n for n in file.namelist() if n.endswith("METADATA"))).decode()
    code = {
        p
        for p in (ROOT / "hfpatch").rglob("*")
        if p.suffix in (".py", ".typed", ".json", ".yaml") and p.is_file()
    }
    wanted = {p.relative_to(ROOT).as_posix() for p in code}
    for kind in ("ds_configs", "fsdp_configs"):
        wanted |= {f"hfpatch/{kind}/{p.name}" for p in (ROOT / kind).iterdir()}
    assert held == wanted
    assert (
        "Description-Content-Type: text/markdown" in metadata
        and "Classifier: Typing :: Typed" in metadata
    )


def run_from(wheel: Path, folder: Path, *arguments: str, **kwargs):
    """`python ...` in an empty folder with the wheel's files and no checkout on the path."""
    site = wheel.parent / "site"
    if not site.exists():
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "USE_TF": "0"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, **kwargs
    )


@pytest.mark.long  # of a release
def test_what_is_uploaded_builds_and_its_description_renders(tmp_path):
    """The sdist and a wheel made from it, as an index takes them: `twine check --strict`."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    source, out = copied(tmp_path / "source"), tmp_path / "dist"

    def ran(*command):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr

    ran("build", "--no-isolation", "--outdir", out, source)
    made = sorted(out.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    ran("twine", "check", "--strict", *made)
    with zipfile.ZipFile(made[0]) as file:
        assert "hfpatch/examples/trainer.py" in file.namelist()
        metadata = file.read(next(n for n in file.namelist() if n.endswith("METADATA"))).decode()
    assert "Author: The hfpatch authors" in metadata


def test_engine_configs_are_found_without_a_checkout(wheel, tmp_path):
    code = (
        "from hfpatch.trainer.configs import find, load; print(find('zero3')); "
        "print(load('fsdp2').engine)"
    )
    done = run_from(wheel, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    where, engine = done.stdout.split()
    assert (
        where.startswith(str(wheel.parent))
        and where.endswith("hfpatch/ds_configs/zero3.json")
        and engine == "fsdp"
    )


def test_train_runs_without_a_checkout(wheel, tmp_path):
    (tmp_path / "text.txt").write_text(
        "one line of words to train a tokenizer on, again and again\n" * 40
    )
    flags = "--model llama-tiny --train_tokenizer 300 --data text.txt --packing --seq-len 32"
    flags += " --max_steps 2 --logging_steps 1 --save_strategy no --output_dir out --use_cpu --report_to none"
    done = run_from(wheel, tmp_path, "-m", "hfpatch", "train", *flags.split())
    assert done.returncode == 0, done.stderr
    assert (
        "hfpatch: 2 steps" in done.stdout + done.stderr
        and (tmp_path / "out" / "model.safetensors").is_file()
    )


@pytest.mark.long
def test_prove_needs_no_checkout(wheel, tmp_path):
    """Its imports and its files; without time it leaves every piece out, which is no success."""
    done = run_from(
        wheel, tmp_path, "-m", "hfpatch", "prove", "--small", "--seconds", "0", "--out", "out"
    )
    assert done.returncode == 1, done.stderr
    assert "0 of 0 comparisons" in done.stdout and "Traceback" not in done.stderr
    assert "the time was over" in (tmp_path / "out" / "prove.md").read_text()
