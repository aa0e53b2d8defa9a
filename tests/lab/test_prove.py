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

import hfpatch
from hfpatch.budget.hardware import gpu_row
from hfpatch.cli.main import main
from hfpatch.context.classes import is_mixed
from hfpatch.lab import checks, full_card
from hfpatch.lab.budget import share_of_allowed
from hfpatch.lab.checks import Check
from hfpatch.lab.prove import Proof, page, row

ROOT = Path(__file__).resolve().parents[2]
EXPLAINS_ITSELF = {"hfpatch_prove", "seconds", "way", "preset", "tokens", "dtype"}


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
    for what in ("model, host", "model, auto", "model, lengths", "float32"):
        assert what in text
    assert "all is well" in text and "No figure here says how fast" in text
    assert sorted(p.name for p in out.iterdir()) == ["prove.json", "prove.md"]


def test_the_row_is_small_and_says_nothing_of_whose_it_is(out):
    text = (out / "prove.json").read_text()
    found = json.loads(text)
    check_row(found)
    assert found["ok"] and found["small"] and found["checks"] > 20 and found["left_out"] == 0
    assert found["device"] == {"name": "cpu"} and found["versions"]["torch"] == torch.__version__
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


# What a device that computes nothing gives: zeros, and no error at all.
def test_an_error_of_zero_and_a_reference_of_zeros_fail():
    x = torch.ones(3, dtype=torch.float64)
    half = torch.bfloat16
    assert share_of_allowed(0 * x, 0 * x, 0 * x, half) == float("inf")
    assert share_of_allowed(x, x, x, half) == 0.0
    assert share_of_allowed(x * float("nan"), x, x, half) == float("inf")
    step = torch.finfo(half).eps
    assert share_of_allowed(x + 4 * step, x + step, x, half) == 1.0, "twice a step, and one lost"
    assert Check("model, host", "float32", 37, 0.0, "loss").passed
    assert not Check("model, host", "bfloat16", 37, 0.0, "loss").passed


def run_one(monkeypatch, name: str, job):
    monkeypatch.setattr(checks, "jobs", lambda *_: [(name, job)])
    return checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() + 60)


# Parts of a gradient that nothing wrote fail: new memory holds NaN.
def test_what_nothing_wrote_fails(monkeypatch):
    right = checks.gradients

    def half(model, batch):
        found = right(model, batch)
        if is_mixed(model.model.norm):
            found["lm_head.weight"] = torch.empty_like(found["lm_head.weight"])
        return found

    monkeypatch.setattr(checks, "gradients", half)
    given = torch.device("cpu"), torch.bfloat16, checks.SMALL
    found, _ = run_one(monkeypatch, "model", lambda: checks._model(*given))
    assert found and all(check.where == "lm_head.weight" for check in found)
    assert all(check.share == float("inf") for check in found)


# A gradient that is wrong by some rounding steps fails.
def test_a_wrong_gradient_fails(monkeypatch):
    model = checks._made("cpu", torch.bfloat16, checks.SMALL)
    batch = checks.batch_of(model, 45, "cpu")
    true, plain = checks.references(model, batch)
    hfpatch.apply(model)
    right = checks.shares_of(model, batch, true, plain, torch.bfloat16)
    wrong = share_of_allowed(
        1.05 * plain["lm_head.weight"], plain["lm_head.weight"], true["lm_head.weight"],
        torch.bfloat16,
    )  # fmt: skip
    assert max(right.values()) <= 1 < wrong


# What raises fails; what comes too late is said.
def test_what_raises_fails(monkeypatch):
    def refuses():
        raise RuntimeError("no kernel found")

    done, left_out = run_one(monkeypatch, "model bfloat16", refuses)
    assert not left_out and done[0].where == "RuntimeError: no kernel found"
    assert [check.what for check in done] == ["model bfloat16"] and not done[0].passed
    done, left_out = checks.run(torch.device("cpu"), checks.SMALL, time.monotonic() - 1)
    assert not done and "the time was over" in left_out[0]


# Played: a card with bfloat16, and an older one.
@pytest.mark.parametrize("new", [True, False])
def test_a_card_is_asked_for_what_it_has(new, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: new)
    names = [name for name, _ in checks.jobs(torch.device("cuda"), checks.LARGE)]
    assert names[0] == ("model bfloat16" if new else "model float16")
    assert any("bfloat16" in name for name in names) == new


# Cards from 16 GB on, by their data sheets' rates: each has a model and a length, within the time.
@pytest.mark.parametrize(
    "gib, tflops, preset",
    [(15, 65, "llama-3.2-1b"), (22, 121, "llama-3.2-3b"), (79, 989, "llama-3.1-8b")],
)
def test_every_card_has_a_step_that_fills_it(gib, tflops, preset, monkeypatch):
    flops = tflops * 1e12
    gpu = replace(
        gpu_row("h100"), peak_flops=0.6 * flops, attention_forward=0.4 * flops,
        attention_backward=0.3 * flops, bandwidth=3e11, link=1.2e10, measured=True,
    )  # fmt: skip
    monkeypatch.setattr(full_card, "gpu_free", lambda: gib * full_card.GiB)
    monkeypatch.setattr(full_card, "host_free", lambda: 50 * full_card.GiB)
    run = full_card.largest(gpu, torch.bfloat16, 240)
    assert run.preset == preset and run.tokens >= 8192
    memory = full_card.planned(run, full_card.Policy("host", tile=8192), gpu)
    assert memory["plan_s"] * full_card.STEPS * len(full_card.WAYS) < 240
    # Were nothing kept on the host, it would not fit: the step chooses, and fills what there is.
    whole = full_card.planned(run, "off", gpu)
    assert whole["plan_peak_gib"] > gib
    monkeypatch.setattr(full_card, "gpu_free", lambda: full_card.GiB // 8)
    assert full_card.largest(gpu, torch.bfloat16, 240) is None


def test_a_step_that_fails_keeps_what_was_measured(monkeypatch):
    cpu, gpu = torch.device("cpu"), gpu_row("h100")
    for step in full_card.measure(full_card.SMALL, cpu, gpu, time.monotonic() + 60):
        assert step["step_s"] > 0 and step["plan_s"] > 0 and "error" not in step
    with monkeypatch.context() as patch:
        patch.setattr(full_card, "policy_used", lambda model: 1 / 0)
        for step in full_card.measure(full_card.SMALL, cpu, gpu, time.monotonic() + 60):
            assert step["first_step_s"] > 0 and "ZeroDivisionError" in step["error"]
    late = full_card.measure(full_card.SMALL, cpu, None, time.monotonic() - 1)
    assert all("not started" in step["error"] and "step_s" not in step for step in late)


def test_the_readme_of_the_rows_explains_every_field(out):
    text = (ROOT / "profiles" / "prove" / "README.md").read_text()
    found = json.loads((out / "prove.json").read_text())
    fields = found.keys() | found["steps"][0].keys()
    assert "hfpatch prove" in text and "prove.json" in text
    assert not [name for name in fields - EXPLAINS_ITSELF if f"`{name}`" not in text]
