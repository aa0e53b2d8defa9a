"""Keeps what a run's steps showed in the run's folder and its checkpoints, for the next start.

After an out-of-memory error no step runs again, because half a backward cannot be undone. The error
gets a sentence with the measured numbers and the setting to change, and the next start keeps less.
"""

import json
import os
from itertools import chain
from pathlib import Path

import torch

from hfpatch.budget.free import ALLOCATOR, GROWS, expandable_segments
from hfpatch.budget.limits import gib
from hfpatch.budget.policy import TILES
from hfpatch.layer.meter import Meter
from hfpatch.layer.traits import runtimes_in
from hfpatch.report import say

FILE = "hfpatch_memory.json"


def meters(model) -> list[Meter]:
    """What is measured of a model, on each of its devices."""
    found = chain.from_iterable(runtime.meters.values() for runtime in runtimes_in(model))
    return [meter for meter in found if meter is not None]


def key(model, args) -> dict:
    """The key of an entry: what was measured holds for this model on this card, and for the
    parameters that train (Meter.sizes)."""
    cuda = torch.device(args.device).type == "cuda"
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return {
        "format": 2,
        "model": name or type(model).__name__,
        "card": torch.cuda.get_device_name(args.device) if cuda else str(args.device),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "ranks": args.world_size,
        "autocast": f"bf16 {args.bf16}, fp16 {args.fp16}",
    }  # fmt: skip


def _shows(meter: Meter) -> bool:
    """Whether a step was measured. A key is there as its first step begins."""
    return any(sizes.measured for sizes in meter.sizes.values())


def read(folder) -> list[dict]:
    """The entries of a run's folder; none without a folder, or if the file is missing or broken."""
    try:
        found = json.loads((Path(folder) / FILE).read_text())
    except (OSError, TypeError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _is_of(entry: dict, own: dict) -> bool:
    """Whether an entry has this key."""
    return all(entry.get(name) == value for name, value in own.items())


def begin(model, args) -> None:
    """Gives the model's meters what this run's earlier starts measured, or else the run whose
    checkpoint it continues."""
    own = key(model, args)
    meters_here = [runtime.meter_of(torch.device(args.device)) for runtime in runtimes_in(model)]
    used = None
    for folder in (args.output_dir, args.resume_from_checkpoint):
        for entry in read(folder):
            if not _is_of(entry, own):
                continue
            for meter in meters_here:
                if meter is not None and not _shows(meter):
                    meter.load(entry["measured"])
                    used = Path(folder) / FILE
    if used:
        say(f"layers start from the memory that an earlier run measured ({used}).")


def write(model, args, folder=None) -> Path | None:
    """Writes an entry, in place of one with the same key. Returns the file's path, None if nothing
    was measured.

    folder: the run's, if None.
    """
    found = next(
        (
            m
            for m in meters(model)  # a tower's has no step of its own
            if m.step is not None and (_shows(m) or m.reserve or m.tile_most < TILES[-1])
        ),
        None,
    )
    if found is None:
        return None
    path = Path(folder or args.output_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    own = key(model, args)
    others = [entry for entry in read(path.parent) if not _is_of(entry, own)]
    fresh = path.with_suffix(f".{os.getpid()}")  # all ranks may run out at once
    fresh.write_text(json.dumps([*others, own | {"measured": found.state()}], indent=1))
    os.replace(fresh, path)
    return path


def explain(model, args, shape: tuple, error: BaseException) -> None:
    """Writes what was measured up to a step that ran out of memory, and adds a sentence to the
    error. Memory that ran out elsewhere, in a generation or in another model, is not ours to explain.

    The error keeps its text first, in its only argument, by which other code recognizes it.
    """
    meter = next((m for m in meters(model) if m.step is not None and not m.step.over), None)
    if meter is None:
        return
    step = meter.step
    peak = meter.gauge.read().peak
    meter.keep_less(step, ran_out=True)
    path = write(model, args)
    advice = f"Or set {ALLOCATOR[0]}={GROWS}"
    if expandable_segments():
        advice = 'Or pass checkpointing="least" to hfpatch.apply'
    sentence = (
        f"hfpatch: out of memory in a step of {shape[0]} x {shape[1]:,} tokens: "
        f"{gib(step.base.allocated)} in use before it, a peak of {gib(peak)} of {gib(step.limit)}, "
        f"{sum(step.kept_all)} layers not checkpointed. Start again: the next start keeps less "
        f"({path}). {advice}."
    )
    error.args = (f"{error}\n{sentence}",)
