"""memory.png: memory over one step, drawn by matplotlib."""

from hfpatch.lab.profile.report import by_length, columns
from hfpatch.lab.profile.timeline import CATEGORIES, UNITS, Run, size, unit_of

COLOURS = {
    "parameters": "#7d8a99", "gradients": "#4a7fc1", "optimizer": "#b5854b",
    "checkpoints": "#3f9f6b", "activations": "#d8a800", "loss": "#dc4f55",
    "working set": "#9166d8", "other": "#a79f9a",
}  # fmt: skip


def draw(runs: list[Run], path: str) -> bool:
    """Writes the picture: a row per length, a panel per run, one memory axis per row.

    Returns False without matplotlib, or if no run has a curve.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lengths = {n: [r for r in group if r.curve] for n, group in by_length(runs).items()}
    lengths = {n: group for n, group in lengths.items() if group}
    if not lengths:
        return False
    wide = max(map(len, lengths.values()))
    figure = Figure(
        figsize=(3.6 * wide + 1.2, 2.9 * len(lengths) + 0.9), dpi=110, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lengths), wide, squeeze=False)
    shown = {}
    for row, (length, group) in zip(axes, lengths.items()):
        top = max(r.peak_bytes for r in group) * 1.15
        unit = unit_of(top)
        for axis in row[len(group) :]:
            axis.axis("off")
        for i, (axis, run, title) in enumerate(zip(row, group, columns(group))):
            times = [at for at, _ in run.curve]
            layers = [[level[j] / unit for _, level in run.curve] for j in range(len(CATEGORIES))]
            for patch, category in zip(
                axis.stackplot(times, layers, colors=[COLOURS[c] for c in CATEGORIES], step="post"),
                CATEGORIES,
            ):
                if any(layers[CATEGORIES.index(category)]):
                    shown[category] = patch
            axis.axhline(run.peak_bytes / unit, color="black", linestyle="--", linewidth=0.8)
            axis.annotate(f"peak {size(run.peak_bytes, unit)}", (0.02, run.peak_bytes / unit),
                          va="bottom",
                          xycoords=("axes fraction", "data"), fontsize=9)  # fmt: skip
            axis.set_ylim(0, top / unit)
            axis.set_xlim(min(0, times[0]), max(times[-1], 1e-9))
            axis.set_title(f"{title}, {length:,} tokens", fontsize=10, loc="left")
            axis.set_xlabel("seconds" if run.time_unit == "s" else run.time_unit, fontsize=9)
            axis.locator_params(axis="x", nbins=5)
            axis.grid(axis="y", alpha=0.3)
            axis.set_ylabel(UNITS[unit] if i == 0 else "")
    order = [c for c in CATEGORIES if c in shown]
    figure.legend(
        [shown[c] for c in order],
        order,
        loc="outside lower center",
        ncols=min(len(order), 3 * wide),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)
    return True
