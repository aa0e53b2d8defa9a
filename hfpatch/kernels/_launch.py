"""Helpers of kernels and of their launchers.

Names in kernels: o_n are the offsets of a block along axis n, m_n its mask, b_n a block's size.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _load(p, mask):
    """The block at p in float32, 0 where masked. tl.store casts back by itself."""
    return tl.load(p, mask=mask, other=0.0).to(tl.float32)


def launch(
    kernel,
    grid: tuple[int, ...],
    args: tuple,
    constexprs: dict,
    *,
    num_warps: int,
    num_stages: int = 2,
) -> None:
    """Starts kernel[grid](*args, **constexprs) on the device of the first tensor.

    Args:
        kernel: a triton.jit function.
        grid: the number of programs.
        args: in the order of the kernel's parameters.
        constexprs: compile-time arguments by name.
        num_warps: in warps of 32 threads, also on devices with warps of 64.
        num_stages: of the kernel's software pipelines.
    """
    num_warps = warps_for(num_warps, 64 if torch.version.hip else 32)
    # Triton starts a kernel on the current device, which need not be the tensors'.
    with torch.cuda.device_of(args[0]):
        # enable_fp_fusion is explicit, because its default changes in Triton 3.10 and Triton 3.9
        # warns about that.
        kernel[grid](
            *args, **constexprs, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True
        )


def sm_count(device: torch.device) -> int:
    """The device's number of streaming multiprocessors: 4 in the interpreter, 132 (an H100's)
    without a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 132


def warps_for(num_warps: int, warp_size: int) -> int:
    """The number of warps of warp_size threads for num_warps; a program has at most 1,024
    threads."""
    return min(num_warps, 1024 // warp_size)


def rows_view(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [N, D] with a last stride of 1; a view if the layout allows one, else a
    copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
