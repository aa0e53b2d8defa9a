"""A module gets its fused class by `module.__class__ = mixed(Part, type(module))`.

The result is transformers' own class with a part mixed over it, of the same name and module. Code
that looks for classes by name finds it: wrap policies, and `save_pretrained`, which writes experts
in the hub's layout for transformers' own classes alone. Parameters, hooks and state_dict keys stay
the same, and the class survives pickle and deepcopy.
"""

import copyreg
import inspect
import sys
import types
from functools import cache, wraps

import torch
from torch import nn

from hfpatch.compat import (
    MADE_FROM,
    Turn,
    code_of_class,
    hooks_on_all,
    inner_function,
    members_of,
    modules_in,
    values_for_now,
    watched_by_user,
)
from hfpatch.context.current import asks_for, refuse_in_the_midst


def _rebuild(part: type, base: type):
    made = mixed(part, base)
    return made.__new__(made)


class Mixed:
    """Base of every mixed class: records the class that it was made from."""

    _hfpatch_base: type
    _hfpatch_part: type
    _hfpatch_code: object  # the base's forward at that time; a later forward is another library's

    def __reduce_ex__(self, protocol):
        state = super().__reduce_ex__(protocol)
        # state is (copyreg.__newobj__, (cls,), state, ...): _rebuild makes the class again, and the
        # rest is the instance's own.
        assert state[0] is copyreg.__newobj__, (
            "hfpatch: a module with a pickling of its own cannot be rebuilt"
        )
        return _rebuild, (self._hfpatch_part, self._hfpatch_base), *state[2:]


def mixed(part: type, base: type) -> type:
    """The class for modules of class `base`, in its current form, with `part` over it."""
    return _mixed(part, base, base.forward)


@cache
def _mixed(part: type, base: type, forward) -> type:
    # transformers finds the outputs to record by the class's full name.
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours = {"_hfpatch_base": base, "_hfpatch_part": part, "_hfpatch_code": forward}
    return type(base.__name__, (part, Mixed, base), same | ours)


def inner_model(module: nn.Module) -> nn.Module | None:
    """The outermost transformers model in another library's module, or None."""
    inside = (m for m in module.modules() if m is not module)
    return next((m for m in inside if hasattr(vars(m).get("config"), "model_type")), None)


def not_a_model(came) -> ValueError:
    """The error for an argument that is no model."""
    name = f"the class {came.__name__}" if isinstance(came, type) else type(came).__name__
    return ValueError(
        f"hfpatch: model must be a transformers model (with a config), got {name}. "
        "Pass the model that from_pretrained() or from_config() returned, before another "
        "library wraps or shards it."
    )


def expect_module(model) -> None:
    """Raises ValueError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise not_a_model(model)


def swap(module: nn.Module, part: type) -> None:
    module.__class__ = mixed(part, type(module))


def is_patched(module: nn.Module) -> bool:
    """Whether the module has a class of hfpatch mixed over its own."""
    return isinstance(module, Mixed)


def unswap(module: nn.Module) -> None:
    """Restores transformers' class, also beneath a class that another library (parametrize) put
    over ours.
    """
    module.__class__ = _unmixed(type(module))


def _unmixed(cls: type) -> type:
    if "_hfpatch_base" in vars(cls):
        return cls._hfpatch_base
    bases = tuple(_unmixed(b) if issubclass(b, Mixed) else b for b in cls.__bases__)
    return type(cls.__name__, bases, members_of(cls))


# Libraries whose replacements of nn.Linear are projections: they compute each token by itself.
PROJECTIONS = {
    "torch", "torchao", "transformers", "deepspeed", "hfpatch",
    "aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "gptqmodel", "hqq",
    "optimum", "vptq",
}  # fmt: skip
# Libraries whose modules and forwards in a layer are known: they keep state of their calls only in
# buffers.
LIBRARIES = PROJECTIONS | sys.stdlib_module_names | {
    "accelerate", "causal_conv1d", "fla", "flash_attn", "kernels", "liger_kernel", "mamba_ssm",
    "peft", "transformer_engine", "trl",
}  # fmt: skip

# Torch's own, from before any replacement.
LINEAR = nn.Linear.forward
CALL = nn.Linear.__call__


def whose(code) -> str:
    """The module that defines a class, a function, or a forward on an instance (a trainer's, or a
    kernel of use_kernels).

    The attributes that functools.wraps() copies do not change the answer.
    """
    inner = inner_function(code)
    if isinstance(inner, types.FunctionType):
        return inner.__globals__.get("__name__") or ""
    if hasattr(inner, "__wrapped__") and not isinstance(inner, type):
        inner = type(inner)
    return getattr(inner, "__module__", None) or ""


def home_of(code) -> str:
    """The package of the module that `whose` returns."""
    return whose(code).partition(".")[0]


def replaced_forward(module: nn.Module) -> str | None:
    """A phrase that names the module of this instance's own forward; None without one."""
    forward = vars(module).get("forward")
    return None if forward is None else f"its forward is {whose(forward)}'s"


def other_forward(module: nn.Module) -> bool:
    """Whether a call of this instance runs another forward than its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def package_of(module: nn.Module) -> str:
    """The package that defines the module's class, beneath a class that torch's FSDP made."""
    return home_of(MADE_FROM[type(module)])


def is_watched(model, kwargs) -> bool:
    """Whether a hook, the caller, or a forward that is not transformers' own may read hidden
    states."""
    inside = [m for m in modules_in(model)[1:] if not isinstance(m, nn.Embedding)]
    # Runs in every forward: each class is looked at once, and no function is called for a module.
    code = {m.__dict__["forward"] for m in inside if "forward" in m.__dict__}
    kinds = {MADE_FROM[kind] for kind in {type(m) for m in (model, *inside)}}
    code |= {x for kind in kinds for x in (kind, *code_of_class(kind)) if x is not None}
    code |= {*map(inspect.unwrap, code)}  # what is beneath decorators
    own = package_of(model) != "transformers" or not LIBRARIES.issuperset(map(home_of, code))
    if own or hooks_on_all() or watched_by_user(inside) is not None:
        return True
    return asks_for("output_hidden_states", model, kwargs)


# --- forwards for a moment ------------------------------------------------------------------------


def forwards_for_now(pairs):
    """A context in which each module of these (module, forward) pairs runs that forward.

    The caller holds the model's lock.
    """
    return values_for_now([(module.__dict__, "forward", forward) for module, forward in pairs])


# --- forwards that keep the signature of transformers' own ----------------------------------------


def _by_position(forward) -> list[str]:
    """The names of a forward's arguments that may come by position, behind self; none if one of them
    may come in no other way."""
    _, *taken = inspect.signature(forward).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY for p in taken):
        return []
    return [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]


class KeepsSignature:
    """Mixed over a model's class: gives the class a forward that holds the model's lock while it
    calls `_hfpatch_forward(kwargs)`, and that keeps the original signature.

    Trainer reads the signature to decide which columns of a dataset to keep. The lock lets one
    thread at a time into a model, because a forward changes the model's attributes while it runs;
    under torch.compile there is no lock.

    `_hfpatch_turn`: the lock. Instances that apply() has not seen share one.
    `_hfpatch_takes`: the names of the forward's arguments; None where it takes any.
    """

    _hfpatch_turn = Turn()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        forwards = [vars(c)["forward"] for c in cls.__mro__[1:] if "forward" in vars(c)]
        if not forwards:  # a part that is not mixed over a model yet
            return
        base = forwards[0]

        @wraps(base)
        def forward(self, *args, **kwargs):
            # A trainer may keep this bound method beyond undo(). Arguments without a known name reach
            # the model's own forward as they are, which refuses too many.
            if not hasattr(type(self), "_hfpatch_forward") or len(args) > len(names):
                return base(self, *args, **kwargs)
            kwargs = dict(zip(names, args), **kwargs)
            if torch.compiler.is_compiling():
                return self._hfpatch_forward(kwargs)
            refuse_in_the_midst()
            with self._hfpatch_turn:
                return self._hfpatch_forward(kwargs)

        cls.forward = forward
        taken = inspect.signature(base).parameters.values()
        any_name = any(p.kind is p.VAR_KEYWORD for p in taken)
        cls._hfpatch_takes = None if any_name else frozenset(p.name for p in taken)
        names = _by_position(base)
        # A forward that hands *args on, which the next one names.
        hands_on = any_name and any(p.kind is p.VAR_POSITIONAL for p in [*taken][1:])
        further = _by_position(forwards[1]) if hands_on and forwards[1:] else []
        if further[: len(names)] == names:
            names = further
