"""A trial of an attention kernel on a device: forward and backward of a few tokens against plain
blocks."""

import torch

from hfpatch.attention.blocks import blocks_backward, blocks_forward
from hfpatch.attention.pattern import Pattern


def why_not(
    forward,
    backward,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    pattern: Pattern,
    tokens: int,
):
    """Why the kernel cannot be used on this device; None if it agrees with plain blocks.

    Callers cache the answer, so the trial ignores the caller's grad mode and autocast.

    Args:
        forward: forward(q, k, v, pattern, scale) -> out, lse, state, all [B, T, heads, E].
        backward: backward(dout, q, k, v, out, lse, state, pattern, scale) -> dq, dk, dv.
        device, dtype, head_dim, pattern, tokens: of the trial.

    Raises:
        torch.OutOfMemoryError: the device has no room for the trial.
    """
    scale = head_dim**-0.5
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            generator = torch.Generator(device).manual_seed(0)
            q, k, v, dout = (
                torch.randn(
                    1, tokens, heads, head_dim, generator=generator, device=device, dtype=dtype
                )
                for heads in (4, 2, 2, 4)
            )
            out, lse, state = forward(q, k, v, pattern, scale)
            got = [out, *backward(dout, q, k, v, out, lse, state, pattern, scale)]
            out, lse, state = blocks_forward(q, k, v, pattern, scale)
            wanted = [out, *blocks_backward(dout, q, k, v, out, lse, state, pattern, scale)]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may raise anything
        return f"it raises {type(error).__name__} on this device"
    if not all(bool((a - b).norm() <= 2e-2 * b.norm()) for a, b in zip(got, wanted)):
        return "it gives other numbers than plain blocks on this device"
    return None
