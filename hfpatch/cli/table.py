"""Prints rows: a table on a terminal if rich is installed, plain columns in a pipe."""

import sys


def show_table(rows, head=()) -> None:
    """Prints the rows, tuples of text of equal length, under the head if it is not empty."""
    if sys.stdout.isatty() and _rich(rows, head):
        return
    rows = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _rich(rows, head) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(*head, show_header=bool(head))
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return True
