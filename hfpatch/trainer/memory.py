"""Keeps the lessons of an out-of-memory error in the run's folder, for the run's next start.

No step runs again, because half a backward cannot be undone. The error gets a sentence with the
measured numbers and the setting to change, and the next start begins with the lessons.
"""

import json
import os
from pathlib import Path

import torch

from hfpatch.budget.choice import reserve
from hfpatch.layer.policies import rounded
from hfpatch.layer.runtime import LayerRuntime

FILE, GiB = "hfpatch_memory.json", 1 << 30
ALIKE = ("model", "card", "ranks", "dtype", "batch")  # a run takes entries that agree in these


def runtimes(model) -> list[LayerRuntime]:
    """The LayerRuntimes of a model, none for a stock one."""
    found = (vars(module).get("_hfpatch_runtime") for module in model.modules())
    return list({id(one): one for one in found if one is not None}.values())


def state(room: Room) -> dict:
    """The lessons of a memory budget, including those of a step that ran out just now."""
    most = room.most
    if room.step is not None and room.step[2] is not None:
        most = int(SHRINK * (room.step[2] + reserve(room.step[2])))
    return {"most": most, "over": room.over, "unused": room.unused}


def load(room: Room, learnt: dict) -> None:
    """Gives the budget the more careful of its own lessons and an earlier run's."""
    bounds = [n for n in (room.most, learnt["most"]) if n is not None]
    room.most = min(bounds, default=None)
    room.over, room.unused = max(room.over, learnt["over"]), max(room.unused, learnt["unused"])


def key(model, args, shape: tuple) -> dict:
    """The key of an entry. shape: (sequences, tokens) of the batch."""
    cuda = torch.device(args.device).type == "cuda"
    return {
        "model": getattr(getattr(model, "config", None), "_name_or_path", "")
        or type(model).__name__,
        "card": torch.cuda.get_device_name(args.device) if cuda else str(args.device),
        "batch": shape[0], "tokens": rounded(shape[1]), "ranks": args.world_size,
        "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "as loaded",
    }  # fmt: skip


def read(folder) -> list[dict]:
    """The entries of a run's folder; none if the file is missing or broken."""
    try:
        found = json.loads((Path(folder) / FILE).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def begin(model, args) -> None:
    """Gives the model's budgets the lessons of this run's earlier starts."""
    wanted = key(model, args, (args.per_device_train_batch_size, 1))
    for entry in read(args.output_dir):
        if any(entry.get(name) != wanted[name] for name in ALIKE):
            continue
        for runtime in runtimes(model):
            if (room := runtime.room_of(torch.device(args.device))) is not None:
                load(room, entry["learnt"])


def write(model, args, shape: tuple, learnt: dict) -> Path:
    """Writes an entry, in place of one with the same key. Returns the file's path."""
    path, own = Path(args.output_dir) / FILE, key(model, args, shape)
    entries = [e for e in read(args.output_dir) if {n: e.get(n) for n in own} != own]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([*entries, own | {"learnt": learnt}], indent=1))
    os.replace(fresh, path)
    return path


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def explain(model, args, shape: tuple, error: BaseException) -> None:
    """Writes the lessons of a step that ran out of memory, and adds a sentence to the error.

    The error keeps its text first, in its only argument, by which other code recognizes it.
    """
    rooms = [room for one in runtimes(model) for room in one.rooms.values() if room and room.alone]
    room = next((r for r in rooms if r.step is not None and r.step[2] is not None), None)
    if room is None:
        return
    learnt, planned = state(room), room.step[2]
    path = write(model, args, shape, learnt)
    set_ = any(
        "expandable_segments:True" in os.environ.get(name, "")
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )
    advice = (
        'pass checkpointing="least" to hfpatch.apply'
        if set_
        else "set PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    sentence = (
        f"hfpatch: expected the layers of {shape[0]} x {shape[1]:,} tokens to take "
        f"{planned / GiB:.1f} GiB beside {room.step[0] / GiB:.1f} GiB that were there, the peak was "
        f"{room.gauge.peak() / GiB:.1f} GiB with {learnt['unused'] / GiB:.1f} GiB held and unused; "
        f"start again, which begins with at most {learnt['most'] / GiB:.1f} GiB for them "
        f"({path}), or {advice}."
    )
    error.args = (f"{error}\n{sentence}",)
