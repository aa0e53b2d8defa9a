"""Builds the dry device and runs cases on it, in processes that preload it (README.md)."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "profiles" / "dry" / "results.csv"
COLUMNS = ("check", "case", "card", "torch", "quantity", "value", "limit", "commit")
CARDS = {80: "sm_80", 90: "sm_90", 100: "sm_100"}


def why_not() -> str | None:
    """Why the dry device cannot be built here; None if it can."""
    if os.environ.get("HFPATCH_DRY") != "1":
        return "the dry device has a run of its own: bash scripts/test.sh --dry"
    if not sys.platform.startswith("linux"):
        return "the dry device needs Linux"
    if torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) != 13:
        return f"the dry device needs a CUDA 13 build of torch, this is {torch.__version__}"
    for program in ("gcc", "make", "nm"):
        if shutil.which(program) is None:
            return f"the dry device needs {program}"
    return None


def pytest_collection_modifyitems(items):
    reason = why_not()
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def environment(**changes) -> dict:
    """The environment of a process on the dry device. A change to None takes a variable away."""
    host = {"HFPATCH_HOST_MEMORY": str(200 << 30), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    host |= {"PYTHONPATH": str(ROOT), "DRY_PYTHON": sys.executable, "TOKENIZERS_PARALLELISM": "0"}
    host |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = {**os.environ, **host, **changes}
    return {name: str(value) for name, value in found.items() if value is not None}


def command(*words: str) -> list[str]:
    return [str(HERE / "dry.sh"), sys.executable, *words]


class Ran:
    """A case's rows. head: the model's bytes and hfpatch's report; end: "ok", or the error."""

    def __init__(self, rows: list[dict]):
        self.end = rows[-1]["end"]
        self.head = next((row for row in rows if "report" in row), {})
        self.steps = [row for row in rows if "step" in row]

    @property
    def last(self) -> dict:
        return self.steps[-1]


class Dry:
    """A process on the dry device, which is started again where its environment must differ."""

    def __init__(self, logs: Path):
        self.process, self.settings, self.logs = None, None, logs

    def run(self, model: str, *, env: dict | None = None, alone: bool = False, **case) -> Ran:
        """Runs the case (steps.Case).

        Args:
            env: DRY_* variables, and others of the process.
            alone: in a process of its own, as for what patches classes of the whole process.
        """
        settings = env or {}
        if self.process is None or self.settings != settings or alone:
            self._start(settings)
        try:
            return self._answer(model, case)
        except BaseException:  # of a timeout too: the next case must not get this one's rows
            if self.process is not None:
                self.process.kill()
            alone = True
            raise
        finally:
            if alone:
                self.stop()

    def _answer(self, model: str, case: dict) -> Ran:
        print(json.dumps({"model": model, **case}), file=self.process.stdin, flush=True)
        rows: list[dict] = []
        for line in self.process.stdout:
            rows.append(json.loads(line))
            if "end" in rows[-1]:
                return Ran(rows)
        self.process.wait()
        code, self.process = self.process.returncode, None
        pytest.fail(f"the process ended with {code}:\n{self._tail()}")

    def _start(self, settings: dict) -> None:
        self.stop()
        self.settings = settings
        with open(self.logs, "w") as errors:
            self.process = subprocess.Popen(
                command(str(HERE / "worker.py")), env=environment(**settings), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def _tail(self) -> str:
        with open(self.logs, errors="replace") as lines:
            return "".join(deque(lines, 25))

    def stop(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
        self.process = None


@pytest.fixture(scope="session")
def dry(tmp_path_factory):
    found = Dry(tmp_path_factory.mktemp("dry") / "stderr.txt")
    yield found
    found.stop()


@pytest.fixture(scope="session")
def table():
    """Notes numbers: table(check, case, quantity, value, limit). With HFPATCH_DRY_TABLE=1 they
    replace their rows in profiles/dry/results.csv.
    """
    rows: dict[tuple, tuple] = {}
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True)
    commit = git.stdout.decode().strip()

    def note(check: str, case: str, quantity: str, value, limit="", sm: int = 90) -> None:
        value = f"{value:.4g}" if isinstance(value, float) else value
        limit = f"{limit:.4g}" if isinstance(limit, float) else limit
        version = torch.__version__.split("+")[0]
        key = (check, case, CARDS[sm], version, quantity)
        rows[key] = (value, limit, commit)
        print(f"{check}, {case}: {quantity} {value}" + (f" (at most {limit})" if limit else ""))

    yield note
    if os.environ.get("HFPATCH_DRY_TABLE") != "1":
        return
    before = {}
    if TABLE.exists():
        with open(TABLE, newline="") as file:
            before = {tuple(row[:5]): tuple(row[5:]) for row in list(csv.reader(file))[1:]}
    with open(TABLE, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*key, *values] for key, values in sorted((before | rows).items()))
