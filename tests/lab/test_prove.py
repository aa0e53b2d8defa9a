"""`hfpatch prove`, whole, at small size; what its row may hold; what it says of what fails."""

import getpass
import json
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfpatch.cli.main import main
from hfpatch.context.classes import is_patched
from hfpatch.lab import checks, full_card
from hfpatch.lab.budget import share_of_allowed
from hfpatch.lab.checks import Check
from hfpatch.lab.prove import Proof, page, row

ROOT = Path(__file__).resolve().parents[2]


ROW_BYTES = 8192
REQUIRED = {
    "hfpatch_prove": int,
    "small": bool,
    "ok": bool,
    "device": dict,
    "versions": dict,
    "checks": int,
    "failed": list,
    "left_out": int,
    "rates": dict,
    "steps": list,
}
OPTIONAL = {"worst_share", "seconds"}
_PATH = re.compile(r"(^|[\s'\"=(])(~|/|[A-Za-z]:\\)[\w.~-]*[/\\]")


def check_row(found: dict) -> None:
    """ValueError for a row that profiles/prove/ refuses: its fields, its size, or a path in it."""
    for name, kind in REQUIRED.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"hfpatch: a row must have {name} ({kind.__name__}), got none.")
    unknown = found.keys() - REQUIRED.keys() - OPTIONAL
    if unknown:
        raise ValueError(f"hfpatch: a row must have its own fields alone, got {min(unknown)} too.")
    text = json.dumps(found, allow_nan=False)
    if len(text) > ROW_BYTES:
        raise ValueError(f"hfpatch: a row must have {ROW_BYTES} bytes at most, got {len(text)}.")
    for value in _texts(found):
        if _PATH.search(value):
            raise ValueError(f"hfpatch: a row must hold no path, got {value!r}. Leave it out.")


def _texts(value) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prove") / "out"
    assert main(["prove", "--small", "--out", str(folder)]) == 0
    return folder


def test_the_page_names_every_way(out):
    text = (out / "prove.md").read_text()
    for what in ("model, host", "model, auto", "every second", "float32"):
        assert what in text
    assert "all is well" in text and "No figure here says how fast" in text
    assert sorted(p.name for p in out.iterdir()) == ["prove.json", "prove.md"]


def test_the_row_is_small_and_says_nothing_of_whose_it_is(out):
    text = (out / "prove.json").read_text()
    found = json.loads(text)
    check_row(found)
    assert found["ok"] and found["small"] and found["checks"] > 20 and found["left_out"] == 0
    assert found["device"] == {"name": "cpu"} and torch.__version__.startswith(
        found["versions"]["torch"]
    )
    assert [step["way"] for step in found["steps"]] == ["auto", "host"]
    for step in found["steps"]:
        assert step["step_s"] > 0 and step["plan_peak_gib"] > 0
    for theirs in (str(Path.home()), str(ROOT), socket.gethostname(), f"/{getpass.getuser()}/"):
        assert theirs not in text


def proof(**changes) -> Proof:
    checks = [Check("model, host", "float32", 45, 0.5, "loss")]
    made = Proof({"name": "cpu"}, {"torch": "2"}, True, checks)
    return replace(made, **changes)


def test_what_fails_is_named():
    wrong = Check("rope", "bfloat16", 37, 1.5, "grad1")
    broken = Check("swiglu float32", "", 0, float("inf"), "RuntimeError: no /home/someone/x.so")
    found = proof(done=[wrong, broken])
    assert not found.ok and "SOMETHING IS WRONG" in page(found) and "grad1" in page(found)
    sent = row(found)
    assert [check["where"] for check in sent["failed"]] == ["grad1", "RuntimeError"]
    assert sent["failed"][1]["share"] is None and "someone" not in json.dumps(sent)
    nan = Check("rope", "bfloat16", 37, float("nan"), "grad1")
    assert not proof(done=[nan]).ok and not proof(done=[]).ok
    assert not proof(steps=[{"way": "auto", "error": "out of memory"}]).ok
    late = full_card.measure(full_card.SMALL, torch.device("cpu"), None, until=0.0)
    assert {row["error"] for row in late} == {"not started: the time was over"}


def test_rows_that_were_sent():
    for path in (ROOT / "profiles" / "prove").glob("*.json"):
        found = json.loads(path.read_text())
        check_row(found)
        assert not found["small"] and found["device"]["name"] != "cpu", path.name


# What a device that computes nothing gives: zeros, and no error at all.
def test_an_error_of_zero_and_a_reference_of_zeros_fail():
    x = torch.ones(3, dtype=torch.float64)
    half = torch.bfloat16
    assert share_of_allowed(0 * x, 0 * x, 0 * x, half) == float("inf")
    assert share_of_allowed(0 * x, 0 * x, x, half) > 1, "plain PyTorch computes nothing either"
    assert share_of_allowed(x, x, x, half) == 0.0
    assert share_of_allowed(x * float("nan"), x, x, half) == float("inf")
    step = torch.finfo(half).eps
    assert share_of_allowed(x + 4 * step, x + step, x, half) == 1.0, "twice a step, and one lost"
    assert Check("model, host", "float32", 37, 0.0, "loss").passed
    assert not Check("model, host", "bfloat16", 37, 0.0, "loss").passed


@pytest.fixture
def one_way(monkeypatch):
    every = checks.ways
    monkeypatch.setattr(checks, "ways", lambda tile: {"host": every(tile)["host"]})


# Parts of a gradient that nothing wrote fail: new memory holds NaN.
def test_what_nothing_wrote_fails(monkeypatch, one_way):
    right = checks.gradients

    def half(model, batch):
        found = right(model, batch)
        if is_patched(model.model.norm):
            found["lm_head.weight"] = torch.empty_like(found["lm_head.weight"])
        return found

    monkeypatch.setattr(checks, "gradients", half)
    monkeypatch.setattr(checks, "dtypes", lambda _: [torch.bfloat16])
    found, _ = checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() + 60)
    assert found and all(check.where == "lm_head.weight" for check in found)
    assert all(check.share == float("inf") for check in found)


# A gradient that is wrong by some rounding steps fails.
def test_a_wrong_gradient_fails(monkeypatch, one_way):
    right = checks.gradients

    def off(model, batch):
        found = right(model, batch)
        if is_patched(model.model.norm):
            found["lm_head.weight"] *= 1.05
        return found

    monkeypatch.setattr(checks, "gradients", off)
    found = checks.checks_in(torch.device("cpu"), torch.bfloat16, checks.SMALL)
    assert all(check.where == "lm_head.weight" and check.share > 1 for check in found)


# What raises fails; what comes too late is said.
def test_what_raises_fails(monkeypatch):
    def refuses(*_):
        raise RuntimeError("no kernel found")

    monkeypatch.setattr(checks, "checks_in", refuses)
    done, left_out = checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() + 60)
    assert not left_out and done[0].where == "RuntimeError: no kernel found"
    assert done[0].what == "model bfloat16" and not done[0].passed
    done, left_out = checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() - 1)
    assert not done and "the time was over" in left_out[0]
