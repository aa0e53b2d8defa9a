"""The first three sentences of a report: the peak, its largest holder, the best change."""

from hfpatch.lab.profile.timeline import LASTING, NOWHERE, Run, generic, size

APPLY = {
    "loss": "the head and loss then run in tiles of tokens, and logits are never whole",
    "working set": "each layer then runs tile by tile",
    "activations": "a layer then keeps its input and attention output only, in host memory",
    "checkpoints": "layer inputs then wait in host memory",
}
# (category, the share of it that the change removes, the change). 8-bit states take a quarter of 4
# bytes, half a tile half of the memory per tile.
CHANGES = (
    (
        "checkpoints",
        1.0,
        '`Checkpointing(offload="host")`, which lets layer inputs wait in host memory',
    ),
    (
        "activations",
        1.0,
        '`Checkpointing(offload="host", save_attention=False)`, which keeps less of each layer',
    ),
    ("working set", 0.5, "a tile of half the size, `Checkpointing(tile=...)`"),
    (
        "loss",
        0.5,
        '`checkpointing="least"`, under which the loss holds the logits of fewer tokens at a time',
    ),
)
LASTING_CHANGES = (
    ("optimizer", 0.75, "8-bit optimizer states (`--placement gpu8bit`)"),
    ("gradients", 1.0, "gradients in host memory (`--placement zero3-offload`)"),
)


def focus(runs: list[Run]) -> Run:
    """The run that the report is about: the longest that finished, hfpatch's first; else any."""
    order = sorted(
        runs, key=lambda r: (r.error is None, r.seq_len, r.impl == "hfpatch", r.peak_bytes)
    )
    return order[-1]


def best_change(run: Run) -> tuple[str, int]:
    """(the change that lowers the peak most, the most bytes that it saves); ("", 0) without one.

    run.relief bounds the saving: the peak without a category is then at another moment.
    """
    split, changes = run.peak_split, []

    def add(category, part, text, relief):
        saved = min(part * split[category], run.peak_bytes - run.relief.get(relief, run.peak_bytes))
        changes.append((int(saved), text))

    if run.impl == "hfpatch":
        on_host = run.memory.get("host_peak_bytes") or run.memory.get("pinned_host_peak_bytes")
        for category, part, text in CHANGES:
            if not (on_host and "offload=" in text):  # layers already keep tensors there
                add(category, part, text, category)
    else:
        most = max(APPLY, key=lambda name: split[name])
        saved = min(
            sum(split[name] for name in APPLY),
            run.peak_bytes - run.relief.get("step", run.peak_bytes),
        )
        changes.append((int(saved), f"`hfpatch.apply(model)`: {APPLY[most]}"))
    for category, part, text in LASTING_CHANGES:
        add(category, part, text, category)
    saved, text = max(changes)
    return (text, saved) if saved > 0 else ("", 0)


def holder(run: Run) -> tuple[str, str, int]:
    """(module, phase, bytes): the module that holds most of the peak beyond LASTING categories, and
    the phase in which these blocks were born.
    """
    held: dict = {}
    for row in run.rows:
        if row["category"] not in LASTING and row["phase"] and row["module"] != NOWHERE:
            key = (generic(row["module"]) or "the model's own forward", row["phase"])
            held[key] = held.get(key, 0) + row["bytes"]
    if not held:
        return ("", run.peak_phase, 0)
    (module, phase), count = max(held.items(), key=lambda item: item[1])
    return module, phase, count


def sentences(runs: list[Run]) -> list[str]:
    """Three sentences for people; one with the error if nothing was recorded."""
    run = focus(runs)
    if not run.peak_bytes:
        return [f"Nothing was recorded: {run.error or 'no run finished'}."]
    label = "Simulated: " if run.source == "simulated" else ""
    others = [r for r in runs if r.seq_len == run.seq_len and r is not run and r.peak_bytes]
    beside = ", ".join(
        f"{r.impl} {'ran out of memory past' if r.error else ''} {size(r.peak_bytes)}".replace(
            "  ", " "
        )
        + (
            f", {r.peak_bytes / run.peak_bytes:.1f} times as much"
            if r.peak_bytes >= run.peak_bytes
            else ""
        )
        for r in others
    )
    first = f"{label}{run.impl} peaks at {size(run.peak_bytes)} with {run.seq_len:,} tokens" + (
        f" ({beside})" if beside else ""
    )
    if run.error:
        first += f"; it did not finish: {run.error}"
    module, phase, held = holder(run)
    lasting = sum(run.peak_split[c] for c in LASTING)
    second = (
        f"The peak comes in the {run.peak_phase or 'step'}: `{module}` holds {size(held)} of it, "
        f"born in the {phase}, "
        f"and parameters, gradients and optimizer states hold {size(lasting)}"
        if module
        else f"The peak comes in the {run.peak_phase or 'step'}, in parameters, gradients and optimizer states alone"
    )
    change, saved = best_change(run)
    third = (
        f"What would lower it most: {change}, at most {size(saved)} less"
        if change
        else "No single change that hfpatch knows would lower it; sharding over more GPUs would"
    )
    return [first + ".", second + ".", third + "."]
