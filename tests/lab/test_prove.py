"""`hfpatch prove`, whole, at small size; what its row may hold; what it says of what fails."""

import getpass
import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfpatch.cli.main import main
from hfpatch.lab import checks
from hfpatch.lab import prove as module
from hfpatch.lab.checks import Check
from hfpatch.lab.elementwise import OPS, Op
from hfpatch.lab.prove import Proof, check_row, page, row

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prove") / "out"
    assert main(["prove", "--small", "--out", str(folder)]) == 0
    return folder


def test_the_page_names_every_op_and_every_way(out):
    text = (out / "prove.md").read_text()
    for what in (
        "rms_norm",
        "rope",
        "swiglu",
        "linear_cross_entropy",
        "attention",
        "sinks",
        "model, host",
        "model, lengths",
        "attention cpu, backward",
        "against the CPU",
    ):
        assert what in text
    assert (
        "all is well" in text
        and "exposed copies" in text
        and "No figure here says how fast" in text
    )
    assert sorted(p.name for p in out.iterdir()) == ["prove.json", "prove.md"]


def test_the_row_is_small_and_says_nothing_of_whose_it_is(out):
    text = (out / "prove.json").read_text()
    found = json.loads(text)
    check_row(found)
    assert found["ok"] and found["small"] and found["checks"] > 40 and found["left_out"] == 0
    assert found["device"] == {"name": "cpu"} and found["versions"]["torch"] == torch.__version__
    assert [step["way"] for step in found["steps"]] == ["auto", "host"]
    for step in found["steps"]:
        assert step["step_s"] > 0 and step["plan_peak_gib"] > 0 and step["exposed_copies_s"] == 0
    assert len(text) < module.ROW_BYTES
    for theirs in (str(Path.home()), str(ROOT), socket.gethostname(), f"/{getpass.getuser()}/"):
        assert theirs not in text


def proof(**changes) -> Proof:
    checks = [
        Check("rope", "float32", 37, 0.5, "out0"),
        Check("model, host", "float32", 45, 0.5, "loss"),
    ]
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


@pytest.mark.parametrize(
    "change, said",
    [
        ({"ok": None}, "a row must have ok"), ({"host": "mine"}, "got host too"),
        ({"versions": {"torch": "2 from /opt/torch/lib"}}, "must hold no path"),
        ({"versions": {"torch": "~/torch/lib"}}, "must hold no path"),
        ({"versions": {"torch": "x" * 9000}}, "8192 bytes at most"),
    ],
)  # fmt: skip
def test_a_row_that_is_none_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        check_row(row(proof()) | change)


def test_rows_that_were_sent():
    for path in (ROOT / "profiles" / "prove").glob("*.json"):
        found = json.loads(path.read_text())
        check_row(found)
        assert not found["small"] and found["device"]["name"] != "cpu", path.name


def of_rope(op: Op) -> Check:
    given = (op, torch.bfloat16, 37, checks.SMALL.widths, torch.device("cpu"))
    (check,) = checks.of_op("rope", torch.bfloat16, 37, checks.float64.element_wise, given)
    return check


# What a device that computes nothing gives: zeros, and no error at all.
def test_an_error_of_zero_and_a_reference_of_zeros_fail():
    right = OPS["rope"]
    zeros = lambda *x: tuple(0 * y for y in right.exact(*x))  # noqa: E731
    found = of_rope(replace(right, ours=zeros, plain=zeros, exact=zeros))
    assert found.share == float("inf") and not found.passed
    assert Check("rope", "bfloat16", 1, 0.0, "out0").passed  # a single token has the angle 0
    assert Check("rope", "float32", 37, 0.0, "out0").passed
    assert not Check("rope", "bfloat16", 37, 0.0, "out0").passed


# An op that leaves a part of its output unwritten fails: new memory holds NaN.
def test_what_nothing_wrote_fails(monkeypatch):
    right = OPS["swiglu"]

    def half(gate, up):
        out = torch.empty_like(gate)
        (whole,) = right.ours(gate, up)
        out[:20] = whole[:20]
        return (out,)

    given = (
        replace(right, ours=half),
        torch.bfloat16,
        37,
        checks.SMALL.widths,
        torch.device("cpu"),
    )
    job = (
        "swiglu",
        lambda: checks.of_op("swiglu", torch.bfloat16, 37, checks.float64.element_wise, given),
    )
    monkeypatch.setattr(checks, "jobs", lambda *_: [job])
    (found,), _ = checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() + 60)
    assert found.share == float("inf") and found.where == "out0"


# Ops alone are no proof of a step.
def test_without_a_model_nothing_is_shown():
    found = proof(done=[Check("rope", "float32", 37, 0.5, "out0")])
    assert not found.ok and "NOT SHOWN" in page(found) and "all is well" not in page(found)


# An op that is wrong by some rounding steps fails.
def test_a_wrong_op_fails():
    right = OPS["rope"]
    wrong = replace(right, ours=lambda *x: tuple(1.05 * y for y in right.ours(*x)))
    assert of_rope(right).passed and not of_rope(wrong).passed


# One that raises fails too, where a backend may refuse; what comes too late is said.
def test_what_raises_fails_but_for_a_backend_that_refuses(monkeypatch):
    def refuses():
        raise RuntimeError("no kernel found")

    jobs = [("attention cudnn bfloat16", refuses), ("swiglu bfloat16", refuses)]
    monkeypatch.setattr(checks, "jobs", lambda *_: jobs)
    cpu = torch.device("cpu")
    done, left_out = checks.run(cpu, checks.SMALL, time.monotonic() + 60)
    assert left_out == ["attention cudnn bfloat16: RuntimeError: no kernel found"]
    assert [check.what for check in done] == ["swiglu bfloat16"] and not done[0].passed
    done, left_out = checks.run(cpu, checks.SMALL, time.monotonic() - 1)
    assert not done and len(left_out) == 2 and "the time was over" in left_out[0]
