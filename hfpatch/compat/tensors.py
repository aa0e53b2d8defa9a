"""Private names of torch: autograd, storages, the dispatcher, fake tensors, the allocator."""

import functools
import sys
import traceback
from contextlib import contextmanager, nullcontext
from inspect import isgenerator
from types import SimpleNamespace

import torch
from torch import Tensor


def gone(name: str, instead: str) -> RuntimeError:
    """The error for a torch without a name that is needed."""
    return RuntimeError(
        f"hfpatch: torch must have {name}, and torch {torch.__version__} does not. Instead: "
        f"{instead}."
    )


# --- autograd and storages ------------------------------------------------------------------------


# Functions of torch without a public name, each with a fallback for a torch that lacks it.
# Whether the backward under way was called with retain_graph; True only holds memory longer.
keeps_graph = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", functools.partial(bool, 1)
)
# A number for each backward pass; -1 outside of one.
graph_task = getattr(torch._C, "_current_graph_task_id", functools.partial(int, -1))
try:
    from torch._subclasses.fake_tensor import is_fake  # whether a tensor has no data (a simulation)
except ImportError:

    def is_fake(x) -> bool:
        """Whether a tensor has no data, as in a simulation."""
        return type(x).__name__ == "FakeTensor"


def transforming() -> bool:
    """Whether torch.func (grad, vjp, vmap) or forward-mode differentiation runs."""
    dual = torch.autograd.forward_ad._current_level >= 0
    return dual or torch._C._are_functorch_transforms_active()


@contextmanager
def closing_checkpoints():
    """A context in which a torch checkpoint whose forward raises removes its hooks at once.

    torch 2.11 leaves them active for as long as the error is referenced (in a notebook).
    """
    try:
        yield
    except BaseException as error:
        frames = [
            frame
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name == "checkpoint"
        ]
        for frame in reversed(frames):
            if isgenerator(held := frame.f_locals.get("gen")):
                held.close()
        raise


def holders(x: Tensor) -> tuple[int, int]:
    """The reference counts of this tensor and of its storage in C++; sys.maxsize if unknown."""
    try:
        return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    except AttributeError:
        return sys.maxsize, sys.maxsize


def version(x: Tensor) -> int:
    """The number of in-place writes to x; 0 for inference tensors, and if unknown."""
    try:
        return x._version
    except (AttributeError, RuntimeError):
        return 0


def hooked(tensors: list[Tensor]) -> list[Tensor]:
    """Those of leaf tensors whose gradient a hook of the user's reads."""
    return [x for x in tensors if x._backward_hooks]


@contextmanager
def without_hooks(x: Tensor):
    """A context in which the user's hooks on the gradient of x do not run."""
    hooks, x._backward_hooks = x._backward_hooks, None
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


def below_autograd():
    """(context, keys, backends) for an op's autograd registration, or None in a torch without them.

    Inside the context the op may call its implementation directly if the first remaining key is a
    backend's: then no mode and no subclass intercepts the call.
    """
    try:
        key = torch._C.DispatchKey
        return (
            torch._C._AutoDispatchBelowAutograd,
            torch._C._after_autograd_keyset,
            (key.CPU, key.CUDA),
        )
    except AttributeError:
        return None


class _Aten:
    """torch.ops.aten. A missing operator raises RuntimeError, like a backend that cannot run.

    Operators are cached as attributes.
    """

    def __getattr__(self, name: str):
        try:
            found = self.__dict__[name] = getattr(torch.ops.aten, name)
            return found
        except AttributeError:
            raise gone(f"aten::{name}", 'use apply(model, checkpointing="off")') from None


aten = _Aten()


@functools.cache
def has_kernel(name: str) -> bool:
    """Whether torch has the operator aten::name."""
    return hasattr(torch.ops.aten, name)


def flash3():
    """FlashAttention-3's functions under the names of torch's operators. torch itself would
    register them for the whole process. RuntimeError if the package is not installed."""
    try:
        from torch.nn.attention import _fa3

        _fa3._fa3_import_module("flash_attn_interface")
        forward = _fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default
        backward = _fa3._fa3_scaled_dot_product_flash_attention_backward_impl
    except (ImportError, AttributeError) as error:
        raise gone(f"FlashAttention-3 ({error})", "install flash_attn_interface") from None
    return SimpleNamespace(
        _scaled_dot_product_flash_attention=forward,
        _scaled_dot_product_flash_attention_backward=backward,
    )


def grouped_mm():
    """torch's grouped matmul: each group of rows times its matrix. None without one."""
    return getattr(torch, "_grouped_mm", None)


def assert_async(holds: Tensor, message: str) -> None:
    """A check on the device that does not wait; no check in a torch without it."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(holds, message)


def autocast(device_type: str, **how):
    """torch.autocast; an empty context on the meta device, for which torch raises."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, **how)


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


def real_tensors():
    """A context in which torch computes real values, also inside a simulation on fake tensors."""
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return nullcontext()
    return _disable_current_modes()
