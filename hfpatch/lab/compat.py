"""Private names of torch and of engines that the lab alone needs, each with a fallback or an error
for a version without the name (hfpatch/compat/ has the core's).
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from hfpatch.compat import gone


def autograd_node():
    """The backward node that runs now, None outside of a backward; for simulations. RuntimeError in
    a torch without it."""
    try:
        return torch._C._current_autograd_node()
    except AttributeError:
        raise gone("_current_autograd_node", "simulate with another version") from None


def sequence_number(node=None) -> int:
    """The sequence number of a node, or of the next node; for simulations. RuntimeError in a torch
    without it."""
    try:
        return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()
    except AttributeError:
        raise gone("_sequence_nr", "simulate with another version") from None


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 [m, k] times int8 [k, n]: int32 [m, n]; for simulations. Without torch's own matmul,
    float64 gives the same."""
    product = getattr(torch, "_int_mm", None)
    return (a.double() @ b.double()).to(torch.int32) if product is None else product(a, b)


def schema_of(op):
    """An operator's schema."""
    return op._schema


@contextmanager
def shapes_of_out_dtype():
    """A context in which fake tensors support addmm with out_dtype into a given tensor.

    torch 2.11 decomposes it with the dtype in beta's place. In a torch without the tables of shape
    functions, nothing changes.
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
    # An entry in the first table prevents the decomposition; the second table gives the result.
    meta_table[op], fakes[op] = None, lambda mode, func, *args, out, **kwargs: out
    try:
        yield
    finally:
        del meta_table[op], fakes[op]


def simulation_parts():
    """(FakeTensorMode, FakeTensor, the context of a kernel on fake tensors, TorchDispatchMode).
    RuntimeError in a torch without them."""
    try:
        from torch._subclasses.fake_tensor import (
            FakeTensor,
            FakeTensorMode,
            in_kernel_invocation_manager,
        )
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as error:
        raise gone(f"fake tensors ({error})", "simulate with another version") from None
    return FakeTensorMode, FakeTensor, in_kernel_invocation_manager, TorchDispatchMode


def keep_busy(cycles: int) -> None:
    """Keeps the GPU busy for `cycles` while the host queues work. In a torch without it, timings
    include the host's gaps."""
    wait = getattr(torch.cuda, "_sleep", None)
    if wait is not None:
        wait(cycles)


def record_allocations(start: bool) -> None:
    """Starts or ends the CUDA allocator's history; does nothing in a torch without it."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is not None:
        record(max_entries=1_000_000, stacks="python") if start else record(enabled=None)


def dump_allocations(path: str) -> bool:
    """Writes that history to a file; returns False in a torch without it."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None:
        return False
    dump(path)
    return True


def local_part(parameter: Tensor) -> Tensor:
    """The rank's own part: FSDP2's local tensor, DeepSpeed's partition, or the tensor itself."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return getattr(parameter, "_local_tensor", parameter)
