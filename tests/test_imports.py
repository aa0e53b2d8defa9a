"""Imports point down, and the heavy packages are imported in their own places alone (read with ast, nothing is run)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hfpatch"
# A package or module may import those of its own row and of the rows above.
ROWS = (
    ("kernels",),
    ("ops",),
    ("memory",),
    ("checkpoint",),
    ("models",),
    ("spec", "patch"),
    ("simulate",),
    ("planner", "profiling", "training"),
    ("commands",),
    ("__main__",),
)
# Old places that hand on to the new ones for one release.
SHIMS = ("planner.formula", "planner.simulate", "run")
TRITON = ("kernels", "simulate.liger")  # the simulator stands in for Liger's kernels
TRANSFORMERS = ("models", "spec", "patch", "simulate", "planner.models", "profiling", "training", "commands")
STANDARD_LIBRARY_ONLY = ("memory", "training.configs", "commands.main")


def within(name: str, packages) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def row(name: str) -> int:
    """The row with the longest matching entry: planner.formula before planner."""
    found = [(len(p), i) for i, packages in enumerate(ROWS) for p in packages if within(name, (p,))]
    assert found, f"hfpatch.{name} is in no row: say in ROWS where it stands"
    return max(found)[1]


def sources():
    """(module name within hfpatch, its imports as (full name, whether at module level))."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name:
            continue  # hfpatch/__init__.py is lazy: tested below
        tree = ast.parse(path.read_text())
        inner = {n for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
        imports = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports += [(alias.name, node not in inner) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: write imports in full"
                imports += [(f"{node.module}.{alias.name}", node not in inner) for alias in node.names]
        if name not in SHIMS:
            yield name, imports


MODULES = dict(sources())


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    for full, _ in MODULES[name]:
        parts = full.split(".")
        if parts[0] == "hfpatch" and len(parts) > 1:
            target = ".".join(parts[1:])
            if (
                target == "__version__"
                or within(target, ("apply", "undo", "plan", "profile"))
                and target not in MODULES
            ):
                continue
            assert row(target) <= row(name), f"hfpatch.{name} imports {full}, which stands above it"


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_in_their_places(name):
    tops = {full.split(".")[0] for full, _ in MODULES[name]}
    above = {full.split(".")[0] for full, at_top in MODULES[name] if at_top}
    if not within(name, TRITON):
        assert "triton" not in tops
    if not within(name, TRANSFORMERS):
        assert "transformers" not in tops
    if within(name, STANDARD_LIBRARY_ONLY):
        own = {full for full, _ in MODULES[name] if full.startswith("hfpatch.")}
        assert above <= set(sys.stdlib_module_names) | {"hfpatch"}
        assert (
            all(within(full.removeprefix("hfpatch."), STANDARD_LIBRARY_ONLY) for full in own) or name == "commands.main"
        )


@pytest.mark.parametrize("name", [n for n in MODULES if within(n, ("ops", "models", "checkpoint", "spec", "patch"))])
def test_what_apply_needs_imports_no_triton_at_module_level(name):
    """Triton is absent on macOS and Windows: kernels are imported where they are launched."""
    above = [full for full, top in MODULES[name] if top and full.startswith("hfpatch.kernels")]
    assert not above, f"{above}: import it inside the function that launches"


def test_import_hfpatch_loads_nothing():
    """`hfpatch plan` answers without torch."""
    code = "import sys, hfpatch; print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert out.stdout.strip() == "[]"
