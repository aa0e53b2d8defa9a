"""Prints rows in columns."""


def show_table(rows, head=()) -> None:
    """Prints the rows, tuples of text of equal length, under the head if it is not empty."""
    rows = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
