"""`hfpatch prove`: is hfpatch right on this machine, and as planned? A page, and a row to send."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hfpatch.budget.limits import GiB
from hfpatch.lab import checks, full_card
from hfpatch.lab.device import one_line
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.profile.timeline import versions
from hfpatch.lab.tables import markdown

PAGE = "prove.md"
ROW = "prove.json"


@dataclass
class Proof:
    """The results. done: comparisons with float64. left_out: one line for each part that did not
    run. steps: the rows of full_card.
    """

    device: dict
    versions: dict
    small: bool
    done: list[checks.Check] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    rates: dict = field(default_factory=dict)
    steps: list[dict] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[checks.Check]:
        return [check for check in self.done if not check.passed]

    @property
    def ok(self) -> bool:
        """Whether the gradients of a model were compared, and nothing failed."""
        return bool(self.done) and not self.failed and not any("error" in s for s in self.steps)

    @property
    def verdict(self) -> str:
        if not self.done:
            return "NOT SHOWN: no model's gradients were compared"
        return "all is well" if self.ok else "SOMETHING IS WRONG"


def prove(
    device: torch.device,
    *,
    small: bool,
    seconds: float,
    rates: Callable[[torch.dtype], Gpu] | None,
    say: Callable[[str], None] = print,
) -> Proof:
    """Runs all checks and measurements.

    Args:
        device: the device to check.
        small: tiny sizes, which only try the code path.
        seconds: about the time that all of it may take.
        rates: measures this card's rates in a dtype, for the plan of the step; None without a card.
        say: called with a line as each part begins.

    Returns:
        The Proof. `row` makes the JSON to send of it, `page` the text to read.
    """
    began = time.monotonic()
    proof = Proof(*_facts(device), small)
    say("patched models against float64 on the CPU")
    sizes = checks.SMALL if small else checks.LARGE
    # No check begins after 0.4 of the time. The steps take about 0.45 of it, and
    # none begins after 0.95.
    proof.done, proof.left_out = checks.run(device, sizes, began + 0.4 * seconds)
    dtype = checks.dtypes(device)[0]
    gpu = _rates(proof, dtype, rates)
    run = full_card.SMALL if small else gpu and full_card.largest(gpu, dtype, 0.45 * seconds)
    if run is None:
        proof.left_out.append("the step: no model of its list fits this card and the time")
    else:
        say(f"steps of {run.preset} over {run.tokens:,} tokens")
        proof.steps = full_card.measure(run, device, gpu, began + 0.95 * seconds)
    proof.seconds = time.monotonic() - began
    return proof


def _facts(device: torch.device) -> tuple[dict, dict]:
    """The device, and the versions that the figures depend on."""
    found = versions(("torch", "triton", "transformers"))
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    installed = {name: value for name, value in found.items() if value is not None}
    if device.type != "cuda":
        return {"name": "cpu"}, installed
    card = torch.cuda.get_device_properties(device)
    return {
        "name": card.name,
        "memory_gib": round(card.total_memory / GiB, 1),
        "capability": f"{card.major}.{card.minor}",
    }, installed


def _rates(proof: Proof, dtype, rates) -> Gpu | None:
    """Fills the proof's rates. Returns the card's rates for a plan, None if they cannot be
    measured.
    """
    if rates is None:
        return None
    try:
        gpu = rates(dtype)
    except (RuntimeError, ValueError) as error:
        proof.left_out.append(f"this machine's rates: {one_line(error)}")
        return None
    proof.rates = {name: getattr(gpu, key) / unit for name, (key, unit, _) in RATES.items()}
    return gpu


# What is sent of a card's rates: the field of Gpu, its unit, and the words of the page.
RATES = {
    "copy_gb_s": ("bandwidth", 1e9, "copies on the device: {:,.0f} GB/s, read and written"),
    "matmul_tflop_s": ("peak_flops", 1e12, "a large matmul: {:,.1f} TFLOP/s"),
    "from_host_gb_s": ("link", 1e9, "from pinned host memory: {:,.1f} GB/s"),
}


# --- what is sent ---------------------------------------------------------------------------------


def row(proof: Proof) -> dict:
    """A few KB for JSON: device, versions and figures, without paths and names of users or
    machines.
    """
    steps = [_rounded(step) for step in proof.steps]
    for step in steps:
        if "error" in step:  # its words may hold a path
            step["error"] = step["error"].split(":")[0]
    return {
        "hfpatch_prove": 1,  # the format
        "small": proof.small,
        "ok": proof.ok,
        "device": proof.device,
        "versions": proof.versions,
        "checks": len(proof.done),
        "worst_share": _number(max((c.share for c in proof.done), default=None)),
        "failed": [_failed(check) for check in proof.failed[:10]],
        "left_out": len(proof.left_out),
        "rates": _rounded(proof.rates),
        "steps": steps,
        "seconds": _number(proof.seconds),
    }


def _failed(check: checks.Check) -> dict:
    where = check.where
    if math.isinf(check.share):  # an error, whose words may hold a path
        where = where.split(":")[0]
    found = {"what": check.what, "dtype": check.dtype, "tokens": check.tokens}
    return found | {"where": where, "share": _number(check.share)}


def _number(value: float | None) -> float | None:
    """The value with four digits; None for infinity and NaN, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def _rounded(values: dict) -> dict:
    return {name: _number(v) if isinstance(v, float) else v for name, v in values.items()}


# --- what is read ---------------------------------------------------------------------------------

CHECKS = (
    "comparisons pass. Each takes every output and every gradient: an error may be twice what plain "
    "PyTorch makes in the same dtype, plus one rounding step. The share is of that; above 1 it "
    "fails. So does an error of exactly zero in half precision, and a reference of zeros: a device "
    "that computes nothing gives them."
)
STEP_WORDS = """\
One forward and backward of one row, random weights and tokens, no optimizer. `auto` is what a user
gets; `host` keeps what every layer needs in host memory. The plan is what hfpatch computes without
running, from rates measured on this card and from what the step chose to keep.
"""
COLUMNS = (
    ("way", "layers keep"),
    ("step_s", "seconds"),
    ("plan_s", "plan, s"),
    ("peak_gib", "peak GiB"),
    ("plan_peak_gib", "plan, GiB"),
    ("filled", "of the card"),
    ("pinned_gib", "pinned GiB"),
    ("plan_host_gib", "plan, pinned GiB"),
    ("kept", "what was chosen"),
    ("error", "error"),
)


def page(proof: Proof) -> str:
    """The whole proof in Markdown."""
    facts = proof.device | proof.versions
    passed = len(proof.done) - len(proof.failed)
    parts = [f"# hfpatch on {proof.device['name']}: {proof.verdict}"]
    if proof.small:
        parts.append("Small sizes: the path was tried. No figure here says how fast a machine is.")
    parts += [
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        f"## Against float64\n\n{passed} of {len(proof.done)} {CHECKS}",
        _checks(proof),
    ]
    if proof.rates:
        parts.append("## What this machine can do")
        parts += [f"- {RATES[name][2].format(value)}" for name, value in proof.rates.items()]
    if proof.steps:
        one = proof.steps[0]
        steps = [_rounded(step) for step in proof.steps]
        titles = {key: title for key, title in COLUMNS if any(key in step for step in steps)}
        cells = [[step.get(key, "") for key in titles] for step in steps]
        parts += [
            f"## A step of {one['preset']} over {one['tokens']:,} tokens, {one['dtype']}",
            STEP_WORDS,
            markdown(cells, list(titles.values())),
        ]
    if proof.left_out:
        parts += ["## Left out", *(f"- {line}" for line in proof.left_out)]
    return "\n\n".join(parts) + "\n"


def _checks(proof: Proof) -> str:
    """For each way and dtype, the worst share of the allowed error; what fails comes first."""
    worst: dict = {}
    for check in sorted(proof.done, key=lambda check: (not check.passed, check.share)):
        worst[check.what, check.dtype] = check
    rows = sorted(worst.values(), key=lambda check: check.passed)
    titles = ["what", "dtype", "tokens", "worst share", "of"]
    return markdown([[c.what, c.dtype, c.tokens, f"{c.share:.3g}", c.where] for c in rows], titles)
