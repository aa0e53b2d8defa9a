"""Private names of torch: modules and trees."""

from functools import partial

from torch import nn

from hfpatch.compat.tensors import gone


def parameters_of(module: nn.Module) -> dict:
    """The module's own parameters by name, to read and to write. RuntimeError where torch keeps them otherwise."""
    try:
        return vars(module)["_parameters"]
    except KeyError:
        raise gone("Module._parameters", "use another version") from None


def buffers_of(module: nn.Module) -> dict:
    """The same of buffers."""
    return vars(module).get("_buffers", {})


def modules_of(module: nn.Module) -> dict:
    """The module's children by name, those that are None too."""
    return vars(module).get("_modules") or dict(module.named_children())


def twin_of(module: nn.Module, parameters: dict, modules: dict) -> nn.Module:
    """A module of the same class and settings with other parameters and children."""
    twin = module.__class__.__new__(module.__class__)
    vars(twin).update(vars(module))
    vars(twin).update(_parameters=dict(parameters), _modules=dict(modules))
    return twin


def forward_hooks(module: nn.Module) -> list:
    """Hooks that run behind the module's forward."""
    return list(vars(module).get("_forward_hooks", {}).values())


def other_hooks(module: nn.Module) -> list:
    """Hooks that run before the module's forward, and around its backward."""
    names = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in vars(module).get(name, {}).values()]


_SERVE_ANY_OUTPUT = ("torch.distributed", "deepspeed", "accelerate", "transformers", "hfpatch")


def _home(hook) -> str:
    """The module in which a hook was written."""
    while isinstance(hook, partial):
        hook = hook.func
    inner = getattr(hook, "__func__", hook)
    return getattr(inner, "__globals__", {}).get("__name__") or type(inner).__module__


def user_hooks(module: nn.Module, hooks=None) -> list:
    """Hooks on this module (or of `hooks`) but for those of engines and transformers, which read no values."""
    hooks = forward_hooks(module) + other_hooks(module) if hooks is None else hooks
    return [h for h in hooks if not _home(h).startswith(_SERVE_ANY_OUTPUT)]


def pytree():
    """torch's functions over nested containers. RuntimeError where gone."""
    try:
        from torch.utils import _pytree
    except ImportError:
        raise gone("torch.utils._pytree", "use another version") from None
    return _pytree
