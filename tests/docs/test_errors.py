"""The page of errors and the table of hfpatch/anchors.py: each explains what the other names, and
the words of both are those of the code.
"""

import ast
import re
import sys

import pytest
from blocks import ROOT

import hfpatch
from hfpatch.anchors import ANCHORS, OTHER, PAGE, page_of
from hfpatch.cli.main import main

TEXT = (ROOT / PAGE).read_text()
# anchor: the messages that the page quotes
QUOTED = {
    part.partition("\n")[0]: re.findall(r"`([^`]+)`", part.split("\n: ")[0])
    for part in TEXT.split("\n## ")[1:]
}
NO_MESSAGE = {"logits-none", OTHER}  # a reader sees no error there, or any


@pytest.fixture(scope="module")
def said() -> str:
    """All texts of the package, what is filled in left out."""
    texts = []
    for file in (ROOT / "hfpatch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_page_and_table_name_the_same():
    assert set(ANCHORS) == set(QUOTED) - NO_MESSAGE


@pytest.mark.parametrize("anchor", ANCHORS)
def test_quoted_words_are_the_codes_and_lead_to_their_anchor(anchor, said):
    assert QUOTED[anchor]
    for quoted in QUOTED[anchor]:
        message = quoted.replace("...", "x")
        assert page_of(message) == f"{PAGE}#{anchor}", message
        for piece in quoted.split("..."):
            piece = piece.strip(" ,:()")
            assert piece in said, f"nothing in hfpatch says {piece!r}"


def test_a_command_names_the_place(capsys):
    assert main(["plan", "--model", "nonesuch"]) == 2
    assert capsys.readouterr().err.endswith(f"; more: {PAGE}#unknown-model.\n")
    assert main(["plan", "--model", "llama-tiny", "--gpu", "abacus"]) == 2
    assert capsys.readouterr().err.endswith(f"; more: {PAGE}#{OTHER}.\n")
    assert main(["plan", "--abacus", "1"]) == 2
    assert PAGE not in capsys.readouterr().err, "--help says it"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes before")
def test_what_apply_raises_names_the_place():
    import torch

    with pytest.raises(ValueError) as raised:
        hfpatch.apply(torch.nn.Linear(1, 1))
    assert any(note.startswith(f"More: {PAGE}") for note in raised.value.__notes__)
