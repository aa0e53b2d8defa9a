"""Private names of torch and of engines that the lab alone needs (hfpatch/compat/ has the core's)."""

from contextlib import contextmanager

import torch
from torch import Tensor


def autograd_node():
    """The backward node that runs now, None outside of a backward; for simulations."""
    return torch._C._current_autograd_node()


def sequence_number(node=None) -> int:
    """The sequence number of a node, or of the next node; for simulations."""
    return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 [m, k] times int8 [k, n]: int32 [m, n]; for simulations."""
    return torch._int_mm(a, b)


def holders(x: Tensor) -> tuple[int, int]:
    """The reference counts of this tensor and of its storage in C++."""
    return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def schema_of(op):
    """An operator's schema."""
    return op._schema


@contextmanager
def shapes_of_out_dtype():
    """A context in which fake tensors support addmm with out_dtype into a given tensor.

    torch 2.11 decomposes it with the dtype in beta's place.
    """
    from torch._decomp import meta_table
    from torch._subclasses.fake_impls import op_implementations_dict as fakes

    op = torch.ops.aten.addmm.dtype_out
    if op in meta_table or op in fakes:
        yield
        return
    # An entry in the first table prevents the decomposition; the second table gives the result.
    meta_table[op], fakes[op] = None, lambda mode, func, *args, out, **kwargs: out
    try:
        yield
    finally:
        del meta_table[op], fakes[op]


def simulation_parts():
    """(FakeTensorMode, FakeTensor, the context of a kernel on fake tensors, TorchDispatchMode)."""
    from torch._subclasses.fake_tensor import (
        FakeTensor,
        FakeTensorMode,
        in_kernel_invocation_manager,
    )
    from torch.utils._python_dispatch import TorchDispatchMode

    return FakeTensorMode, FakeTensor, in_kernel_invocation_manager, TorchDispatchMode


def keep_busy(cycles: int) -> None:
    """Keeps the GPU busy for `cycles` while the host queues work."""
    torch.cuda._sleep(cycles)


def record_allocations(start: bool) -> None:
    """Starts or ends the CUDA allocator's history."""
    record = torch.cuda.memory._record_memory_history
    record(max_entries=1_000_000, stacks="python") if start else record(enabled=None)


def dump_allocations(path: str) -> None:
    """Writes that history to a file."""
    torch.cuda.memory._dump_snapshot(path)


def local_part(parameter: Tensor) -> Tensor:
    """The rank's own part: FSDP2's local tensor, DeepSpeed's partition, or the tensor itself."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return getattr(parameter, "_local_tensor", parameter)
