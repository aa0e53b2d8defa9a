"""Every private name of other libraries that the patch needs: one function each, with what happens where the name is gone."""

import sys
from contextlib import contextmanager, nullcontext


def record_outputs_like(made: type, base: type) -> None:
    """What output_hidden_states and its like record is looked up by the class's full name: `made` records what `base` does.

    Without the registry, recording is by attribute, which a subclass inherits.
    """
    try:
        from transformers.modeling_utils import _CAN_RECORD_REGISTRY
    except ImportError:
        return
    found = getattr(base, "_can_record_outputs", None)
    if found is not None:
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), found)


def _collector():
    """transformers' variable that holds what output_hidden_states, output_router_logits and their like collect, or None."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def collected_now() -> dict:
    """The lists that recorded outputs are added to in the forward under way; empty where nothing is recorded."""
    collector = _collector()
    return (None if collector is None else collector.get()) or {}


@contextmanager
def collecting(lists: dict):
    """Within, recorded outputs are added to these lists."""
    collector = _collector()
    if collector is None:
        yield
        return
    token = collector.set(lists)
    try:
        yield
    finally:
        collector.reset(token)


def real_tensors():
    """A context in which torch computes, also under a dispatch mode that only follows shapes (a simulation on fake tensors)."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()


def _variable(function, name: str):
    """What a closure holds under a name, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def ulysses(attention):
    """(process group, whether evaluation is left alone) of an attention function that DeepSpeed's Ulysses put in place; None for
    any other."""
    found = _variable(attention, "uattn")
    if found is None or not hasattr(found, "process_group"):
        return None
    return found.process_group, bool(getattr(found, "disable_in_eval", False))


def context_parallel():
    """(process group, whether shards are zigzag) of torch's context_parallel that is entered now; None outside."""
    for name in ("_context_parallel._attention", "_attention"):
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if hasattr(module, "_replaced_functions"):
            sdpa = sys.modules["torch.nn.functional"].scaled_dot_product_attention
            if sdpa not in module._replaced_functions:
                return None
            mesh = _variable(sdpa, "device_mesh")
            return None if mesh is None else (mesh.get_group(), bool(module._cp_options.enable_load_balance))
    return None


def deepspeed_config() -> dict:
    """DeepSpeed's settings as accelerate holds them; empty where it runs without DeepSpeed, or not at all."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if state is None or not getattr(state, "_shared_state", None):
        return {}
    plugin = getattr(state(), "deepspeed_plugin", None)
    return getattr(plugin, "deepspeed_config", None) or {}


def skips_by_itself(kind: type) -> None:
    """Resuming in the middle of an epoch, Trainer asks loaders of this kind for `skipping(n)`, others as ever."""
    from transformers import trainer

    before = getattr(trainer, "skip_first_batches", None)
    if before is None or hasattr(before, "_hfpatch"):
        return

    def skip_first_batches(loader, num_batches=0):
        return loader.skipping(num_batches) if isinstance(loader, kind) else before(loader, num_batches)

    skip_first_batches._hfpatch = True
    trainer.skip_first_batches = skip_first_batches
