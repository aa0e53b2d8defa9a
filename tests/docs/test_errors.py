"""The page of errors quotes messages of the code."""

import ast
import re

import pytest
from blocks import ROOT

QUOTED = re.findall(r"(?m)^`([^`]+)`$", (ROOT / "docs/reference/errors.md").read_text())


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


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_the_codes(quoted, said):
    assert quoted.removesuffix(" ...") in said
