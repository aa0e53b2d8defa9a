"""Every private name of torch and transformers that the patch needs, each with what happens where the name is gone."""

from contextlib import contextmanager, nullcontext

import torch


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


@contextmanager
def shapes_of_out_dtype():
    """Within, addmm with out_dtype into a given tensor can be followed on fake tensors.

    torch 2.11 decomposes it with the dtype in beta's place. Without torch's tables of shape functions nothing is changed.
    """
    try:
        from torch._decomp import meta_table
        from torch._subclasses.fake_impls import op_implementations_dict as fakes
    except ImportError:
        yield
        return
    op = getattr(torch.ops.aten.addmm, "dtype_out", None)
    if op is None or op in meta_table or op in fakes:
        yield
        return
    # What stands in the first table is not decomposed; the second says what it gives.
    meta_table[op], fakes[op] = None, lambda mode, func, *args, out, **kwargs: out
    try:
        yield
    finally:
        del meta_table[op], fakes[op]


def real_tensors():
    """A context in which torch computes, also under a dispatch mode that only follows shapes (a simulation on fake tensors)."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()
