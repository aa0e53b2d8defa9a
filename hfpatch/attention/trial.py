"""Whether a device does what a kernel of attention is for: one forward and backward of a few tokens
against plain blocks there.
"""

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
    """None where it does, else the reason.

    forward(q, k, v, pattern, scale) -> out, lse, state; backward(dout, q, k, v, out, lse, state,
    pattern, scale) -> dq, dk, dv; all [B, T, heads, E]. The answer stands for the process, so it is
    found apart from the mode of the call that asks. torch.OutOfMemoryError where there is no room
    to find it.
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
