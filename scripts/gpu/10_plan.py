"""The plan beside what was measured: peak GPU, peak host and seconds of every run that the other
entries wrote down.

    python scripts/gpu/10_plan.py --results profiles/ --out profiles/plan-measured

Needs no GPU: it reads the CSVs.
"""

import csv
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.formula import ModelShape
from hfpatch.budget.hardware import gpu_named, gpu_row
from hfpatch.budget.policy import Policy
from hfpatch.lab.first_step import first_step
from hfpatch.lab.presets import preset_config
from hfpatch.lab.stock import flops_of, memory_of
from hfpatch.planner.placements import resident
from hfpatch.planner.seconds import run_time

WORDS = """
Every row of the other entries with a step of Llama-3.1-8B's shape, or of the preset it names: what
the closed form says for that length, depth and policy, and what was measured. The seconds take the
GPU's row of the table that `hfpatch plan --gpu` uses, not rates measured in the run; where the step
was its process's first they have a first step's own too. Within 3% of the peak on the GPU, 5% of
pinned host memory, 15% of the seconds counts as right.
"""
TOLERANCE = {"gpu": 0.03, "host": 0.05, "seconds": 0.15}
SOURCES = (
    "03_models",
    "05_step_128k",
    "07_short_steps",
    "08_longest_*",
    "09_*",
    "12_tiles",
    "13_qlora",
)


def policy_from(text: str) -> Policy | None:
    """The Policy that step.policy_of wrote, or None."""
    pattern = r"(\w+) every=(\d+) save=(\d)(?: again=(\d+))?(?: wide=(\d))?"
    pattern += r" tile=(\d+)(?: plain=(\d+) keep=([\w,]*))?"
    found = re.fullmatch(pattern, text or "")
    if not found:
        return None
    offload, every, save, again, wide, tile, plain, keep = found.groups()
    kept = {"plain": int(plain or 0), "keep": tuple(filter(None, (keep or "").split(",")))}
    kept |= {"again": int(again or 0), "wide": wide == "1"}
    return Policy(offload, int(every), save == "1", int(tile), **kept)


def planned(row: dict, gpu) -> dict | None:
    """Bytes on the GPU and the host, and seconds, that the closed form gives for a row; None where
    it has none.
    """
    policy = policy_from(row.get("policy"))
    if policy is None and row.get("impl") != "stock":
        return None
    policy = policy or "stock-checkpointing"
    layers = int(row.get("run") or row["layers"])
    shape = ModelShape.from_config(
        preset_config(row.get("preset") or "llama-3.1-8b") | {"num_hidden_layers": layers}
    )
    if row.get("rank"):  # adapters over a frozen base
        shape = replace(shape, adapters=Adapters(int(row["rank"]), row["base"]))
    tokens = int(row["tokens"])
    sizes = {"batch": 1, "tokens": tokens}
    memory = memory_of(shape, policy, **sizes)
    # bf16 parameters (adapters and their base), the step's own gradients, and no optimizer where
    # the row names no placement.
    stays = resident(row.get("placement") or "adamw", shape, 1, policy)
    stays = stays if row.get("placement") else replace(stays, optimizer=0)
    gradients = (lambda m: m.gradients) if stays.gradients is None else (lambda m: stays.gradients)
    peak = stays.parameters + stays.optimizer + max(gradients(m) + m.beyond for m in memory.moments)
    time, _ = run_time(gpu, flops_of(shape, policy, **sizes), memory, policy, shape, stays, **sizes)
    # A length that takes minutes is timed without a warm-up: what a first step takes beside a
    # step's own is in it.
    cold = row.get("first_step_s") and row["first_step_s"] == row.get("step_s")
    more = sum(first_step(gpu, memory, policy, shape, tokens=tokens).values()) if cold else 0.0
    # which no such row ran
    step = time.total if row.get("placement") else time.total - time.optimizer
    return {"gpu": peak, "host": memory.host, "seconds": step + more}


def measured(row: dict) -> dict:
    """The same figures as the entry measured them; None where it did not."""

    def number(*names, scale=1.0):
        return next((float(row[n]) * scale for n in names if row.get(n) not in (None, "")), None)

    return {
        "gpu": number("peak_gib", "peak_gpu_gib", scale=common.GiB),
        "host": number("pinned_gib", scale=common.GiB),
        "seconds": number("step_s"),
    }


def main(argv=None) -> int:
    made = common.parser("10_plan", __doc__)
    made.add_argument(
        "--results",
        nargs="+",
        default=[str(common.ROOT / "profiles")],
        help="folders with the CSVs",
    )
    made.add_argument(
        "--gpu", help="a row of the planner's table; found by the rows' device without it"
    )
    args = common.parse(made, argv, needs_gpu=False)
    sheet = common.Sheet(args)
    files = sorted(
        {
            f
            for folder in args.results
            for name in SOURCES
            for f in Path(folder).rglob(f"{name}.csv")
        }
    )
    for file in files:
        for row in csv.DictReader(file.open(encoding="utf-8")):
            if not row.get("step_s"):
                continue
            gpu = gpu_row(args.gpu) if args.gpu else gpu_named(row["device"])
            if gpu is None:
                sheet.skip(
                    f"{file.name} {row.get('impl')} {row['tokens']}",
                    f"no row of the plan for {row['device']}",
                )
                continue
            expected = planned(row, gpu)
            if expected is None:
                continue
            found, values, right = measured(row), {}, True
            for key, tolerance in TOLERANCE.items():
                unit = 1.0 if key == "seconds" else common.GiB
                values[f"{key}_planned"] = expected[key] / unit
                if found[key]:
                    off = expected[key] / found[key] - 1
                    values |= {f"{key}_measured": found[key] / unit, f"{key}_off": off}
                    right &= abs(off) <= tolerance
            sheet.add(
                entry=file.stem, impl=row.get("impl"), tokens=int(row["tokens"]),
                policy=row.get("policy"),
                layers=row.get("run") or row["layers"], **values, right=right,
                measured_at=row["commit"], measured_on=row["device"],
            )  # fmt: skip
    if not sheet.rows:
        sheet.skip("everything", f"no measured step in {', '.join(args.results)}")

    def draw(axes):
        for axis, key in zip(axes, TOLERANCE):
            points = [
                (r[f"{key}_measured"], r[f"{key}_planned"])
                for r in sheet.rows
                if f"{key}_measured" in r
            ]
            if points:
                axis.scatter(*zip(*points), s=12)
                top = 1.05 * max(max(p) for p in points)
                axis.plot([0, top], [0, top], color="gray", linewidth=0.8)
            axis.set(title=key, xlabel="measured", ylabel="planned")

    right = sum(r["right"] for r in sheet.rows)
    sheet.page(
        f"The plan, measured: {right} of {len(sheet.rows)} rows right",
        WORDS,
        picture=sheet.picture(draw, wide=3),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
