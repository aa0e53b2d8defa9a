"""A module gets its fused class by `module.__class__ = mixed(Part, type(module))`.

That is transformers' own class with a part mixed over it, of the same name and module, so that wrap
policies, `save_pretrained` (which writes experts as the hub has them for transformers' own classes
alone) and whoever else reads names find what they look for. Parameters, hooks and state_dict keys
stay as they were, and the class survives pickle and deepcopy.
"""

import copyreg
import inspect
import sys
import types
from contextlib import nullcontext
from functools import cache, partial, wraps

import torch
from torch import nn

from hfpatch.compat import MADE_FROM, Turn, members_of, record_outputs_like, values_for_now
from hfpatch.context.current import in_the_midst, on_its_own


def _rebuild(part: type, base: type):
    return (made := mixed(part, base)).__new__(made)


class Mixed:
    """What every mixed class knows: the class it was made from."""

    _hfpatch_base: type
    _hfpatch_part: type
    _hfpatch_code: object  # that class's forward then: what stands there later is somebody's own

    def __reduce_ex__(self, protocol):
        state = super().__reduce_ex__(protocol)
        # (copyreg.__newobj__, (cls,), state, ...): the class is made anew, what it holds is the
        # object's own.
        assert state[0] is copyreg.__newobj__, (
            "hfpatch: a module with a pickling of its own cannot be rebuilt"
        )
        return _rebuild, (self._hfpatch_part, self._hfpatch_base), *state[2:]


def mixed(part: type, base: type) -> type:
    """The class of modules of class `base`, as it is now, with `part` over it, and what that wants
    beneath it.
    """
    return _mixed(part, base, base.forward)


@cache
def _mixed(part: type, base: type, forward) -> type:
    made = type(
        base.__name__, (part, Mixed, base, *getattr(part, "_hfpatch_beneath", ())),
        {"_hfpatch_base": base, "_hfpatch_part": part, "_hfpatch_code": forward,
         "__module__": base.__module__,
         "__doc__": base.__doc__},
    )  # fmt: skip
    record_outputs_like(made, base)
    return made


def inner_model(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The outermost model of transformers inside another library's module, and its name there; None
    where there is none.
    """
    inside = ((name, m) for name, m in module.named_modules() if m is not module)
    return next(
        ((name, m) for name, m in inside if hasattr(vars(m).get("config"), "model_type")), None
    )


def not_a_model(came) -> ValueError:
    """What to raise where something else than a model came."""
    name = f"the class {came.__name__}" if isinstance(came, type) else type(came).__name__
    found = inner_model(came) if isinstance(came, nn.Module) else None
    if found is not None:
        path, model = found
        fix = (
            f"pass the one inside it, its {path} ({type(model).__name__}), before another library "
            "wraps or shards it."
        )
    else:
        fix = "pass the model that from_pretrained() or from_config() returned."
    return ValueError(f"hfpatch: expected a transformers model (with a config), {name} came; {fix}")


def expect_module(model) -> None:
    """ValueError for what is no module."""
    if not isinstance(model, nn.Module):
        raise not_a_model(model)


def swap(module: nn.Module, part: type) -> None:
    module.__class__ = mixed(part, type(module))


def as_made(module: nn.Module) -> bool:
    """Whether calls of it run the code for which its class was mixed, or its own class's."""
    kind = type(module)
    return "forward" not in vars(module) and MADE_FROM[kind].forward is getattr(
        kind, "_hfpatch_code", kind.forward
    )


def is_mixed(module: nn.Module) -> bool:
    return isinstance(module, Mixed)


def unswap(module: nn.Module) -> None:
    """transformers' class again, under what another library (parametrize) may have put over ours
    meanwhile.
    """
    module.__class__ = _unmixed(type(module))


def _unmixed(cls: type) -> type:
    if "_hfpatch_base" in vars(cls):
        return cls._hfpatch_base
    return type(
        cls.__name__,
        tuple(_unmixed(b) if issubclass(b, Mixed) else b for b in cls.__bases__),
        members_of(cls),
    )


# Libraries whose classes that stand for a Linear are projections: of each token by itself.
PROJECTIONS = {
    "torch", "torchao", "transformers", "deepspeed", "hfpatch",
    "aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "gptqmodel", "hqq",
    "optimum", "vptq",
}  # fmt: skip
# Libraries whose modules and forwards in a layer are known: they keep nothing of their calls but in
#     buffers.
LIBRARIES = PROJECTIONS | sys.stdlib_module_names | {
    "accelerate", "causal_conv1d", "fla", "flash_attn", "kernels", "liger_kernel", "mamba_ssm",
    "peft", "transformer_engine", "trl",
}  # fmt: skip

LINEAR, CALL = nn.Linear.forward, nn.Linear.__call__  # torch's own, whatever stands there later


def whose(code) -> str:
    """The module in which a class, a function or a forward on an instance (a trainer's, a kernel's
    of use_kernels) was written; a function's, a partial's or a callable object's is not what
    wraps() says.
    """
    while isinstance(code, partial):
        code = code.func
    inner = getattr(code, "__func__", code)
    if isinstance(inner, types.FunctionType):
        return inner.__globals__.get("__name__") or ""
    if hasattr(inner, "__wrapped__") and not isinstance(inner, type):
        inner = type(inner)
    return getattr(inner, "__module__", None) or ""


def home_of(code) -> str:
    """The package of that module."""
    return whose(code).partition(".")[0]


def replaced_forward(module: nn.Module) -> str | None:
    """Whose forward this instance has in place of its class's; None where it has none."""
    forward = vars(module).get("forward")
    return None if forward is None else f"its forward is {whose(forward)}'s"


def other_forward(module: nn.Module) -> bool:
    """Whether calls of this instance run another forward than its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def package_of(module: nn.Module) -> str:
    """The package that its class is from, under those that torch's FSDP makes."""
    return home_of(MADE_FROM[type(module)])


# --- forwards for a moment ------------------------------------------------------------------------


def forwards_for_now(pairs, name: str = "forward"):
    """A context in which calls of each module run the forward beside it; (module, forward) pairs.
    The model's lock is held.
    """
    return values_for_now([(module.__dict__, name, forward) for module, forward in pairs])


# --- forwards that know their caller's arguments by name ------------------------------------------


class KeepsSignature:
    """What is mixed over a model's class: that gets a forward which hands on to
    `_hfpatch_forward(args, kwargs)` under its own signature, by which Trainer decides which columns
    of a dataset to keep.

    `_hfpatch_turn`: the model's lock; instances that apply() has not seen share one.
    """

    _hfpatch_turn = Turn()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        base = next((c for c in cls.__mro__[1:] if "forward" in vars(c)), None)
        if base is None:  # a part by itself
            return

        @wraps(base.forward)
        def forward(self, *args, **kwargs):
            # A trainer may keep this bound method beyond undo().
            if not hasattr(type(self), "_hfpatch_forward"):
                return base.forward(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return self._hfpatch_forward(args, kwargs)
            with self._hfpatch_turn, on_its_own() if in_the_midst() else nullcontext():
                return self._hfpatch_forward(args, kwargs)

        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = (
            n for n, p in inspect.signature(base.forward).parameters.items() if p.kind in kinds
        )
        cls.forward, cls._hfpatch_positional = forward, tuple(names)[1:]
