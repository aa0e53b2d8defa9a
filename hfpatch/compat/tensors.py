"""Private names of torch: autograd, storages, the dispatcher, fake tensors, the allocator."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake  # whether a tensor has no data (a simulation)
from torch.utils import _pytree as pytree  # noqa: F401 (functions over nested containers)
from torch.utils._python_dispatch import _disable_current_modes

# --- autograd and storages ------------------------------------------------------------------------

# Whether the backward under way was called with retain_graph.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# A number for each backward pass; -1 outside of one.
graph_task = torch._C._current_graph_task_id


def autograd_mode() -> tuple:
    """Whether autograd records, and the hooks through which it saves tensors (a checkpoint's)."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def transforming() -> bool:
    """Whether torch.func (grad, vjp, vmap) or forward-mode differentiation runs."""
    return (
        torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    )


def version(x: Tensor) -> int:
    """The number of in-place writes to x; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


def hooked(tensors: list[Tensor]) -> list[Tensor]:
    """Those of leaf tensors whose gradient a hook of the user's reads."""
    return [x for x in tensors if x._backward_hooks]


@contextmanager
def without_hooks(x: Tensor):
    """A context in which the user's hooks on the gradient of x do not run."""
    hooks = x._backward_hooks
    x._backward_hooks = None
    try:
        yield
    finally:
        x._backward_hooks = hooks


def gradient_is_watched(x: Tensor) -> bool:
    """Whether a hook or retain_grad() reads the gradient of x; hooks are missed where unknown."""
    return x.retains_grad or bool(getattr(x, "_backward_hooks", None))


def storage_of(x: Tensor) -> int | None:
    """A number that identifies x's storage; None if unknown (a simulated tensor, another library's
    class)."""
    try:
        return x.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both start at the same address. Where unknown, only a tensor and itself do."""
    at = storage_of(a)
    views = at is not None and at == storage_of(b)
    return a is b or views and a.storage_offset() == b.storage_offset()


# --- the dispatcher -------------------------------------------------------------------------------


aten = torch.ops.aten


def flash3() -> SimpleNamespace:
    """FlashAttention-3's functions under the names of torch's operators. torch itself would
    register them for the whole process. ImportError if the package is not installed."""
    from torch.nn.attention import _fa3

    _fa3._fa3_import_module("flash_attn_interface")
    return SimpleNamespace(
        _scaled_dot_product_flash_attention=_fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default,
        _scaled_dot_product_flash_attention_backward=_fa3._fa3_scaled_dot_product_flash_attention_backward_impl,
    )


# torch's grouped matmul: each group of rows times its matrix.
grouped_mm = torch._grouped_mm
# A check on the device that does not wait.
assert_async = torch._assert_async


def autocast(device_type: str, dtype: torch.dtype | None = None):
    """torch.autocast to this dtype, or none; an empty context on the meta device, for which torch
    raises."""
    return (
        nullcontext()
        if device_type == "meta"
        else torch.autocast(device_type, dtype, dtype is not None)
    )


# The context in which a subclass of Tensor is treated as a plain one.
as_plain_tensor = torch._C.DisableTorchFunctionSubclass


def without_memory(kind: type, shape: tuple, **options) -> Tensor:
    """A tensor of this subclass that has a shape, a dtype and a device, and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, **options)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this type of device, or None if it is off."""
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def has_values(x: Tensor) -> bool:
    """Whether x's values can be read. Those of a meta tensor cannot, nor in general those of a fake
    one."""
    if x.device.type == "meta":
        return False
    if not is_fake(x) or not x.numel():
        return True
    try:
        # a simulation may know the values of small tensors
        return isinstance(x.flatten()[0].item(), (bool, int, float))
    except RuntimeError:
        return False


# A context in which torch computes real values, also inside a simulation on fake tensors.
real_tensors = _disable_current_modes

# Sets options of the caching allocator, for memory that it takes from then on; all others return to
# their defaults.
set_allocator = torch._C._accelerator_setAllocatorSettings
