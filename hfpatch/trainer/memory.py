"""Keeps what a run's steps showed in the run's folder and its checkpoints, for the next start.

After an out-of-memory error no step runs again, because half a backward cannot be undone. The error
gets a sentence with the measured numbers and the setting to change, and the next start keeps less.
"""

import json
import os
from pathlib import Path

import torch

from hfpatch.budget.free import ALLOCATOR, GROWS, expandable_segments
from hfpatch.lab.tables import gib
from hfpatch.layer.meter import Meter
from hfpatch.layer.traits import runtimes_in
from hfpatch.report import say

FILE = "hfpatch_memory.json"


def meters(model) -> list[Meter]:
    """What is measured of a model, on each of its devices."""
    return [
        meter for one in runtimes_in(model) for meter in one.meters.values() if meter is not None
    ]


def key(model, args) -> dict:
    """The key of an entry: what was measured holds for this model on this card, and for the
    parameters that train (Meter.calls)."""
    cuda = torch.device(args.device).type == "cuda"
    return {
        "model": getattr(getattr(model, "config", None), "_name_or_path", "")
        or type(model).__name__,
        "card": torch.cuda.get_device_name(args.device) if cuda else str(args.device),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "ranks": args.world_size,
        "autocast": f"bf16 {args.bf16}, fp16 {args.fp16}",
    }  # fmt: skip


def read(folder) -> list[dict]:
    """The entries of a run's folder; none without a folder, or if the file is missing or broken."""
    try:
        found = json.loads((Path(folder) / FILE).read_text())
    except (OSError, TypeError, ValueError):
        return []
    return found if isinstance(found, list) else []


def begin(model, args) -> None:
    """Gives the model's meters what this run's earlier starts measured, or else the run whose
    checkpoint it continues."""
    wanted, used = key(model, args), None
    for folder in (args.output_dir, args.resume_from_checkpoint):
        for entry in read(folder):
            if any(entry.get(name) != value for name, value in wanted.items()):
                continue
            for runtime in runtimes_in(model):
                meter = runtime.meter_of(torch.device(args.device))
                if meter is not None and not meter.calls:
                    meter.load(entry["measured"])
                    used = Path(folder) / FILE
    if used:
        say(f"layers start with what an earlier run measured that fits ({used}).")


def write(model, args, folder=None) -> Path | None:
    """Writes an entry, in place of one with the same key. Returns the file's path, None if nothing
    was measured.

    folder: the run's, if None.
    """
    found = next((meter for meter in meters(model) if meter.calls or meter.reserve), None)
    if found is None:
        return None
    path, own = Path(folder or args.output_dir) / FILE, key(model, args)
    entries = [e for e in read(path.parent) if {n: e.get(n) for n in own} != own]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([*entries, own | {"measured": found.state()}], indent=1))
    os.replace(fresh, path)
    return path


def explain(model, args, shape: tuple, error: BaseException) -> None:
    """Writes what was measured up to a step that ran out of memory, and adds a sentence to the
    error.

    The error keeps its text first, in its only argument, by which other code recognizes it.
    """
    meter = next((m for m in meters(model) if m.step is not None), None)
    if meter is None:
        return
    kept, before = sum(meter.step.ran), meter.step.base.allocated
    peak, limit = meter.gauge.read().peak, meter.step.limit
    meter.keep_less(meter.step, ran_out=True)
    path = write(model, args)
    advice = (
        'Or pass checkpointing="least" to hfpatch.apply'
        if expandable_segments()
        else f"Or set {ALLOCATOR[0]}={GROWS}"
    )
    sentence = (
        f"hfpatch: out of memory in a step of {shape[0]} x {shape[1]:,} tokens: {gib(before)} in "
        f"use before it, a peak of {gib(peak)} of {gib(limit)}, {kept} "
        f"layers not checkpointed. Start again: the next start keeps less ({path}). {advice}."
    )
    error.args = (f"{error}\n{sentence}",)
