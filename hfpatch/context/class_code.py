"""The code that a class of modules runs: whether it changed since `apply`, and what it writes to."""

import dis
from collections import deque
from contextlib import suppress
from itertools import islice
from types import CellType, FunctionType, ModuleType

from torch import Tensor, nn

from hfpatch.compat import code_of_class
from hfpatch.context.classes import LIBRARIES, home_of

MOST = 2000  # objects that `reached` looks at
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
    """Whether the layer runs code of the user's own: its class's, or what was put in its place."""
    code = {one for m in layer.modules() for one in (type(m), *code_of_class(type(m)))}
    return not {home_of(one) for one in code - {None}} <= LIBRARIES


def reached(value) -> list:
    """What a forward may write to, flat, from the nearest on: a module's attributes, what the user's
    own code names, and what those hold. `wrote` compares it before and after a run."""
    found = []
    todo = deque([value])
    seen = set()
    while todo and len(found) < MOST:
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
        return [one._version]
    if isinstance(one, dict | list | tuple | set | deque):
        return [len(one), *islice(one.values() if isinstance(one, dict) else one, 99)]
    if isinstance(one, nn.Module):
        own = [c for c in type(one).__mro__ if home_of(c) not in LIBRARIES]
        methods = [x for c in own for x in vars(c).values()]
        return [*vars(one).values(), *code_of_class(type(one)), *methods]
    home = (
        one.__name__.partition(".")[0]
        if isinstance(one, ModuleType)
        else home_of(one if isinstance(one, type | FunctionType) else type(one))
    )
    if home in LIBRARIES:
        return []
    if not isinstance(one, FunctionType):
        return list(vars(one).values())
    named = [i.argval for i in dis.get_instructions(one) if i.opname == "LOAD_GLOBAL"]
    cells = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
    wrapped = getattr(one, "__wrapped__", None)
    return [*(one.__globals__.get(name) for name in named), *cells, one.__defaults__, wrapped]


def wrote(before: list, value) -> bool:
    """Whether something that `value` reaches was replaced, added, taken away or changed since."""
    now = reached(value)
    same = (x is y or type(x) is int and x == y for x, y in zip(now, before))
    return len(now) != len(before) or not all(same)
