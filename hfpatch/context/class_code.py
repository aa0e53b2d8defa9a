"""The code that a class of modules runs: whether it changed since `apply`, and what it writes to."""

import inspect
from types import CellType, FunctionType

from torch import nn

from hfpatch.compat import code_of_class
from hfpatch.context.classes import LIBRARIES, home_of

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


def reached(value, depth: int = 4) -> list:
    """What a forward may write to besides tensors, flat: a module's attributes, and the objects that
    a user's own code names. `wrote` compares them before and after a run.

    value: a module, a function, or what these hold.
    """
    code = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    own = home_of(code if isinstance(code, type | FunctionType) else type(code)) not in LIBRARIES
    inner = ()
    if isinstance(code, dict | list | tuple | set):
        inner = code.values() if isinstance(code, dict) else code
    elif own and isinstance(code, FunctionType):
        inner = [code.__globals__.get(name) for name in code.__code__.co_names]
        inner += [cell.cell_contents for cell in code.__closure__ or () if cell != CellType()]
    elif isinstance(code, nn.Module):
        inner = [*vars(code).values(), *code_of_class(type(code))]
    elif own:
        inner = getattr(code, "__dict__", {}).values()
    found = [value]
    for each in inner if depth else ():
        found += reached(each, depth - 1)
    return found


def wrote(before: list, value) -> bool:
    """Whether something that `value` reaches was replaced, added or taken away since."""
    now = reached(value)
    return len(now) != len(before) or any(x is not y for x, y in zip(now, before))
