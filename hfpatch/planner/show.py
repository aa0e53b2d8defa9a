"""A plan as text. Standard library only."""

import math

from hfpatch.budget.measured import HOST_SHARE
from hfpatch.lab.hardware import SECONDS_ERROR, GiB
from hfpatch.lab.tables import gib, table
from hfpatch.planner.placements import PLACEMENTS

# Names of the parts of GPU memory in the lines of a plan.
NAMES = {"slack": "slack (lost between blocks)"}


def span(seconds: float) -> str:
    """The range of a planned step's seconds as text: "1.2 to 1.5"."""
    digits = 2 if seconds < 1 else 1
    low = (1 - SECONDS_ERROR) * seconds
    return f"{low:.{digits}f} to {(1 + SECONDS_ERROR) * seconds:.{digits}f}"


def text(plan) -> str:
    """The whole answer, a screen long."""
    lines = _answer(plan)
    if plan.first_step:
        lines.insert(-3, _first_step(plan))
    if longer := beyond_positions(plan.seq_len, plan.positions):
        lines.append(f"positions       {longer}")
    if plan.faster:
        name = plan.faster["placement"]
        seconds = plan.faster["step_seconds"]
        lines.append(
            f"faster          {seconds:.1f} s ({span(seconds)}) with --placement {name}: "
            f"{PLACEMENTS[name].summary}"
        )
    if plan.max_seq_len is not None:
        needed = _machine(plan.max_seq_len_host_bytes)
        lines.append(f"longest         {plan.max_seq_len:,} tokens fit, with {needed} GiB of RAM")
    if not plan.fits:
        lines += ["", _what_would_fit(plan)]
    return "\n".join(lines)


def _machine(used: int) -> int:
    """GiB of a machine's memory of which a run may use these bytes."""
    return math.ceil(round(used / HOST_SHARE / GiB, 3))


def _answer(plan) -> list[str]:
    """Whether it fits, bytes, seconds, and why the policy is what it is."""
    needed = _machine(plan.host_peak_bytes)
    verdict = f"fits, with {needed} GiB of RAM" if plan.fits else "does NOT fit"
    of = gib(plan.host_usable_bytes)
    if plan.host_assumed:
        of += f", of {_machine(plan.host_usable_bytes)} GiB assumed (yours: --host-ram)"
    times = "" if plan.gpus == 1 else f"{plan.gpus} x "
    lora = plan.adapters
    trained = "" if lora is None else f", LoRA r={lora['rank']} over a {lora['base']} base"
    shared = "" if plan.sp_size == 1 else f", {plan.sp_size} GPUs a sequence"
    seen = f" ({plan.visual_tokens:,} of them visual)" if plan.visual_tokens else ""
    return [
        f"{plan.model}{trained}, {plan.batch} x {plan.seq_len:,} tokens{seen} on {times}{plan.gpu} "
        f"({plan.placement}{shared}): "
        f"{verdict}",
        "",
        table(
            [(NAMES.get(name, name), gib(n)) for name, n in plan.gpu_bytes.items()]
            + [
                ("peak on the GPU", gib(plan.gpu_peak_bytes)),
                ("usable", gib(plan.gpu_usable_bytes)),
            ],
            ("GPU memory", ""),
        ),
        "  the peak is at " + plan.moment.removesuffix(" in "),
        f"host memory     {gib(plan.host_peak_bytes)} of {of}",
        f"step            {plan.step_seconds:.1f} s ({span(plan.step_seconds)}): "
        + ", ".join(
            f"{name.replace('_', ' ')} {s:.1f}" for name, s in plan.seconds.items() if s >= 0.05
        ),
        f"tokens/s        {plan.tokens_per_second:,.0f}   MFU {plan.mfu:.0%}   {plan.flops:.3g} "
        "FLOPs   "
        f"{gib(plan.link_bytes)} over the host link",
        f"policy          {plan.keeps}",
        f"why             {plan.why}",
        f"rates           {plan.rates}",
    ]


def _first_step(plan) -> str:
    beside = ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in plan.first_step.items())
    more = sum(plan.first_step.values())
    return f"first step      {plan.step_seconds + more:.1f} s: a step, {beside}"


def _what_would_fit(plan) -> str:
    if not plan.suggestions:
        return "no single change makes it fit"
    rows = [
        (s["change"], s["cost"], gib(s["gpu_peak_bytes"]), gib(s["host_peak_bytes"]))
        for s in plan.suggestions
    ]
    return table(rows, ("what would fit", "cost", "GPU", "host"))


def beyond_positions(tokens: int, positions: int | None) -> str:
    """What to do about a sequence longer than the model's positions; "" for another."""
    if positions is None or tokens <= positions:
        return ""
    scaling = f'{{"rope_type": "yarn", "factor": {math.ceil(tokens / positions)}.0, ...}}'
    return (
        f"the model has {positions:,} positions and the sequence {tokens:,} tokens. Load it with "
        f"rope_parameters={scaling} (guide: A longer context), or shorten the sequence."
    )
