"""docs/prove.ipynb: a valid notebook whose cells run."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfpatch.cli.main import main

PATH = Path(__file__).resolve().parents[2] / "docs" / "prove.ipynb"


@pytest.fixture(scope="module")
def notebook() -> dict:
    return json.loads(PATH.read_text())


def code(notebook) -> list[tuple[str, list]]:
    """(text, tags) of each code cell."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]


# Commands at small size and without time: that they work is tested in test_prove.py.
def test_its_cells_run(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown: list = []
    display = SimpleNamespace(Markdown=str, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict = {}
    for text, tags in code(notebook):
        if "install" in tags:
            continue
        if text.startswith("!"):
            program, *words = shlex.split(text[1:])
            assert program == "hfpatch"
            main([*words, *(["--small", "--seconds", "0"] if words[0] == "prove" else [])])
        else:
            exec(text, names)
    assert "# hfpatch on" in shown[0]
    assert "the patched model agrees with stock:" in capsys.readouterr().out
