"""Private names of torch: modules and trees."""

import inspect
import sys
from contextlib import contextmanager
from copy import copy
from functools import partial

from torch import nn


def parameters_of(module: nn.Module) -> dict:
    """The module's own parameters by name, to read and to write."""
    return module.__dict__["_parameters"]


def buffers_of(module: nn.Module) -> dict:
    """The module's own buffers by name."""
    return module.__dict__["_buffers"]


_OTHER_HOOKS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS = ("_forward_hooks", *_OTHER_HOOKS)
_EVERYWHERE = vars(nn.modules.module)
_ON_ALL = tuple(f"_global{n}" for n in _ALL_HOOKS)

# Attributes that change the course of a module's forward, which a backward restores: training or
# not, and which of PEFT's adapters are on.
_SWITCHES = ("training", "_disable_adapters", "_active_adapter")

OF_ALL = vars(nn.Module()).keys()  # attributes of every module


GONE = object()  # the value of a deleted or missing attribute


def switches_of(modules: list[nn.Module]) -> list[tuple[dict, str, object]]:
    """The switches of a layer's modules, of which the layer is the first: (the dict that holds a
    switch, its name, its value).
    """
    rows = []
    for module in modules:
        own = module.__dict__
        for name in _SWITCHES:
            if name in own and own[name].__class__ in (bool, str, list):
                value = own[name]
                rows.append((own, name, value.copy() if value.__class__ is list else value))
    return rows


class _MadeFrom(dict):
    """Maps a class that torch's FSDP or we made to its base class."""

    def __missing__(self, kind: type) -> type:
        base = next(c for c in kind.__mro__ if not c.__module__.startswith("torch.distributed"))
        self[kind] = vars(base).get("_hfpatch_base", base)
        return self[kind]


MADE_FROM = _MadeFrom()


def code_of_class(kind: type) -> tuple:
    """A class's forward, and the rotation and the attention of its file, which some libraries replace
    process-wide."""
    file = sys.modules.get(kind.__module__)
    return (
        MADE_FROM[kind].forward,
        getattr(file, "apply_rotary_pos_emb", None),
        getattr(file, "eager_attention_forward", None),
    )


class Snapshot:
    """The structure of a layer and the modules in it: children, classes, forwards, rotations,
    hooks, merged adapters, and the names of their tensors.

    Numbers (rates, epsilons, scales) are not part of it: a module's call reads them. Flat lists,
    since every forward compares them. Nothing here refers to the layer, which may own this
    snapshot.

    Attributes:
        inside: the modules in the layer, without the layer.
        ran: the code that a backward must run as its forward did: the forward of each class, and
            the user's hooks and forwards inside the layer, each behind its module. Those of
            libraries come and go within a step, so they are left out.
        merged: the number of adapters that PEFT merged, for each module that can merge some. The
            versions of weights do not show a merge.
    """

    __slots__ = ("inside", "made_of", "ran", "merged")

    def __init__(self, layer: nn.Module):
        self.inside = modules_in(layer)[1:]
        self.made_of, self.merged = self._read(layer)
        kinds = {module.__class__: None for module in (layer, *self.inside)}
        self.ran = [MADE_FROM[kind].forward for kind in kinds]
        for module in self.inside:
            code = _hooks(module, _ALL_HOOKS)
            if "forward" in module.__dict__:
                code.append(module.__dict__["forward"])
            for x in code:
                if not _home(x).startswith(_LIBRARIES):
                    self.ran += (module, x)

    def _read(self, layer: nn.Module) -> tuple[list, list]:
        made_of = []
        merged = []
        kinds = {}
        for module in (layer, *self.inside):
            own = module.__dict__
            kind = module.__class__
            made_of += modules_of(module).values()
            made_of.append(kind)
            kinds[kind] = None
            if "forward" in own:
                made_of.append(_code_of(own["forward"]))
            made_of += parameters_of(module)
            made_of += buffers_of(module)
            if "merged_adapters" in own:
                merged.append(len(own["merged_adapters"]))
            for name in _ALL_HOOKS:
                if name in own and own[name]:
                    # By their handles' numbers too, which are given once: the same function may
                    # come on another module, and a new one in the place of one that is gone.
                    made_of += (*own[name], *map(id, own[name].values()))
        for kind in kinds:
            made_of.append(getattr(kind, "forward", None))
            made_of += code_of_class(kind)
        return made_of, merged

    def holds(self, layer: nn.Module) -> bool:
        """Whether the layer still has the structure of this snapshot."""
        return self._read(layer) == (self.made_of, self.merged)

    def runs_alike(self, layer: nn.Module) -> bool:
        """Whether a backward that runs the layer again runs the code of its forward."""
        if self.holds(layer):
            return True
        now = Snapshot(layer)
        return now.merged == self.merged and now.ran == self.ran


def _code_of(forward):
    """The code that a forward on an instance runs. Not the forward itself: its closure may hold the
    layer that holds this snapshot.
    """
    inner = inner_function(forward)
    return getattr(inner, "__code__", type(inner))


def inner_function(code):
    """The function beneath partials and a bound method."""
    while isinstance(code, partial):
        code = code.func
    return getattr(code, "__func__", code)


def modules_of(module: nn.Module) -> dict:
    """The module's children by name, including those that are None."""
    own = module.__dict__
    return own["_modules"] if "_modules" in own else dict(module.named_children())


def compiled_by_itself(module: nn.Module) -> bool:
    """Whether module.compile() was called. Calls then run the compiled code, and ignore a class
    that was mixed in later.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def modules_in(module: nn.Module) -> list[nn.Module]:
    """module.modules(), but faster: there the names take longer than a small layer's matmuls."""
    seen = {}
    todo = [module]
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen[one] = None
            todo += reversed(modules_of(one).values())
    return list(seen)


def twin_of(module: nn.Module, modules: dict) -> nn.Module:
    """A module of the same class and settings, without parameters and with other children."""
    twin = module.__class__.__new__(module.__class__)
    # Containers are copied, because its forward may write to them.
    vars(twin).update(
        {n: copy(x) if type(x) in (dict, list, set) else x for n, x in vars(module).items()},
        _parameters={},
        _modules=dict(modules),
    )
    return twin


def forward_hooks(module: nn.Module) -> list:
    """Hooks that run after the module's forward."""
    return _hooks(module, ("_forward_hooks",))


def other_hooks(module: nn.Module) -> list:
    """Hooks that run before the module's forward, and around its backward."""
    return _hooks(module, _OTHER_HOOKS)


def output_hooks(module: nn.Module) -> list:
    """Hooks that receive the output of the module's forward, or its gradient."""
    return _hooks(module, ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"))


def _hooks(module: nn.Module, names: tuple[str, ...]) -> list:
    own = module.__dict__
    hooks = []
    for name in names:
        if name in own and own[name]:
            hooks += own[name].values()
    return hooks


_SERVE_ANY_OUTPUT = ("torch.distributed.", "deepspeed.", "accelerate.", "transformers.", "hfpatch.",
                     "bitsandbytes.nn.parametrize.")  # fmt: skip
# Hooks and forwards of these libraries come and go within a step.
_LIBRARIES = (*_SERVE_ANY_OUTPUT, "torch.", "peft.", "trl.")


def _home(hook) -> str:
    """The module that defines a hook, followed by a dot."""
    inner = inspect.unwrap(inner_function(hook))
    return f"{getattr(inner, '__globals__', {}).get('__name__') or type(inner).__module__}."


def user_hooks(hooks) -> list:
    """Those of hooks that are not engines' and transformers', which read no values."""
    return [h for h in hooks if not _home(h).startswith(_SERVE_ANY_OUTPUT)]


def hooks_on_all() -> list:
    """The user's hooks on every module of the process. torch's own (module trackers) are left out:
    they read no values.
    """
    hooks = []
    for name in _ON_ALL:  # every tile runs this: no call if there are no hooks
        if _EVERYWHERE[name]:
            hooks += _EVERYWHERE[name].values()
    return [h for h in hooks if not _home(h).startswith((*_SERVE_ANY_OUTPUT, "torch."))]


def watched_by_user(modules: list[nn.Module]) -> nn.Module | None:
    """The first of these modules with a user's hook, or None."""
    for module in modules:
        for name in _ALL_HOOKS:
            hooks = module.__dict__.get(name)
            if hooks and user_hooks(hooks.values()):
                return module


def put(table: dict, name: str, value) -> None:
    """Sets an attribute in the dict that holds it; GONE removes it."""
    if value is GONE:
        table.pop(name, None)
    else:
        table[name] = value


@contextmanager
def values_for_now(rows: list[tuple[dict, str, object]]):
    """A context in which table[name] is value, for each of these (table, name, value) rows."""
    before = []
    try:
        try:
            for table, name, value in rows:
                before.append((table, name, table.get(name, GONE)))
                put(table, name, value)
            yield
        finally:
            _put_back(before)
    except BaseException:  # Ctrl-C as they go back: a forward that stayed would compute nothing
        _put_back(before)
        raise


def _put_back(before: list[tuple[dict, str, object]]) -> None:
    for row in reversed(before):  # a row may name what one before it set
        put(*row)


def unwatched():
    """A context in which no hook on all modules of the process runs."""
    return values_for_now([(_EVERYWHERE, name, type(_EVERYWHERE[name])()) for name in _ON_ALL])
