"""A trial of an attention kernel on a device: forward and backward of a few tokens against plain
blocks."""

import torch

from hfpatch.attention.blocks import blocks_backward, blocks_forward
from hfpatch.attention.pattern import CAUSAL

TOKENS = 129


def why_not(
    forward, backward, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why a kernel cannot be used on this device; None if it agrees with plain blocks.

    Callers cache the answer, so the trial ignores the caller's grad mode and autocast.

    Args:
        forward, backward: a row of backends.BACKENDS.
        device, dtype, head_dim: of the trial.

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
                    1, TOKENS, heads, head_dim, generator=generator, device=device, dtype=dtype
                )
                for heads in (4, 2, 2, 4)
            )
            out, lse, state = blocks_forward(q, k, v, CAUSAL, scale)
            wanted = [out, *blocks_backward(dout, q, k, v, out, lse, state, CAUSAL, scale)]
            q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
            out, lse, state = forward(q, k, v, scale)
            found = [out, *backward(dout, q, k, v, out, lse, state, scale)]
            got = [x.transpose(1, 2) for x in found]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may raise anything
        return f"it raises {type(error).__name__} on this device"
    if not all(bool((a - b).norm() <= 2e-2 * b.norm()) for a, b in zip(got, wanted)):
        return "it gives other numbers than plain blocks on this device"
    return None
