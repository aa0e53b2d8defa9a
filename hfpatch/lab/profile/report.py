"""report.md from a list of Runs: two sentences, then tables."""

from collections import Counter

from hfpatch.lab import tables
from hfpatch.lab.profile.advice import sentences
from hfpatch.lab.profile.timeline import CATEGORIES, MEANING, Run, generic, held
from hfpatch.lab.tables import size


def columns(runs: list[Run]) -> list[str]:
    """One heading per run. It marks simulated runs, and runs that did not finish."""
    simulated = {"simulated": " (simulated)"}
    return [
        r.impl + simulated.get(r.source, "") + (" (did not finish)" if r.error else "")
        for r in runs
    ]


def by_length(runs: list[Run]) -> dict:
    lengths: dict = {}
    for run in runs:
        lengths.setdefault(run.seq_len, []).append(run)
    return dict(sorted(lengths.items()))


def category_table(runs):
    """Rows (name, [text per run]): each category at each run's own peak, then the peak."""
    rows = [
        (name, [size(r.peak_split[name]) for r in runs])
        for name in CATEGORIES
        if any(r.peak_split[name] for r in runs)
    ]
    return rows + [("**peak**", [f"**{size(r.peak_bytes)}**" for r in runs])]


def module_table(runs):
    """Rows (module, [text per run]) of memory beyond LASTING categories, the largest first."""
    found = [Counter() for _ in runs]
    for run, mine in zip(runs, found):
        for (module, _), count in held(run).items():
            mine[module] += count
    names = dict.fromkeys(name for mine in found for name in mine)
    largest = sorted(names, key=lambda name: -max(mine[name] for mine in found))[:12]
    return [
        (f"`{name}`" if name[0] != "(" else name, [size(mine[name]) for mine in found])
        for name in largest
    ]


FIGURES = {
    "allocated_peak_bytes": "allocated, peak",
    "reserved_peak_bytes": "reserved, peak",
    "fragmentation_bytes": "fragmentation (reserved, not allocated)",
    "pinned_host_peak_bytes": "pinned host memory, peak",
    "host_peak_bytes": "host memory of the followed step, peak",
    "process_peak_bytes": "process memory, peak",
}


def figure_table(runs):
    """Rows (figure, [text per run]): speed, the allocator's counts, host memory."""
    took = [run.seconds for run in runs]
    speed = [f"{r.seq_len * r.batch / s:,.0f}" if s else "" for r, s in zip(runs, took)]
    rows = [
        ("seconds a step (median)", [tables.seconds(s) for s in took]),
        ("tokens a second", speed),
    ]
    for key, name in FIGURES.items():
        rows.append((name, [size(r.memory[key]) if key in r.memory else "" for r in runs]))
    return [row for row in rows if any(row[1])]


def top_table(run) -> str:
    """The largest blocks alive at the peak."""
    head = ("bytes", "blocks", "category", "module", "phase", "operator")
    rows = [
        (size(r["bytes"]), r["count"], r["category"], generic(r["module"]), r["phase"], r["op"])
        for r in run.rows[:10]
    ]
    return tables.markdown(rows, head) if rows else "Nothing was recorded."


def facts(runs, command, commit) -> list[str]:
    """How it was made: command, versions, device, setup, one line each."""
    first = runs[0]
    versions = ", ".join(f"{k} {v}" for k, v in first.versions.items())
    setup = ", ".join(
        f"{k} {v}"
        for k, v in first.setup.items()
        if k not in ("gradient_checkpointing", "checkpointing")
    )
    where = "owners of memory by the step on fake tensors; figures measured on " + first.device
    if first.source == "simulated":
        where = "simulated on fake tensors, no kernel ran"
    for impl, values in {r.impl: r.setup for r in runs}.items():
        if values.get("checkpointing"):
            setup += f"; {impl} with {', '.join(values['checkpointing'])}"
        elif impl != "hfpatch" and values.get("gradient_checkpointing") is not None:
            way = "with" if values["gradient_checkpointing"] else "without"
            setup += f"; {impl} {way} gradient checkpointing"
    return [
        f"Command: `{command}`",
        f"Versions: {versions}" + (f"; commit {commit}" if commit else ""),
        f"Runs: {where}; {setup}",
    ]


def files(runs) -> list[str]:
    """Snapshots of the allocator, with their size and what opens them."""
    return [
        f"`{run.memory['snapshot_file']}` ({size(run.memory['snapshot_file_bytes'])}, one step): "
        "open it at https://docs.pytorch.org/memory_viz"
        for run in runs
        if "snapshot_file" in run.memory
    ]


def markdown(runs: list[Run], *, command: str = "", commit: str = "", notes=()) -> str:
    """The whole report.md."""
    simulated = " (simulated)" if all(r.source == "simulated" for r in runs) else ""
    parts = [
        f"# Memory profile of {runs[0].setup.get('model', 'a model')}{simulated}",
        " ".join(sentences(runs)),
        _list([*facts(runs, command, commit), *notes]),
    ]
    if any(run.curve for run in runs):  # without matplotlib a note says how to get it
        parts.append("![memory over the step](memory.png)")
    for length, group in by_length(runs).items():
        head = columns(group)
        parts.append(f"## {length:,} tokens")
        for title, first, rows in (
            ("At each one's own peak, by category", "category", category_table(group)),
            (
                "Beyond parameters, gradients and optimizer, by module",
                "module",
                module_table(group),
            ),
            ("Figures", "figure", figure_table(group)),
        ):
            cells = [(name, *cells) for name, cells in rows]
            parts += [f"{title}:\n\n{tables.markdown(cells, (first, *head))}"] if cells else []
        for run, name in zip(group, head):
            ended = f"; {run.error}" if run.error else ""
            parts.append(f"### {name}: peak in the {run.peak_phase or 'step'}{ended}")
            parts.append(top_table(run))
            if run.applied:
                did = "\n".join(["```", *run.applied, "```"])
                parts.append(f"### {name}: what `hfpatch.apply` did\n\n{did}")
    opened = files(runs)
    parts += [f"## Files\n\n{_list(opened)}"] if opened else []
    parts.append(f"## Categories\n\n{_list(f'{name}: {MEANING[name]}' for name in CATEGORIES)}")
    return "\n\n".join(parts) + "\n"


def _list(lines) -> str:
    return "\n".join(f"- {line}" for line in lines)
