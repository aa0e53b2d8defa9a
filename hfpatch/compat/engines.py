"""Private names of accelerate, DeepSpeed and FSDP, and of transformers' Trainer."""

import sys
from contextlib import contextmanager

from torch import Tensor, nn


def engine_hook(module: nn.Module):
    """accelerate's hook on a module, or None."""
    return module.__dict__.get("_hf_hook")


def hooked_forward(module: nn.Module) -> str:
    """The attribute of the forward that a call of the module runs last. accelerate's hooks move it
    to another attribute."""
    own = vars(module)
    return "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"


def forward_before_wrapping(module: nn.Module):
    """The forward that accelerate's mixed precision wrapped on this instance, or None."""
    return vars(module).get("_original_forward")


def drop_wrapped_forward(module: nn.Module) -> None:
    """Removes the wrapper of `forward_before_wrapping`."""
    del module.forward, module._original_forward


_FSDP2 = "torch.distributed.fsdp._fully_shard."


def in_fsdp2(module: nn.Module) -> bool:
    """Whether torch's FSDP2 gathers this module's parameters around its calls."""
    hooks = module.__dict__.get("_forward_pre_hooks") or {}
    return "FSDPModule" in [c.__name__ for c in type(module).__mro__] or any(
        (getattr(h, "__module__", None) or "").startswith(_FSDP2) for h in hooks.values()
    )


def members_of(kind: type) -> dict:
    """A class's own attributes, to make another class like it.

    A `forward` of FSDP2's class is left out: transformers wraps the base's forward for each new
    class of layers.
    """
    members = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    if "FSDPModule" in [base.__name__ for base in kind.__bases__]:
        members.pop("forward", None)
    return members


@contextmanager
def as_before_fsdp2(model: nn.Module):
    """A context in which modules have the classes from before FSDP2. On exit FSDP2's classes lie
    over the modules' current ones."""
    units = [(m, type(m)) for m in model.modules() if in_fsdp2(m)]
    for unit, kind in units:
        unit.__class__ = kind.__bases__[-1]
    try:
        yield
    finally:
        for unit, kind in units:
            *above, base = kind.__bases__
            if unit.__class__ is not base:
                kind = type(kind.__name__, (*above, unit.__class__), members_of(kind))
            unit.__class__ = kind


def under_zero3(module: nn.Module) -> bool:
    """Whether DeepSpeed holds shards of this module's parameters: it marks all of them or none."""
    return any("ds_id" in parameter.__dict__ for parameter in module.parameters())


def gather_as_one(layer: nn.Module, wanted: bool) -> None:
    """Makes ZeRO-3 gather the layer once, not for every tile, as
    deepspeed.utils.set_z3_leaf_modules does. wanted: False takes the mark back."""
    if wanted:
        layer._z3_leaf = True
    else:
        vars(layer).pop("_z3_leaf", None)


def not_for_ddp(model: nn.Module, names=None) -> None:
    """Names tensors that DistributedDataParallel neither broadcasts nor expects on its device.

    names: an iterable, read each time; None removes it. A set from another library stays.
    """
    own = vars(model)
    name = "_ddp_params_and_buffers_to_ignore"
    if names is not None:
        own.setdefault(name, names)
    elif hasattr(own.get(name), "_hfpatch"):
        del own[name]


def not_for_deepspeed(parameter: Tensor, wanted: bool) -> None:
    """Keeps DeepSpeed's engine from broadcasting a parameter in host memory, which NCCL cannot.

    `ds_optim_param` is its own mark for OptimizedLinear. wanted: False takes the mark back.
    """
    own = parameter.__dict__
    if wanted:
        own.setdefault("ds_optim_param", "hfpatch")
    elif own.get("ds_optim_param") == "hfpatch":
        del own["ds_optim_param"]


def is_shard(parameter: Tensor) -> bool:
    """Whether this parameter is a shard (DeepSpeed) or a flat row of many parameters (FSDP1)."""
    return "ds_id" in parameter.__dict__ or "_is_flat_param" in parameter.__dict__


def is_view_of_flat(tensor: Tensor) -> bool:
    """Whether a tensor is FSDP1's view into such a flat row (TRL ships an fsdp1.yaml)."""
    return "_fsdp_flattened" in tensor.__dict__


def _variable(function, name: str):
    """The value of a closure's free variable, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def ulysses(attention):
    """(process group, whether evaluation has whole rows) of an attention function of DeepSpeed's
    Ulysses; None for any other."""
    attention_object = _variable(attention, "uattn")
    if attention_object is None or not hasattr(attention_object, "process_group"):
        return None
    return attention_object.process_group, bool(getattr(attention_object, "disable_in_eval", False))


def ulysses_group():
    """The process group of DeepSpeed's Ulysses, whichever attention it replaced, or None."""
    return getattr(
        sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp"),
        "_SEQUENCE_PARALLEL_GROUP",
        None,
    )


def context_parallel():
    """(process group, whether shards are zigzag) inside torch's context_parallel; None outside."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced = getattr(module, "_replaced_functions", ())
    sdpa = sys.modules["torch.nn.functional"].scaled_dot_product_attention
    mesh = _variable(sdpa, "device_mesh") if sdpa in replaced else None
    return (
        None if mesh is None else (mesh.get_group(), bool(module._cp_options.enable_load_balance))
    )


def _accelerator_state():
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return state() if state is not None and getattr(state, "_shared_state", None) else None


def deepspeed_config() -> dict:
    """accelerate's DeepSpeed settings; empty without accelerate or DeepSpeed."""
    plugin = getattr(_accelerator_state(), "deepspeed_plugin", None)
    return getattr(plugin, "deepspeed_config", None) or {}


def parallelism_config():
    """accelerate's ParallelismConfig of this run, also one that `accelerate launch` made without
    TrainingArguments."""
    return getattr(_accelerator_state(), "parallelism_config", None)
