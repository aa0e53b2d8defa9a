"""The size of the house: statements, tokens and fields may not grow unnoticed.

Whoever adds code deletes as much in the same commit, or raises a number here in a commit of its own
that names the user it is for. A number is what the code has, plus 2%.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.STRING,
}  # fmt: skip

# Folder of hfpatch ("." are its own files): most statements without docstrings, most tokens.
FOLDERS = {
    "lab": (3010, 32830),  # with the cards' data sheets and a config's sizes, for plan
    "layer": (2885, 32650),
    # a run killed after its last step takes none more; engines of accelerate launch are not planned;
    # who resumes ZeRO on fewer GPUs is told
    # pairs whose sequences ranks share are refused before step 1
    "trainer": (2471, 24835),
    # misspelt keywords and places, for who writes Python as for flags; small hosts with large cards
    "budget": (482, 5200),
    # rows of half a million tokens on one card, by the fused optimizer; argparse's messages in the
    # form of all others, for who mistypes; float32 gradients of a float32 model
    "planner": (950, 11740),
    # layers of users: their integers, further arguments, random numbers
    "decoder": (1131, 13380),
    "ops": (855, 11300),
    "cli": (763, 7926),  # who mistypes a run file need not wait for libraries
    # masks of floats beside positions, for who casts a mask; what a user's own norm, MLP, rotation or
    # layer writes to (a loss of its own, captured values), also under a decorator and in a class that is
    # derived from transformers' layers; labels behind left padding under eager attention
    "context": (772, 8820),
    "store": (527, 5216),
    "kernels": (566, 8353),
    "compat": (465, 4372),
    # MLPs that clamp or drop, as DeepSeek-V4 and Seed-OSS; a user's own norm, MLP or rotation with
    # another epsilon or backward
    "parts": (470, 5560),
    "attention": (385, 5240),  # rows of 4M tokens over GPUs
    "loss": (442, 5050),  # another mode of autograd, for who scores without a gradient in a forward
    ".": (386, 3826),
    "parallel": (176, 2166),  # untiled layers of ranks that split weights choose alike
    "examples": (124, 1568),  # moved here from scripts/: what the wheel holds
}  # fmt: skip
TESTS = 18000  # most statements of tests/; host memory of who trains on Windows


def statements(tree: ast.AST) -> int:
    """Without docstrings."""

    def docstring(node):
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    return sum(isinstance(n, ast.stmt) and not docstring(n) for n in ast.walk(tree))


def size(paths) -> tuple[int, int]:
    """(statements, tokens) of files. Comments, strings and layout are no tokens."""
    count, tokens = 0, 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        count += statements(ast.parse(text))
        found = tokenize.generate_tokens(io.StringIO(text).readline)
        tokens += sum(token.type not in LAYOUT for token in found)
    return count, tokens


def folders() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "hfpatch").rglob("*.py")):
        parts = path.relative_to(ROOT / "hfpatch").parts
        found.setdefault(parts[0] if len(parts) > 1 else ".", []).append(path)
    return found


def test_every_folder_has_a_limit():
    assert set(folders()) == set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_does_not_grow(name):
    count, tokens = size(folders()[name])
    most_statements, most_tokens = FOLDERS[name]
    assert count <= most_statements, f"{name}: {count} statements, at most {most_statements}"
    assert tokens <= most_tokens, f"{name}: {tokens} tokens, at most {most_tokens}"
    # A limit that is far above the code holds nothing.
    assert count >= 0.9 * most_statements, f"{name}: {count} statements; lower {most_statements}"


def test_the_tests_do_not_grow():
    count, _ = size(sorted((ROOT / "tests").rglob("*.py")))
    assert 0.9 * TESTS <= count <= TESTS, f"{count} statements of tests, the limit is {TESTS}"


# Most fields of what a reader has to keep in mind: (file, class) -> fields.
FIELDS = {
    ("budget/policy.py", "Checkpointing"): 7,
    ("layer/traced.py", "Traced"): 17,
    ("layer/call.py", "LayerCall"): 8,
    ("layer/kept.py", "Kept"): 12,
    ("layer/condition.py", "Condition"): 10,
    ("layer/measured_step.py", "Step"): 12,
    ("layer/backward.py", "Backward"): 12,
    ("context/current.py", "_Current"): 8,  # thread-local
}
ATTRIBUTES = 19  # most names of attributes and methods that begin with _hfpatch_


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: place[1])
def test_an_object_has_no_more_fields(place):
    file, name = place
    tree = ast.parse((ROOT / "hfpatch" / file).read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    body = found.body[0].body if name == "_Current" else found.body  # set by its __init__
    fields = [n for n in body if isinstance(n, ast.AnnAssign | ast.Assign)]
    assert len(fields) <= FIELDS[place]


def test_modules_get_no_more_attributes():
    found = set()
    for path in (ROOT / "hfpatch").rglob("*.py"):
        found |= set(re.findall(r"\b_hfpatch_[a-z_]+", path.read_text(encoding="utf-8")))
    assert len(found) <= ATTRIBUTES, sorted(found)
