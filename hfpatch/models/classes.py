"""A module gets its fused class by `module.__class__ = mixed(Part, type(module))`.

That is transformers' own class with a part mixed over it, of the same name and module, so that wrap policies, `save_pretrained`
(which writes experts as the hub has them for transformers' own classes alone) and whoever else reads names find what they look
for. Parameters, hooks and state_dict keys stay as they were, and the class
survives pickle and deepcopy.
"""

import copyreg
import inspect
from functools import cache, wraps

from torch import nn

from hfpatch.compat import record_outputs_like


def _rebuild(part: type, base: type):
    return (made := mixed(part, base)).__new__(made)


class Mixed:
    """What every mixed class knows: the class it was made from."""

    _hfpatch_base: type
    _hfpatch_part: type

    def __reduce_ex__(self, protocol):
        state = super().__reduce_ex__(protocol)
        # (copyreg.__newobj__, (cls,), state, ...): the class is made anew, what it holds is the object's own.
        assert state[0] is copyreg.__newobj__, "hfpatch: a module with a pickling of its own cannot be rebuilt"
        return _rebuild, (self._hfpatch_part, self._hfpatch_base), *state[2:]


@cache
def mixed(part: type, base: type) -> type:
    """The class of modules of class `base` with `part` over it."""
    made = type(
        base.__name__, (part, Mixed, base),
        {"_hfpatch_base": base, "_hfpatch_part": part, "__module__": base.__module__, "__doc__": base.__doc__},
    )  # fmt: skip
    record_outputs_like(made, base)
    return made


def swap(module: nn.Module, part: type) -> None:
    module.__class__ = mixed(part, type(module))


def is_mixed(module: nn.Module) -> bool:
    return isinstance(module, Mixed)


def unswap(module: nn.Module) -> None:
    """transformers' class again, under what another library (parametrize) may have put over ours meanwhile."""
    module.__class__ = _unmixed(type(module))


def _unmixed(cls: type) -> type:
    if "_hfpatch_base" in vars(cls):
        return cls._hfpatch_base
    members = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(_unmixed(b) if issubclass(b, Mixed) else b for b in cls.__bases__), members)


def whose(forward) -> str:
    """The module in which a forward on an instance (a trainer's, a kernel's of use_kernels) was written."""
    inner = getattr(forward, "__func__", forward)
    return getattr(inner, "__globals__", {}).get("__name__") or type(inner).__module__


def replaced_forward(module: nn.Module) -> str | None:
    """Whose forward this instance has in place of its class's; None where it has none."""
    forward = vars(module).get("forward")
    return None if forward is None else f"its forward is {whose(forward)}'s"


# --- forwards that know their caller's arguments by name ----------------------------------------------------------------


def keeps_signature(cls: type, part: type) -> None:
    """Gives cls a forward that hands on to `_hfpatch_forward(args, kwargs)` under the signature of the class below `part`.

    Trainer reads it to decide which columns of a dataset to keep.
    """
    base = next(c for c in cls.__mro__[1:] if "forward" in vars(c) and c is not part)

    @wraps(base.forward)
    def forward(self, *args, **kwargs):
        # A trainer may keep this bound method beyond undo().
        ours = hasattr(type(self), "_hfpatch_forward")
        return self._hfpatch_forward(args, kwargs) if ours else base.forward(self, *args, **kwargs)

    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = (n for n, p in inspect.signature(base.forward).parameters.items() if p.kind in kinds)
    cls.forward, cls._hfpatch_positional = forward, tuple(names)[1:]
