"""memory.png: the bytes that are alive over the followed step, by category. Drawn by matplotlib."""

from pathlib import Path

from hfpatch.lab.profile.report import by_length, columns
from hfpatch.lab.profile.timeline import CATEGORIES, Run
from hfpatch.lab.tables import UNITS, size

PICTURE = "memory.png"


def save(runs: list[Run], path: Path) -> list[str]:
    """Draws the runs into a file. Returns a note if it cannot: without matplotlib, or of no run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["hfpatch: memory.png needs matplotlib. Run: pip install 'hfpatch[report]'."]
    rows = by_length([run for run in runs if run.curve]).values()
    if not rows:
        return []
    wide = max(map(len, rows))
    unit = max(unit for unit in UNITS if unit <= max(run.peak_bytes for run in runs))
    figure = Figure(figsize=(4.5 * wide, 3 * len(rows) + 0.6), layout="constrained")
    panels = figure.subplots(len(rows), wide, squeeze=False, sharey="row")
    for line, group in zip(panels, rows):
        for axis, run, name in zip(line, group, columns(group)):
            areas = draw(axis, run, name, unit)
        for axis in line[len(group) :]:
            axis.axis("off")
    figure.legend(areas, CATEGORIES, loc="outside lower center", ncols=4)
    figure.savefig(path)
    return []


def draw(axis, run: Run, name: str, unit: int):
    """One run on matplotlib's axes: a stack of categories, and its peak. Returns the areas.

    unit: one of UNITS, in bytes.
    """
    times = [at for at, _ in run.curve]
    levels = zip(*(level for _, level in run.curve))
    areas = axis.stackplot(times, *([n / unit for n in one] for one in levels), step="post")
    axis.axhline(run.peak_bytes / unit, color="black", linestyle="--", linewidth=0.8)
    axis.set_title(f"{name}, {run.seq_len:,} tokens\npeak {size(run.peak_bytes)}")
    axis.set_xlabel("allocations and frees")
    axis.set_xlim(run.phases[0][1], run.phases[-1][2])
    axis.set_ylabel(UNITS[unit])
    return areas
