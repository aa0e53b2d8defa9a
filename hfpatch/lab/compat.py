"""Private names of torch and of engines that the lab alone needs (hfpatch/compat/ has the core's)."""

from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def for_now(owner, **values):
    """A context in which a module, a class or an object has these attributes."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


# The backward node that runs now, None outside of a backward; for simulations.
autograd_node = torch._C._current_autograd_node


def sequence_number(node=None) -> int:
    """The sequence number of a node, or of the next node; for simulations."""
    return torch.autograd._get_sequence_nr() if node is None else node._sequence_nr()


# int8 [m, k] times int8 [k, n]: int32 [m, n]; for simulations.
int8_product = torch._int_mm


def holders(x: Tensor) -> tuple[int, int]:
    """The reference counts of this tensor and of its storage in C++."""
    return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def schema_of(op):
    """An operator's schema."""
    return op._schema


def simulation_parts():
    """(FakeTensorMode, FakeTensor, TorchDispatchMode)."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    return FakeTensorMode, FakeTensor, TorchDispatchMode


def run_on_meta(mode, func, args, kwargs):
    """func's meta kernel on fake tensors of the mode. torch's in_kernel_invocation_manager takes
    longer to enter than many a kernel."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        mode.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            return func(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = False


def meta_tensor(layout: tuple) -> Tensor:
    """A meta tensor of (shape, strides, dtype) that no dispatch mode sees."""
    shape, strides, dtype = layout
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def fakes_like(fake: Tensor):
    """A function from meta tensors to fake tensors of `fake`'s mode and device.

    FakeTensor's constructor checks its arguments for as long as the rest of an operation takes.
    """
    kind = type(fake)
    device = fake.fake_device

    def made(elem: Tensor) -> Tensor:
        out = Tensor._make_subclass(
            kind, elem, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(out)
        vars(out).update(vars(fake))
        return out

    return made


def record_allocations(start: bool) -> None:
    """Starts or ends the CUDA allocator's history."""
    record = torch.cuda.memory._record_memory_history
    record(max_entries=1_000_000, stacks="python") if start else record(enabled=None)


# Writes that history to a file.
dump_allocations = torch.cuda.memory._dump_snapshot


def local_part(parameter: Tensor) -> Tensor:
    """The rank's own part: FSDP2's local tensor, DeepSpeed's partition, or the tensor itself."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return getattr(parameter, "_local_tensor", parameter)


def carries_states(kind: type) -> bool:
    """Whether transformers marks a class of models as stateful: tokens mix through a state too
    (Mamba, RWKV)."""
    return bool(getattr(kind, "_is_stateful", False))
