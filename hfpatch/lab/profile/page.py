"""report.html: one file, no network, no script. Charts are SVG; colours follow the reader's light
or dark setting.
"""

import re
from html import escape

from hfpatch.lab.profile import report
from hfpatch.lab.profile.advice import sentences
from hfpatch.lab.profile.timeline import CATEGORIES, MEANING, UNITS, Run, size, unit_of

# Mid-tones, so that each shows on white and on near-black alike.
COLOURS = {
    "parameters": "#7d8a99",
    "gradients": "#4a7fc1",
    "optimizer": "#b5854b",
    "checkpoints": "#3f9f6b",
    "activations": "#d8a800",
    "loss": "#dc4f55",
    "working set": "#9166d8",
    "other": "#a79f9a",
}
STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --faint: #667080; --line: #d9dee5;
  --band: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --text: #e6e9ee; --faint: #99a3b1; --line: #343b45; --band: #1d2127; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
p.lead { font-size: 1.05rem; } code { font: 0.9em ui-monospace, monospace; }
table { border-collapse: collapse; margin: 0.8rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, table.top td, table.top th { text-align: left; }
th { color: var(--faint); font-weight: 600; } tr:nth-child(even) td { background: var(--band); }
.legend span { display: inline-block; margin-right: 1.2rem; } .legend i { display: inline-block; width: 0.8em;
  height: 0.8em; margin-right: 0.4em; border-radius: 2px; vertical-align: -1px; }
table.top td, table.top th { padding-right: 0.4rem; } table.top td:first-child { white-space: nowrap; }
pre { font-size: 0.85rem; white-space: pre-wrap; }
.scroll { overflow-x: auto; } td { font-variant-numeric: tabular-nums; } p code { display: inline-block; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--panel)), 1fr)); gap: 0.6rem 1rem; }
.panels svg { width: 100%; height: auto; max-width: calc(1.55 * var(--panel)); }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
svg text.name { font-weight: 600; } svg text.faint { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--faint); }
svg .peak { stroke: var(--text); stroke-dasharray: 4 3; } svg .phase { stroke: var(--faint); stroke-dasharray: 1 3; }
summary { cursor: pointer; color: var(--faint); } ul.facts { color: var(--faint); padding-left: 1.2rem; }
"""
LEFT, TOP, HEIGHT, BOTTOM = 74, 46, 300, 52
WIDTHS = {1: 900, 2: 540}  # of a panel, by how many there are; three and more get PANEL
PANEL = 360


def ticks(top: float) -> list[float]:
    """Round steps of a binary unit, from 0 to at most top: about five of them."""
    unit = unit_of(top)
    steps = (m * 10**e for e in range(-1, 6) for m in (1, 2, 5))
    step = next(s for s in steps if top / unit / s <= 6)
    return [i * step * unit for i in range(int(top / unit / step) + 1)]


def _tick_label(value: float, unit: int) -> str:
    return f"{value / unit:g} {UNITS[unit]}"


def _areas(run: Run, x0: float, width: float, top: float) -> list[str]:
    """Step-shaped areas from the axis up to each category, the highest first, each painted over by
    those below it.
    """
    end, start = max(run.curve[-1][0], 1e-12), min(0.0, run.curve[0][0])
    base, out = TOP + HEIGHT, []
    for i, name in reversed(list(enumerate(CATEGORIES))):
        most = max(level[i] for _, level in run.curve)
        if most == 0:
            continue
        path, height = [], None
        for at, level in run.curve:
            y = round(base - HEIGHT * sum(level[: i + 1]) / top, 1)
            x = round(x0 + (at - start) / (end - start) * width, 1)
            if height is None:
                path.append(f"M{x:g} {base}V{y:g}")
            elif y != height:
                path.append(f"H{x:g}V{y:g}")
            height = y
        path.append(f"H{x0 + width:.1f}V{base}Z")
        title = f"<title>{escape(run.impl)}: {name}, at most {size(most)}</title>"
        out.append(f'<path d="{"".join(path)}" fill="{COLOURS[name]}">{title}</path>')
    return out


def chart(runs: list[Run], *, shared: bool = True) -> str:
    """Memory over one step, a panel per run; shared: one memory axis for all of them.

    Panels are of one size; they stand beside each other and wrap where the window is narrow, text
    hardly shrinks.
    """
    runs = [r for r in runs if r.curve]
    if not runs:
        return "<p>No memory was recorded.</p>"
    highest, width = max(r.peak_bytes for r in runs), WIDTHS.get(len(runs), PANEL)
    panels = [
        _panel(run, name, width, (highest if shared else run.peak_bytes) * 1.12)
        for run, name in zip(runs, report.columns(runs))
    ]
    return (
        f'<div class="panels" style="--panel: {0.9 * width:.0f}px">' + "\n".join(panels) + "</div>"
    )


def _panel(run: Run, name: str, full: int, top: float) -> str:
    """One run's curve, `full` units wide, its memory axis up to `top` bytes."""
    x0, width = LEFT, full - LEFT - 8
    label = f"memory over one training step, {escape(name)}"
    out = [f'<svg viewBox="0 0 {full} {TOP + HEIGHT + BOTTOM}" role="img" aria-label="{label}">']
    for tick in ticks(top):
        y = TOP + HEIGHT * (1 - tick / top)
        out.append(f'<line class="grid" x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text class="faint" x="{x0 - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_tick_label(tick, unit_of(top))}</text>'
        )
    out += _areas(run, x0, width, top)
    end, start = max(run.curve[-1][0], 1e-12), min(0.0, run.curve[0][0])
    for phase, begin, stop in run.phases:
        px = x0 + (begin - start) / (end - start) * width
        out.append(
            f'<line class="phase" x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}"/>'
        )
        # A phase too short for its name goes unnamed; its line stays.
        if (stop - begin) / (end - start) * width > 8 * len(phase):
            out.append(
                f'<text class="faint" x="{px + 3:.1f}" '
                f'y="{TOP + HEIGHT + 16}">{escape(phase)}</text>'
            )
    y = TOP + HEIGHT * (1 - run.peak_bytes / top)
    out.append(f'<line class="peak" x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
    out.append(
        f'<text x="{x0 + 4}" y="{y - 6:.1f}">peak {size(run.peak_bytes, unit_of(top))}</text>'
    )
    out.append(
        f'<line class="axis" x1="{x0}" x2="{x0 + width}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}"/>'
    )
    out.append(f'<text x="{x0}" y="18" class="name">{escape(name)}</text>')
    span = f"0 to {end:.2f} s" if run.time_unit == "s" else f"one step, {run.time_unit}"
    out.append(
        f'<text class="faint" x="{x0 + width}" y="{TOP + HEIGHT + 38}" '
        f'text-anchor="end">{escape(span)}</text>'
    )
    return "\n".join([*out, "</svg>"])


def _legend(runs) -> str:
    used = [
        c for i, c in enumerate(CATEGORIES) if any(level[i] for r in runs for _, level in r.curve)
    ]
    return '<p class="legend">' + "".join(
        f'<span title="{MEANING[c]}"><i style="background:{COLOURS[c]}"></i>{c}</span>'
        for c in used
    ) + "</p>"  # fmt: skip


def _inline(text: str) -> str:
    """`code` and **bold** of our own Markdown cells, escaped."""
    out = escape(text)
    for mark, tag in (("**", "b"), ("`", "code")):
        pieces = out.split(mark)
        out = "".join(p if i % 2 == 0 else f"<{tag}>{p}</{tag}>" for i, p in enumerate(pieces))
    return out


def _breakable(html: str) -> str:
    """A long path or dotted name may go on in the next line after its separators, but not before
    `py:12`.
    """
    return re.sub(r"(?<=[\w*][/._:])(?=[A-Za-z*])(?!py:)", "<wbr>", html)


def _table(head, rows, kind="") -> str:
    """kind "top": of the largest blocks, where a column without any value is left out."""
    if kind == "top":
        told = [i for i in range(len(head)) if any(row[i] for row in rows)]
        head, rows = [head[i] for i in told], [[row[i] for i in told] for row in rows]
    cells = "".join(f"<th>{_inline(h)}</th>" for h in head)
    cell = (lambda c: _breakable(_inline(c))) if kind == "top" else _inline
    body = "".join("<tr>" + "".join(f"<td>{cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{cells}</tr>{body}</table></div>'


def html(runs: list[Run], *, command: str = "", commit: str = "", notes=()) -> str:
    """The whole report.html."""
    model = escape(str(runs[0].setup.get("model", "a model")))
    simulated = " (simulated)" if all(r.source == "simulated" for r in runs) else ""
    out = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Memory profile of {model}{simulated}</title><style>{STYLE}</style></head><body>",
        f"<h1>Memory profile of {model}{simulated}</h1>",
        f'<p class="lead">{" ".join(map(_inline, sentences(runs)))}</p>',
    ]
    for length, group in report.by_length(runs).items():
        head = report.columns(group)
        out += [
            f"<h2>{length:,} tokens: memory over one step{simulated}</h2>",
            _legend(group),
            chart(group),
        ]
        if len(group) > 1:
            own = chart(group, shared=False)
            out.append(f"<details><summary>Each at its own scale</summary>{own}</details>")
        for title, first, rows in report.tables(group):
            out += [
                f"<h3>{title}</h3>",
                _table([first, *head], [(name, *cells) for name, cells in rows]),
            ]
        for run, name in zip(group, head):
            out.append(f"<h3>{escape(name)}: largest blocks at the peak</h3>")
            out.append(f"<p>{escape(run.error)}</p>" if run.error else "")
            out.append(_table(report.TOP_HEAD, report.top_rows(run), "top"))
            out += [f"<p>{_inline(note)}</p>" for note in run.notes]
            if run.applied:
                said = escape("\n".join(run.applied))
                out.append(f"<h3>{escape(name)}: {_inline(report.APPLIED)}</h3><pre>{said}</pre>")
    lines = [*report.facts(runs, command, commit), *notes, *report.files(runs)]
    out.append(
        '<h2>How it was made</h2><ul class="facts">'
        + "".join(f"<li>{_inline(line)}</li>" for line in lines)
    )
    out.append("</ul></body></html>")
    return "\n".join(out) + "\n"
