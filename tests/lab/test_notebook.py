"""docs/prove.ipynb: a valid notebook whose cells run."""

import importlib.util
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


def test_it_is_a_notebook_without_outputs(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        wanted = {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"outputs", "execution_count"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert cell.keys() == wanted
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(nbformat.from_dict(notebook))


def test_it_installs_first_and_keeps_the_torch_that_is_there(notebook):
    (first, tags), *others = code(notebook)
    assert tags == ["install"] and first == "%pip install -q hfpatch-*.whl"
    text = "".join(notebook["cells"][0]["source"])
    assert "python -m build --wheel" in text, "no index has hfpatch: it comes as a wheel"
    assert not any("install" in tags or "pip" in text for text, tags in others)


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
