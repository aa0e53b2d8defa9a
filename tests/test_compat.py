"""Private names of torch, transformers, accelerate and DeepSpeed: all in compat/."""

import ast
from pathlib import Path

from hfpatch import compat

PACKAGE = Path(compat.__file__).parents[1]
# Names of the standard library, of JSON, of datasets and TRL, and what a Trainer's subclass
# overrides.
NOT_THEIRS = {
    "_exit",
    "_getframe",
    "_actions",
    "_option_string_actions",
    "_fields",
    "_replace",
    "_unsafe_view",
    "_name_or_path",
    "_fingerprint",
    "_load_best_model",
    "_is_sac_wrapped",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_hfpatch"))


def foreign_names(tree: ast.AST, own: set) -> set[str]:
    """Private attributes and imports of a module's text that the package does not define itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            of_aten = isinstance(node.value, ast.Name) and node.value.id == "aten"
            found |= set() if of_aten else {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
            "torch",
            "transformers",
            "accelerate",
            "deepspeed",
        ):
            found |= {
                n for n in [*node.module.split("."), *(a.name for a in node.names)] if private(n)
            }
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(name.value) and name.value not in own:
                found.add(name.value)
    return found


def test_private_names_stand_in_compat_alone():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    ours = [trees.pop(path) for path in list(trees) if "compat" in (path.stem, path.parent.name)]
    inside = set().union(*(foreign_names(tree, own) for tree in ours))
    assert len(inside) > 15  # the scan sees them
    outside = {
        f"{path.relative_to(PACKAGE)}: {n}"
        for path, t in trees.items()
        for n in foreign_names(t, own) - NOT_THEIRS
    }
    assert not outside


# --- names that a version in the range lacks -------------------------------------------------------
