"""What modules keep from one call to the next: set apart while a layer is asked, and seen where a call writes to it.

Nothing here asks as what a module of the user's own keeps it: all that its code reaches is noted.
"""

import dis
import functools
import io
import itertools
import random
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hfpatch.compat import (
    MADE_FROM,
    OF_ALL,
    buffers_of,
    forward_in,
    is_sharded_by_zero3,
    of_an_engine,
    parameters_of,
    version,
)
from hfpatch.models.classes import IS_USERS, LIBRARIES, home_of

# What one module reaches may be the whole program: no more objects are looked at, nearest first, and no larger
# tensors and arrays copied.
MOST_OBJECTS, MOST_NUMBERS = 2_000, 2**24
_ATOMS = int, float, complex, bool, str, bytes, type(None), type, types.ModuleType
_WIDE = torch.float64, torch.float32, torch.bfloat16, torch.float16
_STATES = ("get_state", "set_state"), ("getstate", "setstate")  # of what draws random numbers
# Those of the process, by their modules.
_DRAWN = (random, random.random), (np, np.random.rand), (np.random, np.random.rand)


class CannotBeSetApart(Exception):
    """Its message says what in a layer would be another once the layer was asked."""


def _same(before: list, now: list) -> bool:
    """Whether these are the same objects in the same order, or numbers and words that are equal."""
    pairs = itertools.zip_longest(before, now, fillvalue=_same)
    return all(a is b or type(a) is type(b) and isinstance(a, _ATOMS) and a == b for a, b in pairs)


class _Noted:
    """What is reached from some modules and may be written to: rows of (name, what it holds now as a list, that list before, what
    puts that back)."""

    def __init__(self):
        self.rows, self.seen, self.todo = [], {}, deque()

    def written(self):
        """Rows whose contents are other ones now."""
        return [row for row in self.rows if not _same(row[2], row[1]())]

    def reach(self, name: str, *objects) -> None:
        """Notes these, and what they reach."""
        self.todo += [(name, x) for x in objects if not isinstance(x, _ATOMS)]

    def walk(self) -> None:
        most = len(self.seen) + MOST_OBJECTS  # beside the layer's own modules
        while self.todo and len(self.seen) < most:
            name, x = self.todo.popleft()
            if id(x) not in self.seen:
                self.seen[id(x)] = x  # held: an id is another's once its object is gone
                try:
                    self._look(name, x)
                except CannotBeSetApart:
                    raise
                except Exception as error:  # objects of anybody's
                    raise CannotBeSetApart(f"what {name} holds cannot be looked at ({type(error).__name__})") from error

    def _note(self, name: str, contents, put) -> None:
        before = contents()
        self.rows.append((name, contents, before, put))
        self.reach(name, *before)

    def names(self, name: str, holder, table, wanted=lambda n, v: True) -> None:
        """What a holder, a dict or an object with attributes, has by the names that are `wanted`; table() gives all of them."""
        put, drop = functools.partial(setattr, holder), functools.partial(delattr, holder)
        if isinstance(holder, dict):
            put, drop = holder.__setitem__, holder.__delitem__
        now = lambda: {n: v for n, v in table().items() if wanted(n, v)}  # noqa: E731
        before = now()

        def which():
            found = now()
            return next((n for n in {**before, **found} if not _same([before.get(n, now)], [found.get(n, now)])), "")

        def put_back(_):
            for n in now().keys() - before.keys():
                drop(n)
            for n, v in before.items():
                put(n, v)

        pairs = lambda: [*itertools.chain(*now().items())]  # noqa: E731
        self.rows.append((lambda: f"{name}.{which()}".lstrip("."), pairs, pairs(), put_back))
        for n, v in before.items():
            self.reach(f"{name}.{n}".lstrip("."), v)

    def attributes(self, name: str, x, wanted=lambda n, v: True) -> None:
        own = vars(x)  # past what nn.Module makes of names
        self.names(name, own, lambda: own, wanted)

    def _look(self, name: str, x) -> None:
        kind = type(x)
        if isinstance(x, nn.Module):
            self.module(name, x)
        elif isinstance(x, Tensor):
            self._tensor(name, x)
        elif isinstance(x, dict):
            self._note(
                name,
                lambda: [*x, *x.values()],
                lambda b: (x.clear(), x.update(zip(b[: len(b) // 2], b[len(b) // 2 :]))),
            )
        elif isinstance(x, (list, deque)):
            self._note(name, lambda: [*x], lambda b: (x.clear(), x.extend(b)))
        elif isinstance(x, set):
            self._note(name, lambda: [*x], lambda b: (x.clear(), x.update(b)))
        elif isinstance(x, (tuple, frozenset)):
            self.reach(name, *x)
        elif isinstance(x, types.CellType):
            self.names(name, x, lambda: {n: getattr(x, n) for n in ("cell_contents",) if _filled(x)})
        elif isinstance(x, types.FunctionType):
            self._function(name, x)
        elif isinstance(x, (types.MethodType, types.BuiltinMethodType, functools.partial, staticmethod)):
            parts = ("__self__", "__func__", "func", "args", "keywords")
            self.reach(name, *[getattr(x, part) for part in parts if hasattr(x, part)])
        elif isinstance(x, io.IOBase):  # a log, or what print() goes to
            if not x.closed and x.seekable():
                at = x.tell()
                self._note(name, lambda: [x.closed or x.tell()], lambda _: x.closed or x.writable() or x.seek(at))
        elif isinstance(x, Iterator) and not IS_USERS[kind]:
            raise CannotBeSetApart(f"what {name} gives next cannot be put back ({kind.__name__})")
        elif hasattr(kind, "__array__") and hasattr(kind, "tobytes"):
            if x.size <= MOST_NUMBERS:  # larger ones are data, and may be files
                copy = x.copy()
                self._note(name, lambda: [x.tobytes()], lambda _: x.__setitem__(..., copy))
        elif states := next((pair for pair in _STATES if all(hasattr(kind, n) for n in pair)), None):
            self._drawn(name, getattr(x, states[0]), getattr(x, states[1]))
        elif bits := getattr(x, "bit_generator", None) if kind is np.random.Generator else None:
            self._drawn(name, lambda: bits.state, functools.partial(setattr, bits, "state"))
        elif IS_USERS[kind]:
            slots = [n for c in kind.__mro__ for n, v in vars(c).items() if isinstance(v, types.MemberDescriptorType)]
            self.names(name, x, lambda: {n: getattr(x, n) for n in slots if hasattr(x, n)})
            self.kinds(name, kind)
        if (
            hasattr(x, "__dict__")
            and (IS_USERS[kind] or isinstance(x, (dict, types.SimpleNamespace)))
            and not isinstance(x, nn.Module)
        ):
            self.attributes(name, x)

    def _drawn(self, name: str, read, put) -> None:
        state = read()
        self._note(name, lambda: [str([*s] if isinstance(s := read(), Tensor) else s)], lambda _: put(state))

    def _tensor(self, name: str, x: Tensor) -> None:
        plain = type(x) in (Tensor, nn.Parameter) and not x.requires_grad and x.numel() <= MOST_NUMBERS
        copy = x.detach().clone() if plain else None

        def put(_):
            if copy is not None:
                with torch.no_grad():
                    x.copy_(copy)

        self._note(name, lambda: [str(x.sum().item()) if x.is_inference() else version(x)], put)

    def _function(self, name: str, function) -> None:
        """What stands around it and, where it is the user's, what of its file it names."""
        self.reach(name, *function.__closure__ or (), function.__defaults__, function.__kwdefaults__)
        if home_of(function) not in LIBRARIES:
            own, named = function.__globals__, _named(function.__code__)
            found = {id(own[n]) for n in named if n in own}
            self.reach("random numbers", *[draw.__self__ for module, draw in _DRAWN if id(module) in found])
            self.names(name, own, lambda: {n: own[n] for n in named if n in own})

    def kinds(self, name: str, kind: type) -> None:
        """What the user's among these classes hold for all their instances."""
        plain = lambda n, v: not n.startswith("__") and not hasattr(v, "__get__")  # noqa: E731
        for c in kind.__mro__:
            if IS_USERS[c] and id(c) not in self.seen:
                self.seen[id(c)] = c
                self.names(name, c, lambda c=c: vars(c), plain)
                self.reach(name, *[v for v in vars(c).values() if isinstance(v, (types.FunctionType, staticmethod))])

    def module(self, name: str, module: nn.Module) -> None:
        """What a module of the user's keeps; of others, what a forward of the user's in their place does."""
        forward = forward_in(vars(module))
        self.reach(name, MADE_FROM[type(module)].forward, forward)
        if IS_USERS[MADE_FROM[type(module)]]:
            self.attributes(name, module, lambda n, v: n not in OF_ALL and not of_an_engine(n))
            for n, p in parameters_of(module).items():
                self.reach(f"{name}.{n}".lstrip("."), p)
            self.kinds(name, type(module))


def _filled(cell) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


@functools.cache
def _named(code) -> set[str]:
    """The names of its file that a function's code has, and that within it; those of attributes are none (`.data`, `.model`)."""
    inner = [_named(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if "_GLOBAL" in i.opname or "_NAME" in i.opname}
    return own.union(*inner)


def _is_zero(p: Tensor | None) -> bool:
    here = type(p) is nn.Parameter and p.dtype in _WIDE and not p.is_meta and not is_sharded_by_zero3(p)
    return here and not p.detach().any()


@contextmanager
def state_apart(layer: nn.Module):
    """Within, the layer's modules that have buffers write to copies of them, as in training, and modules of the user's own keep
    what they like; weights that are zero yet (gates, what adapters end in) have values, for they hide what they weigh. Yields a
    function, which gives the names of what was written to. CannotBeSetApart where that is not to be."""
    noted, own = _Noted(), []
    for name, module in layer.named_modules():
        noted.seen[id(module)] = module
        noted.module(name, module)
        if buffers_of(module) or IS_USERS[MADE_FROM[type(module)]]:
            own.append((name, module, module.training, dict(buffers_of(module))))
    noted.walk()
    zeros = [(parameters_of(m), n, p) for m in layer.modules() for n, p in parameters_of(m).items() if _is_zero(p)]
    with torch.inference_mode(False):  # whose tensors count no writes
        others = [nn.Parameter(torch.randn_like(p) / 8, p.requires_grad) for *_, p in zeros]
        copied = [{n: b if b is None else b.detach().clone() for n, b in buffers.items()} for *_, buffers in own]
    for (_, module, _, _), copies in zip(own, copied):
        buffers_of(module).update(copies)
        module.training = True
    for (table, name, _), other in zip(zeros, others):
        table[name] = other

    def written():
        for (name, module, _, _), copies in zip(own, copied):
            for n, b in copies.items():
                if buffers_of(module).get(n) is not b or b is not None and version(b):
                    yield f"{name}.{n}".lstrip(".")
        yield from (name if isinstance(name, str) else name() for name, *_ in noted.written())

    try:
        yield written
    finally:
        for table, name, parameter in zeros:
            table[name] = parameter
        for _, module, training, buffers in own:
            buffers_of(module).update(buffers)
            module.training = training
        for _, _, before, put in noted.written():
            put(before)
