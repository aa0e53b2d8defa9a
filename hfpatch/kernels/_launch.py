"""What the launchers share: starting a kernel on the tensors' device, and small sizes."""

import contextlib
import functools

import torch


def launch(
    kernel, grid: tuple[int, ...], args: tuple, constexprs: dict, *, num_warps: int, num_stages: int = 2
) -> None:
    """Starts kernel[grid](*args, **constexprs) on the device of the first tensor. args: in the kernel's order.

    num_warps: of 32 threads each.
    """
    num_warps = warps_for(num_warps, 64 if torch.version.hip else 32)
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    # Triton starts a kernel on the current device, which need not be the tensors'.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # Fused multiply-adds are named because Triton 3.9 warns where its default is relied on (3.10 changes it).
        kernel[grid](*args, **constexprs, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


@functools.lru_cache
def _cuda_sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the device; an H100's 132 where there is none to ask, 4 in the interpreter."""
    if device.type == "cuda":
        return _cuda_sm_count(torch.cuda.current_device() if device.index is None else device.index)
    return 4 if device.type == "cpu" else 132


def warps_for(num_warps: int, warp_size: int) -> int:
    """num_warps of 32 threads in warps of warp_size: as many where the 1,024 threads of a program allow it."""
    return min(num_warps, 1024 // warp_size)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rows_view(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [N, D] whose last stride is 1: a view where the layout allows one, else a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
