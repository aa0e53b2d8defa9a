"""Rows in columns, and bytes and seconds as text, as every command prints them. Standard library
only.
"""

from hfpatch.budget.limits import GiB
from hfpatch.budget.limits import gib as gib

UNITS = {1: "B", 1 << 10: "KiB", 1 << 20: "MiB", GiB: "GiB"}


def size(count: float) -> str:
    """1536 -> "1.50 KiB", with one or two decimals."""
    unit = max((unit for unit in UNITS if abs(count) >= unit), default=1)
    small = abs(count) < 10 * unit
    decimals = 0 if unit == 1 else 1 + small
    return f"{count / unit:.{decimals}f} {UNITS[unit]}"


def seconds(value: float | None) -> str:
    """0.5 -> "500 ms", 2.0 -> "2.00 s"; "" for None."""
    if value is None:
        return ""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def table(rows, head=()) -> str:
    """Aligned columns. Under a head, which a line follows, all but the first go to the right."""
    cells = [[str(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    if head:
        cells.insert(1, ["-" * width for width in widths])
    form = [f"{{:{'>' if head and i else ''}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(form).format(*row).rstrip() for row in cells)


def markdown(rows, head) -> str:
    """A table of Markdown: the first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
