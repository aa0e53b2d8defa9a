"""report.md from a list of Runs: two sentences, then tables."""

from hfpatch.lab.profile.advice import sentences
from hfpatch.lab.profile.timeline import CATEGORIES, LASTING, MEANING, Run, generic, size


def columns(runs: list[Run]) -> list[str]:
    """One heading per run. It marks simulated runs, and runs that did not finish."""
    marks = {"simulated": " (simulated)"}
    return [
        r.impl + marks.get(r.source, "") + (" (did not finish)" if r.error else "") for r in runs
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
    held = []
    for run in runs:
        mine: dict = {}
        for row in run.rows:
            if row["category"] not in LASTING and row["phase"] != "before the step":
                name = generic(row["module"]) or "(the model's own forward)"
                mine[name] = mine.get(name, 0) + row["bytes"]
        held.append(mine)
    names = sorted(
        dict.fromkeys(n for mine in held for n in mine),
        key=lambda n: -max(mine.get(n, 0) for mine in held),
    )
    return [
        (f"`{n}`" if n[0] != "(" else n, [size(mine.get(n, 0)) for mine in held])
        for n in names[:12]
    ]


def tables(runs) -> list:
    """(title, heading of the first column, rows) of each table that has rows, of one length."""
    found = (
        ("At each one's own peak, by category", "category", category_table(runs)),
        ("Beyond parameters, gradients and optimizer, by module", "module", module_table(runs)),
        ("Figures", "figure", figure_table(runs)),
    )
    return [table for table in found if table[2]]


def _seconds(value):
    return "" if value is None else f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def figure_table(runs):
    """Rows (figure, [text per run]): speed, the allocator's counts, host memory, plan and peak."""
    rows = []

    def add(name, values):
        if any(v not in (None, "") for v in values):
            rows.append((name, ["" if v is None else v for v in values]))

    steps = [
        sorted(r.step_seconds)[len(r.step_seconds) // 2] if r.step_seconds else None for r in runs
    ]
    add("seconds a step (median, without the profiler)", [_seconds(s) for s in steps])
    add(
        "tokens a second",
        [f"{r.seq_len * r.batch / s:,.0f}" if s else "" for r, s in zip(runs, steps)],
    )
    for name, key in (
        ("allocated, peak", "allocated_peak_bytes"),
        ("reserved, peak", "reserved_peak_bytes"),
        ("fragmentation (reserved, not allocated)", "fragmentation_bytes"),
        ("pinned host memory, peak", "pinned_host_peak_bytes"),
        ("host memory of the step, peak", "host_peak_bytes"),
        ("process memory, peak", "process_peak_bytes"),
    ):
        add(name, [size(r.memory[key]) if key in r.memory else None for r in runs])
    return rows


def top_rows(run):
    """The largest blocks alive at the peak: (bytes, count, category, module, phase, operator,
    line).
    """
    return [
        (
            size(r["bytes"]),
            str(r["count"]),
            r["category"],
            generic(r["module"]),
            r["phase"],
            r["op"],
            r["line"],
        )
        for r in run.rows[:10]
    ]


APPLIED = "what `hfpatch.apply` did"
TOP_HEAD = ("bytes", "blocks", "category", "module", "phase", "operator", "line")


def table(head, rows) -> str:
    """A Markdown table; the first column to the left, figures to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join([name, *cells]) + " |" for name, cells in rows]
    return "\n".join(lines)


def facts(runs, command, commit) -> list[str]:
    """How it was made: command, versions, device, setup, one line each."""
    first = runs[0]
    versions = ", ".join(f"{k} {v}" for k, v in first.versions.items())
    setup = ", ".join(
        f"{k} {v}"
        for k, v in first.setup.items()
        if k not in ("gradient_checkpointing", "checkpointing")
    )
    lines = [
        f"Command: `{command}`",
        f"Versions: {versions}" + (f"; commit {commit}" if commit else ""),
    ]
    where = (
        "simulated on fake tensors, no kernel ran"
        if first.source == "simulated"
        else f"measured on {first.device}"
    )
    own = {r.impl: r.setup for r in runs}
    for impl, values in own.items():
        if values.get("checkpointing"):
            setup += f"; {impl} with " + ", ".join(values["checkpointing"])
        elif impl != "hfpatch" and values.get("gradient_checkpointing") is not None:
            setup += f"; {impl} {'with' if values['gradient_checkpointing'] else 'without'} gradient checkpointing"
    return [*lines, f"Runs: {where}; {setup}"]


def files(runs) -> list[str]:
    """Trace and snapshot, with their size and what opens them."""
    lines = []
    for run in runs:
        for kind, how in (
            ("trace", "https://ui.perfetto.dev"),
            ("snapshot", "https://docs.pytorch.org/memory_viz"),
        ):
            if f"{kind}_file" in run.memory:
                count = size(run.memory[f"{kind}_file_bytes"])
                lines.append(
                    f"`{run.memory[f'{kind}_file']}` ({count}, one step): open it at {how}"
                )
    return lines


def markdown(runs: list[Run], *, command: str = "", commit: str = "", notes=()) -> str:
    """The whole report.md."""
    simulated = " (simulated)" if all(r.source == "simulated" for r in runs) else ""
    parts = [
        f"# Memory profile of {runs[0].setup.get('model', 'a model')}{simulated}",
        " ".join(sentences(runs)),
    ]
    parts.append("\n".join(f"- {line}" for line in [*facts(runs, command, commit), *notes]))
    if any(run.curve for run in runs):  # without matplotlib a note says how to get it
        parts.append("![memory over the step](memory.png)")
    for length, group in by_length(runs).items():
        head = columns(group)
        parts.append(f"## {length:,} tokens")
        parts += [
            f"{title}:\n\n{table([first, *head], rows)}" for title, first, rows in tables(group)
        ]
        for run, name in zip(group, head):
            top = [(f"{row[0]}", list(row[1:])) for row in top_rows(run)]
            when = f"peak in the {run.peak_phase or 'step'}" + (
                f"; {run.error}" if run.error else ""
            )
            parts.append(
                f"### {name}: {when}\n\n"
                + (table(TOP_HEAD, top) if top else "Nothing was recorded.")
            )
            parts += ["\n".join(f"- {note}" for note in run.notes)] if run.notes else []
            if run.applied:
                parts.append(f"### {name}: {APPLIED}\n\n```\n" + "\n".join(run.applied) + "\n```")
    opened = files(runs)
    if opened:
        parts.append("## Files\n\n" + "\n".join(f"- {line}" for line in opened))
    parts.append(
        "## Categories\n\n" + "\n".join(f"- {name}: {MEANING[name]}" for name in CATEGORIES)
    )
    return "\n\n".join(parts) + "\n"
