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
    if longer := beyond_positions(plan.run.seq_len, plan.run.positions):
        lines.append(f"positions       {longer}")
    if faster := plan.advice.faster:
        name = faster["placement"]
        seconds = faster["step_seconds"]
        lines.append(
            f"faster          {seconds:.1f} s ({span(seconds)}) with --placement {name}: "
            f"{PLACEMENTS[name].summary}"
        )
    if (tokens := plan.advice.max_seq_len) is not None:
        needed = _machine(plan.advice.max_seq_len_host_bytes)
        lines.append(f"longest         {tokens:,} tokens fit, with {needed} GiB of RAM")
    if not plan.fits:
        lines += ["", _what_would_fit(plan.advice.suggestions)]
    return "\n".join(lines)


def _machine(used: int) -> int:
    """GiB of a machine's memory of which a run may use these bytes."""
    return math.ceil(round(used / HOST_SHARE / GiB, 3))


def _answer(plan) -> list[str]:
    """Whether it fits, bytes, seconds, and why the policy is what it is."""
    run = plan.run
    time = plan.time
    verdict = (
        f"fits, with {_machine(plan.host.peak_bytes)} GiB of RAM" if plan.fits else "does NOT fit"
    )
    of = gib(plan.host.usable_bytes)
    if plan.host.assumed:
        of += f", of {_machine(plan.host.usable_bytes)} GiB assumed (yours: --host-ram)"
    times = "" if run.gpus == 1 else f"{run.gpus} x "
    lora = run.adapters
    trained = "" if lora is None else f", LoRA r={lora['rank']} over a {lora['base']} base"
    shared = "" if run.sp_size == 1 else f", {run.sp_size} GPUs a sequence"
    seen = f" ({run.visual_tokens:,} of them visual)" if run.visual_tokens else ""
    sizes = plan.gpu.parts | {
        "peak on the GPU": plan.gpu.peak_bytes, "usable": plan.gpu.usable_bytes,
    }  # fmt: skip
    return [
        f"{run.model}{trained}, {run.batch} x {run.seq_len:,} tokens{seen} on {times}{run.gpu} "
        f"({run.placement}{shared}): "
        f"{verdict}",
        "",
        table([(NAMES.get(name, name), gib(n)) for name, n in sizes.items()], ("GPU memory", "")),
        "  the peak is at " + plan.gpu.moment.removesuffix(" in "),
        f"host memory     {gib(plan.host.peak_bytes)} of {of}",
        f"step            {time.step_seconds:.1f} s ({span(time.step_seconds)}): "
        + _by_part({name: s for name, s in time.parts.items() if s >= 0.05}),
        f"tokens/s        {time.tokens_per_second:,.0f}   MFU {time.mfu:.0%}   {time.flops:.3g} "
        "FLOPs   "
        f"{gib(plan.host.link_bytes)} over the host link",
        f"first step      {time.step_seconds + sum(time.first_step.values()):.1f} s: a step, "
        + _by_part(time.first_step),
        f"policy          {plan.advice.keeps}",
        f"why             {plan.advice.why}",
        f"rates           {time.rates}",
    ]


def _by_part(seconds: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items())


def _what_would_fit(suggestions: list) -> str:
    if not suggestions:
        return "no single change makes it fit"
    rows = [
        (s["change"], s["cost"], gib(s["gpu_peak_bytes"]), gib(s["host_peak_bytes"]))
        for s in suggestions
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
