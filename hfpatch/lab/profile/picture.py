"""memory.png: memory over one step, drawn by matplotlib."""

from hfpatch.lab.profile.report import by_length, columns
from hfpatch.lab.profile.timeline import UNITS, Run, size, unit_of

COLOURS = {"hf": "#7d8a99", "liger": "#9166d8", "loss": "#d8a800", "hfpatch": "#3f9f6b"}
NAMES = {"hf": "transformers", "loss": "fused loss alone"}


def draw(runs: list[Run], path: str) -> bool:
    """Writes the picture: a panel per length, a curve per run over its own share of the step.

    Returns False without matplotlib, or if no run has a curve.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lengths = by_length([run for run in runs if run.curve])
    if not lengths:
        return False
    figure = Figure(figsize=(7, 3.2 * len(lengths)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lengths), 1, squeeze=False)[:, 0]
    for axis, (length, group) in zip(axes, lengths.items()):
        unit = unit_of(max(run.peak_bytes for run in group))
        for run, title in zip(group, columns(group)):
            first, last = run.curve[0][0], run.curve[-1][0]
            shares = [(at - first) / ((last - first) or 1) for at, _ in run.curve]
            levels = [sum(level) / unit for _, level in run.curve]
            name = title.replace(run.impl, NAMES.get(run.impl, run.impl), 1)
            name += ", checkpointing" * bool(run.setup.get("gradient_checkpointing"))
            axis.plot(
                shares, levels, color=COLOURS[run.impl], drawstyle="steps-post",
                label=f"{name}: peak {size(run.peak_bytes, unit)}",
            )  # fmt: skip
        axis.set(xlim=(0, 1), xlabel="share of the step", ylabel=UNITS[unit])
        axis.set_ylim(0, 1.4 * max(run.peak_bytes for run in group) / unit)
        axis.set_title(f"memory in one step of {length:,} tokens", fontsize=10, loc="left")
        axis.grid(axis="y", alpha=0.3)
        axis.legend(loc="upper right", frameon=False, fontsize=9)
    figure.savefig(path)
    return True
