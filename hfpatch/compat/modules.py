"""Private names of torch: modules and trees."""

import inspect
from collections.abc import MutableMapping
from contextlib import contextmanager
from functools import partial
from operator import is_

from torch import Tensor, nn

from hfpatch.compat.engines import in_fsdp2, of_an_engine
from hfpatch.compat.tensors import gone


class _Compiled(MutableMapping):
    """Parameters or buffers of what torch.jit compiled, which keeps them in C++ and none of whose names come or go."""

    def __init__(self, table):
        self.table = table

    def __iter__(self):
        return iter(self.table.keys())

    def __len__(self):
        return len(self.table)

    def __getitem__(self, name):
        return self.table[name]

    def __setitem__(self, name, tensor):
        self.table[name] = tensor

    def __delitem__(self, name):
        del self.table[name]


def parameters_of(module: nn.Module) -> MutableMapping:
    """The module's own parameters by name, to read and to write. RuntimeError where torch keeps them otherwise."""
    try:
        table = module.__dict__["_parameters"]
    except KeyError:
        table = getattr(module, "_parameters", None)
    if table is None:
        raise gone("Module._parameters", "use another version")
    return table if type(table) is dict or isinstance(table, dict) else _Compiled(table)


def buffers_of(module: nn.Module) -> MutableMapping:
    """The same of buffers."""
    own = module.__dict__
    table = own["_buffers"] if "_buffers" in own else getattr(module, "_buffers", {})
    return table if type(table) is dict or isinstance(table, dict) else _Compiled(table)


_OTHER_HOOKS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS = ("_forward_hooks", *_OTHER_HOOKS)
_AROUND = (*_ALL_HOOKS, "forward")
_EVERYWHERE, _ON_ALL = vars(nn.modules.module), tuple(f"_global{n}" for n in _ALL_HOOKS)

# By what a module's forward goes another way from one call to the next, but for the first PEFT's; and every float of its own
# (rates of dropout, epsilons, multipliers). Engines count in its integers, which must go on.
_WAYS = ("training", "_disable_adapters", "_active_adapter", "scaling", "p", "dropout")
_SAYS = (bool, str, int, list, dict)  # no tensors: comparing those waits for the device

OF_ALL = vars(nn.Module()).keys()  # attributes of every module
_VALUES = (bool, int, float, str)


GONE = object()  # what an attribute is that was deleted, or not there


def ways_of(tables: list[dict]) -> list[tuple[dict, str, object]]:
    """How a layer's modules of these attributes, itself the first, go now: (where that stands, its name, a value of its own that
    says it)."""
    rows = [
        (own, n, v.copy() if v.__class__ in (dict, list) else v)
        for own in tables for n in _WAYS if n in own and (v := own[n]).__class__ in _SAYS
    ]  # fmt: skip
    rows += [(own, n, own[n]) for own in tables for n in own if type(own[n]) is float]
    around = _around(tables)
    return (
        rows + [(own, n, forward_in(own) if n == "forward" else own[n].copy()) for own, n in around] if around else rows
    )


def came_since(tables: list[dict], ways: list) -> list[tuple[dict, str, object]]:
    """The same of the hooks and forwards that modules inside a layer have now and had not when it went these ways."""
    now = _around(tables)
    if not now:
        return now
    known = {(id(own), n) for own, n, _ in ways}
    return [(own, n, GONE if n == "forward" else _but_users(own, n)) for own, n in now if (id(own), n) not in known]


def _around(tables: list[dict]) -> list[tuple[dict, str]]:
    """Where hooks on modules inside a layer of these tables stand, forwards on instances, and the user's hooks on all modules."""
    found = [(own, n) for own in tables[1:] for n in _AROUND if n in own and own[n]]
    for name in _ON_ALL:  # asked at every layer: without a call where there are none
        if name in _EVERYWHERE and _EVERYWHERE[name] and hooks_on_all():
            found.append((_EVERYWHERE, name))
    return found + [(own, n) for own, n in _flags_of(found) if n in own] if found else found


def _flags_of(found: list) -> list[tuple[dict, str]]:
    """Where torch says of such hooks whether they take keyword arguments, and run whatever happens."""
    return [(own, f"{n}_{what}") for own, n in found for what in ("with_kwargs", "always_called")]


def _but_users(own: dict, name: str) -> dict:
    """A table of hooks on one module empty, of hooks on all modules without the user's."""
    users = hooks_on_all() if own is _EVERYWHERE else [*own[name].values()]
    return type(own[name])((k, h) for k, h in own[name].items() if all(h is not user for user in users))


class _MadeFrom(dict):
    """Of a class that torch's FSDP or we made: the one that it was made from. Of what torch.jit compiled, whose class has no
    forward: one that has None."""

    def __missing__(self, kind: type) -> type:
        base = next(c for c in kind.__mro__ if not c.__module__.startswith("torch.distributed"))
        base = vars(base).get("_hfpatch_base", base)
        if not hasattr(base, "forward"):
            base = type(base.__name__, (), {"__module__": base.__module__, "forward": None})
        self[kind] = base
        return base


MADE_FROM = _MadeFrom()


class Standing:
    """All that stands in a layer's modules, the layer first, one deep and but for one object of the layer's: classes and their
    forwards, attributes, what containers hold; of parameters and buffers the names alone. Compared by identity, without a call of
    Python's an attribute."""

    __slots__ = ("kinds", "rows")

    def __init__(self, modules: list[nn.Module], but: object):
        kinds, self.rows = {m.__class__ for m in modules}, []
        self.kinds = [(k, getattr(k, "forward", None)) for k in kinds | {MADE_FROM[k] for k in kinds}]
        for module in modules:
            own = module.__dict__
            tables = [v for v in own.values() if isinstance(v, (dict, list, set))]
            filled = [(t, [*t], _values_in(t, own)) for t in tables if t]
            values = [None if v is but else v for v in own.values()]
            self.rows.append((module.__class__, [*own], values, [t for t in tables if not t], filled))

    def hold(self, modules: list[nn.Module], but: object) -> bool:
        """Whether the same stands in the same modules now."""
        for kind, forward in self.kinds:
            if getattr(kind, "forward", None) is not forward:
                return False
        layer = modules[0]
        for module, (kind, names, values, empty, filled) in zip(modules, self.rows):
            own = module.__dict__
            if module.__class__ is not kind or len(own) != len(names) or any(empty):
                return False
            now = [None if v is but else v for v in own.values()] if module is layer else own.values()
            if not (all(map(is_, now, values)) and [*own] == names):
                return False
            for table, keys, held in filled:
                if len(table) != len(keys) or not all(map(is_, table, keys)):
                    return False
                if held is not None and not all(map(is_, table.values(), held)):
                    return False
        return True

    def tensors(self) -> bool:
        """Whether a tensor is among it, which it would keep alive."""
        held = [
            v
            for _, _, values, _, filled in self.rows
            for part in (values, *(p for t in filled for p in t[1:]))
            for v in part or ()
        ]
        return any(isinstance(v, Tensor) for v in held)


def _values_in(table, own: dict) -> list | None:
    tensors = table is own.get("_parameters") or table is own.get("_buffers")
    return None if tensors or not isinstance(table, dict) else [*table.values()]


def settings_of(own: dict) -> tuple:
    """What a module with these attributes may branch on, but for torch's and engines' own."""
    return tuple([(n, v) for n, v in own.items() if type(v) in _VALUES and n not in OF_ALL and not of_an_engine(n)])


def forward_in(own: dict):
    """The forward on the instance of these attributes, GONE where it has its class's; not what a thread set there for a moment."""
    held = own["forward"] if "forward" in own else None
    held = getattr(held, "_hfpatch_before", held)
    return GONE if held is None else held


def merged_into(tables: list[dict]) -> list[int]:
    """How many adapters are merged into the weights of modules of these attributes, by PEFT, which writes past their versions."""
    return [len(own["merged_adapters"]) for own in tables if "merged_adapters" in own]


def modules_of(module: nn.Module) -> dict:
    """The module's children by name, those that are None too."""
    own = module.__dict__
    return own["_modules"] if "_modules" in own else dict(module.named_children())


def submodule(module: nn.Module, path: str) -> nn.Module:
    """module.get_submodule(path); AttributeError where there is none."""
    for name in path.split("."):
        below = modules_of(module).get(name)
        module = module.get_submodule(name) if below is None else below
    return module


def compiled_by_itself(module: nn.Module) -> bool:
    """Whether module.compile() was called: its calls run that, and no forward of a class that was put over it since."""
    return getattr(module, "_compiled_call_impl", None) is not None


def modules_in(module: nn.Module) -> list[nn.Module]:
    """module.modules(), whose names take longer than a small layer's matmuls."""
    found = {module: None}
    _walk(modules_of(module), found)
    return list(found)


def _walk(children: dict, found: dict) -> None:
    # Not a function within the other: that would hold itself and, until the collector comes, the modules.
    for child in children.values():
        if child is not None and child not in found:
            found[child] = None
            own = child.__dict__
            below = own["_modules"] if "_modules" in own else modules_of(child)
            if below:
                _walk(below, found)


def twin_of(module: nn.Module, modules: dict) -> nn.Module:
    """A module of the same class and settings without parameters, with other children."""
    twin = module.__class__.__new__(module.__class__)
    vars(twin).update(vars(module))
    vars(twin).update(_parameters={}, _modules=dict(modules))
    return twin


def forward_hooks(module: nn.Module) -> list:
    """Hooks that run behind the module's forward."""
    return _hooks(module, ("_forward_hooks",))


def other_hooks(module: nn.Module) -> list:
    """Hooks that run before the module's forward, and around its backward."""
    return _hooks(module, _OTHER_HOOKS)


def output_hooks(module: nn.Module) -> list:
    """Hooks that are given what the module's forward gives, or a gradient of it."""
    return _hooks(module, ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"))


def _hooks(module: nn.Module, names: tuple[str, ...]) -> list:
    own, found = module.__dict__, []
    for name in names:
        if name in own and own[name]:
            found += own[name].values()
    return found


_SERVE_ANY_OUTPUT = ("torch.distributed.", "deepspeed.", "accelerate.", "transformers.", "hfpatch.")
_GATHER = "torch.distributed.fsdp."


def _home(hook) -> str:
    """The module in which a hook was written, with a dot behind it."""
    while isinstance(hook, partial):
        hook = hook.func
    inner = inspect.unwrap(getattr(hook, "__func__", hook))
    return f"{getattr(inner, '__globals__', {}).get('__name__') or type(inner).__module__}."


def user_hooks(module: nn.Module, hooks=None) -> list:
    """Hooks on this module (or of `hooks`) but for those of engines and transformers, which read no values."""
    hooks = _hooks(module, _ALL_HOOKS) if hooks is None else hooks
    return [h for h in hooks if not _home(h).startswith(_SERVE_ANY_OUTPUT)]


def hooks_on_all() -> list:
    """The user's hooks on every module of the process; torch's own (module trackers) count, and read no values."""
    found = []
    for name in _ON_ALL:  # asked at every tile: without a call where there are none
        if name in _EVERYWHERE and _EVERYWHERE[name]:
            found += _EVERYWHERE[name].values()
    return [h for h in found if not _home(h).startswith((*_SERVE_ANY_OUTPUT, "torch."))] if found else found


def watched(modules: list[nn.Module]) -> bool:
    """Whether anything hooks one of these modules, or all modules of the process: a user, an engine, torch."""
    # Asked at every layer: without a call where there are none.
    found = [n for n in _ON_ALL if n in _EVERYWHERE and _EVERYWHERE[n]]
    return bool(found or [n for m in modules for n in _ALL_HOOKS if n in m.__dict__ and m.__dict__[n]])


def watched_by_user(modules: list[nn.Module]) -> nn.Module | None:
    """The first of these modules that has such a hook."""
    if hooks_on_all():
        return next(iter(modules), None)
    hooked = [m for m in modules for n in _ALL_HOOKS if n in m.__dict__ and m.__dict__[n]]
    return next((m for m in hooked if user_hooks(m)), None) if hooked else None


def fsdp2_units(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of these modules that torch's FSDP2 gathers and reduces by themselves."""
    hooked = [m for m in modules if "_forward_pre_hooks" in m.__dict__ and m.__dict__["_forward_pre_hooks"]]
    return [m for m in hooked if in_fsdp2(m)] if hooked else hooked


@contextmanager
def unwatched(modules: list[nn.Module]):
    """Within, no such hook of these modules runs, nor FSDP2's, nor any on their parameters, nor any on all modules of the process.
    What FSDP2 gathers for modules inside the first of them is there."""
    noted_on_all = {n: _EVERYWHERE[n] for n in _ON_ALL if _EVERYWHERE.get(n)}
    units = fsdp2_units(modules[1:])
    tables = [(m.__dict__, n, m.__dict__[n]) for m in modules for n in _ALL_HOOKS if m.__dict__.get(n)]
    parameters = [p for m in modules for p in parameters_of(m).values() if getattr(p, "_backward_hooks", None)]
    noted = [(p, p._backward_hooks) for p in dict.fromkeys(parameters)]
    for own, name, hooks in tables:
        homes = [(key, h, _home(h)) for key, h in hooks.items()]
        stay = [(k, h) for k, h, home in homes if home.startswith(_SERVE_ANY_OUTPUT) and not home.startswith(_GATHER)]
        own[name] = type(hooks)(stay)
    for parameter, _ in noted:
        parameter._backward_hooks = None
    _EVERYWHERE.update({n: type(hooks)() for n, hooks in noted_on_all.items()})
    try:
        for unit in units:
            unit.unshard()
        yield
    finally:
        _EVERYWHERE.update(noted_on_all)
        for own, name, hooks in tables:
            own[name] = hooks
        for parameter, hooks in noted:
            parameter._backward_hooks = hooks
        for unit in units:
            unit.reshard()


def pytree():
    """torch's functions over nested containers. RuntimeError where gone."""
    try:
        from torch.utils import _pytree
    except ImportError:
        raise gone("torch.utils._pytree", "use another version") from None
    return _pytree
