"""The code that a class of modules runs: whether it changed since `apply`, and what it writes to."""

import dis
import gc
import inspect
import sys
from collections import deque
from contextlib import suppress
from itertools import islice
from types import CellType, FunctionType, ModuleType

from torch import Tensor, nn

from hfpatch.compat import code_of_class, version
from hfpatch.context.classes import LIBRARIES, home_of, whose

MOST = 2000  # objects that `reached` looks at
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL")
# Names of the classes of Python's own that hold a user's objects.
_HOLDERS = {
    "SimpleNamespace",
    "Namespace",
    "_local",
    "partial",
    "method",
    "builtin_function_or_method",
}
_PLAIN = {int, float, str, bool, type(None)}
_probed: dict[type, tuple] = {}


def code_probed(layers) -> frozenset:
    """The code of every class in these layers, before apply.

    `as_probed` compares with it later. It is part of the key of a cached verdict.
    """
    codes = {
        kind: code_of_class(kind) for kind in {type(m) for layer in layers for m in layer.modules()}
    }
    _probed.update(codes)
    return frozenset(codes.items())


def as_probed(kind: type) -> bool:
    """Whether a class still has the code that the probe of its model saw."""
    return _probed.get(kind) in (None, code_of_class(kind))


def is_own(layer: nn.Module) -> bool:
    """Whether a class, forward, rotation or attention function in the layer is of no known library:
    the user's own, or a model's own files. Also beneath decorators: transformers puts one around the
    forward of each class that is derived from its layers."""
    code = {one for m in layer.modules() for one in (type(m), *code_of_class(type(m)))} - {None}
    return not LIBRARIES.issuperset(map(home_of, (*code, *map(inspect.unwrap, code))))


def reached(value) -> list:
    """The objects that a forward may write to, breadth first: a module's attributes, what the user's
    own code names, and what those hold. `wrote` compares them before and after a run."""
    found = []
    todo = deque([value])
    seen = set()
    while todo and len(seen) < MOST:
        one = todo.popleft()
        found.append(one)
        if type(one) in _PLAIN or id(one) in seen:
            continue
        seen.add(id(one))
        with suppress(Exception):  # an object that raises as it is looked at
            todo.extend(_held(one))
    return found


def _held(one) -> list:
    if isinstance(one, Tensor):
        return [version(one)]
    if isinstance(one, dict | list | tuple | set | deque):
        return [len(one), *islice(one.values() if isinstance(one, dict) else one, 99)]
    if isinstance(one, nn.Module):
        return [
            *vars(one).values(),
            *code_of_class(type(one)),
            *(
                x
                for c in type(one).__mro__
                if home_of(c) not in LIBRARIES
                for x in vars(c).values()
            ),
        ]
    code = one if isinstance(one, type | FunctionType) else type(one)
    name = one.__name__ if isinstance(one, ModuleType) else whose(code)
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if type(one).__name__ not in _HOLDERS and (
        name.partition(".")[0] in LIBRARIES or "site-packages" in file  # it keeps caches
    ):
        return [vars(one).get("__wrapped__")] if isinstance(one, FunctionType) else []
    if not isinstance(one, FunctionType):
        return [*getattr(one, "__dict__", {}).values(), *gc.get_referents(one)]
    named = (i.argval for i in dis.get_instructions(one) if i.opname in _GLOBAL)
    # an empty cell: of a name that is not set yet
    cells = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
    return [
        *map(one.__globals__.get, named), *cells, one.__defaults__, vars(one).get("__wrapped__")
    ]  # fmt: skip


def wrote(before: list, value) -> bool:
    """Whether something that `value` reaches was replaced, added, taken away or changed since."""
    now = reached(value)
    return len(now) != len(before) or any(
        x is not y and not (type(x) is int and x == y) for x, y in zip(now, before)
    )
