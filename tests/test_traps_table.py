"""TRAPS.md names tests that exist, and every trap test is in it."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def defined(pattern: str) -> set[str]:
    trees = (ast.parse(path.read_text()) for path in HERE.glob(pattern))
    return {
        n.name
        for tree in trees
        for n in tree.body
        if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    }


def test_the_table_names_tests_that_exist():
    named = re.findall(r"`(test_\w+)`", (HERE / "TRAPS.md").read_text())
    assert len(named) == len(set(named)) > 70
    assert set(named) <= defined("**/test_*.py")


def test_rows_are_whole():
    rows = [
        line
        for line in (HERE / "TRAPS.md").read_text().splitlines()
        if line.startswith("| ") and "**" not in line
    ][2:]
    assert all(
        len(row.strip("|").split("|")) == 3 and "`test_" in row.split("|")[3] for row in rows
    )
