"""Imports point down, in no circle, and the heavy packages are imported in their own places alone
(read with ast).
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import hfpatch

PACKAGE = Path(__file__).parent.parent / "hfpatch"
# A package or module may import those of its own row and of the rows above.
ROWS = (
    ("compat", "report"),
    ("budget",),
    ("kernels",),
    ("ops",),
    ("store",),
    ("attention",),
    ("parallel",),
    ("context",),
    ("parts",),
    ("layer",),
    ("decoder",),
    ("loss",),
    ("notes",),
    ("swaps",),
    ("patch",),
    ("lab",),
    ("planner",),
    ("trainer",),
    ("cli",),
    ("examples",),
    ("__main__",),
)
# knows nothing of the neighbours in the rows below
CORE = tuple(name for row in ROWS[:15] for name in row)
TRITON = ("kernels",)
TRANSFORMERS = (
    "compat",
    "context",
    "parts",
    "layer",
    "decoder",
    "loss",
    "patch",
    "lab",
    "trainer",
    "cli",
    "examples",
)
STANDARD_LIBRARY_ONLY = (
    "budget",
    "lab.hardware",
    "planner.placements",
    "report",
    "trainer.configs",
    "trainer.locks",
    "cli.main",
)


def test_files_stay_short():
    long = {
        p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) >= 400
    }
    assert not long


def within(name: str, packages) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def row(name: str) -> int:
    """The row with the longest matching entry: planner.models before planner."""
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
        inner = {
            n
            for f in ast.walk(tree)
            if isinstance(f, (ast.FunctionDef, ast.Lambda))
            for n in ast.walk(f)
        }
        imports = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports += [(alias.name, node not in inner) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: write imports in full"
                imports += [
                    (_loaded(f"{node.module}.{alias.name}"), node not in inner)
                    for alias in node.names
                ]
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "hfpatch"
            ):
                imports.append((_loaded(f"hfpatch.{node.attr}"), node not in inner))
        yield name, imports


def _loaded(full: str) -> str:
    """hfpatch.apply is hfpatch.patch.apply: what the lazy package loads for a name."""
    name = full.removeprefix("hfpatch.")
    return f"{hfpatch._PUBLIC[name]}.{name}" if name in hfpatch._PUBLIC else full


MODULES = dict(sources())


def targets(name: str, above: bool = False) -> set[str]:
    """The modules of ours that a module imports, anywhere in its text or at module level alone,
    itself left out.
    """
    found = set()
    for full, top in MODULES[name]:
        parts = full.split(".")
        if (
            above
            and not top
            or parts[0] != "hfpatch"
            or parts[1:] in (["__version__"], ["OLDEST"], ["__file__"])
        ):
            continue  # the package's own __init__ holds these two
        ends = [".".join(parts[1:n]) for n in range(len(parts), 1, -1)]
        found.add(next((end for end in ends if end in MODULES), ends[-1] if ends else ""))
    return found - {name, ""}


def test_imports_point_down():
    up = [(name, t) for name in MODULES for t in targets(name) if row(t) > row(name)]
    assert not up, "each imports what stands above it"


def circle(graph: dict) -> list | None:
    """A circle of the graph {name: names it needs}, None where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_imports_in_a_circle():
    """Imports inside functions count: what works for their sake alone is still two things that are
    one.
    """
    assert circle({name: targets(name) for name in MODULES}) is None


def test_no_packages_in_a_circle():
    """Of each pair of packages and top modules, those of a row too, one knows the other at most."""
    graph: dict = {}
    for name in MODULES:
        part = name.split(".")[0]
        graph.setdefault(part, set()).update({t.split(".")[0] for t in targets(name)} - {part})
    assert circle(graph) is None


def test_circles_are_found_and_lazy_names_followed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not circle(
        {"a": {"b", "c"}, "b": {"c"}}
    )
    assert targets("lab.simulate.implementations") >= {"patch", "lab.simulate.adapters"}


def test_heavy_packages_in_their_places():
    for name in MODULES:
        tops = {full.split(".")[0] for full, _ in MODULES[name]}
        above = {full.split(".")[0] for full, at_top in MODULES[name] if at_top}
        assert "triton" not in tops or within(name, TRITON), name
        assert "transformers" not in tops or within(name, TRANSFORMERS), name
        if within(name, STANDARD_LIBRARY_ONLY):
            own = {full for full, _ in MODULES[name] if full.startswith("hfpatch.")}
            assert above <= set(sys.stdlib_module_names) | {"hfpatch"}, name
            assert name == "cli.main" or all(
                within(full.removeprefix("hfpatch."), STANDARD_LIBRARY_ONLY) for full in own
            ), name


def test_what_apply_needs_imports_no_triton_at_module_level():
    """Triton is absent on macOS and Windows: kernels are imported where they are launched."""
    core = [n for n in MODULES if within(n, CORE) and not within(n, ("kernels",))]
    above = [n for n in core for full, top in MODULES[n] if top and "hfpatch.kernels" in full]
    assert not above, "import it inside the function that launches"


def test_import_hfpatch_loads_nothing():
    """`hfpatch plan` answers without torch."""
    code = (
        "import sys, hfpatch; print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m "
        "in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [n for n in MODULES if within(n, ("cli",))])
def test_a_commands_flags_are_known_without_the_layers(name):
    """Their modules load transformers and what it finds: seconds, and other libraries' warnings
    before a line of help.
    """
    loaded, new = set(), {name}
    while new:
        loaded |= new
        new = {t for one in new if one in MODULES for t in targets(one, above=True)} - loaded
    assert not [n for n in loaded if within(n, ("layer", "decoder", "loss", "context", "patch"))]
