"""The attention kernels for plain causal rows, and the choice between them.

The choice is a table by compute capability, FASTEST. The environment variable HFPATCH_ATTENTION
overrides it for plain causal rows in half precision. cuDNN makes a plan for each exact length, in
0.4 to 1 s, so a process that has run more than FEW_LENGTHS lengths uses FlashAttention-2, which
makes none.

B batch, T tokens, H query heads, K key-value heads, E head dim. A kernel's tensors are
[B, heads, T, E] views.
"""

import os

import torch
from torch import Tensor, nn

from hfpatch.compat import aten, flash3

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # columns; only the efficient kernel takes more
WIDEST_CUDNN = 128  # columns that every version of cuDNN takes in both directions
FEW_LENGTHS = 4
# The oldest version that torch 2.11 prefers: https://github.com/pytorch/pytorch/issues/169849
CUDNN = 91501

# --- one row a backend --------------------------------------------------------------------------
# forward(q, k, v, scale) -> out, lse, state
# backward(dout, q, k, v, out, lse, state, scale) -> dq, dk, dv
# All tensors are [B, heads, T, E] views. `state`: the generator's state, unused without dropout.


def _for_each_head(H: int, x_BKTE):
    """k or v repeated to H query heads, for kernels without grouped heads."""
    repeat = H // x_BKTE.shape[1]
    return x_BKTE if repeat == 1 else x_BKTE.repeat_interleave(repeat, 1)


def _of_groups(K: int, dx_BHTE):
    """dk or dv of K heads, summed over the copies that _for_each_head made."""
    return dx_BHTE if dx_BHTE.shape[1] == K else dx_BHTE.unflatten(1, (K, -1)).sum(2)


def _cpu_forward(q, k, v, scale):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _cpu_backward(dout, q, k, v, out, lse, state, scale):
    K = k.shape[1]
    k = _for_each_head(q.shape[1], k)
    v = _for_each_head(q.shape[1], v)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, True, scale=scale
    )
    return dq, _of_groups(K, dk), _of_groups(K, dv)


def _flash_forward(q, k, v, scale, aten=aten):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _flash_backward(dout, q, k, v, out, lse, state, scale, aten=aten):
    T = q.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, T, T, 0.0, True, *state, scale=scale
    )


def _cudnn_forward(q, k, v, scale):
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out, lse, (seed, offset)


def _cudnn_backward(dout, q, k, v, out, lse, state, scale):
    T = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *state, None, None, None, T, T, 0.0, True, scale=scale
    )


# Torch's memory-efficient attention (Rabe and Staats, 2021; xFormers' kernel) takes any dtype but
# float64, and head dims that are multiples of 8.
def _efficient_forward(q, k, v, scale):
    k = _for_each_head(q.shape[1], k)
    v = _for_each_head(q.shape[1], v)
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True, scale=scale
    )
    return out, lse, (seed, offset)


def _efficient_backward(dout, q, k, v, out, lse, state, scale):
    K = k.shape[1]
    k = _for_each_head(q.shape[1], k)
    v = _for_each_head(q.shape[1], v)
    # The kernel pads its lse to blocks of 32 tokens; the lse of a document is not padded.
    lse = nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], True, scale=scale
    )
    return dq, _of_groups(K, dk), _of_groups(K, dv)


# attention.py chooses the kernel for documents, windows and soft caps.
BACKENDS = {
    "cpu": (_cpu_forward, _cpu_backward),
    "flash": (_flash_forward, _flash_backward),
    "fa3": (lambda *x: _flash_forward(*x, flash3()), lambda *x: _flash_backward(*x, flash3())),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (_efficient_forward, _efficient_backward),
}
# The fastest kernel of a compute capability; "flash" on every other one. On an H100 cuDNN's forward
# runs at 539 TFLOP/s, FlashAttention-2's at 335 (published). torch prefers cuDNN on the same two.
FASTEST = {(9, 0): "cudnn", (10, 0): "cudnn"}
# The exact (B, T) that this process has run attention at on a GPU, up to FEW_LENGTHS + 1.
lengths_met: set[tuple[int, int]] = set()


def pick(q_BTHE: Tensor) -> str:
    """The backend for these queries."""
    device = q_BTHE.device
    B, T, _, E = q_BTHE.shape
    if device.type in ("cpu", "meta"):
        return "cpu"
    if device.type != "cuda" or q_BTHE.dtype == torch.float64:
        return "blocks"  # no kernel takes it
    if q_BTHE.dtype not in HALF or E > WIDEST_HEAD:
        return "efficient"
    # Only FA2 has a deterministic backward, and only FA2 takes a single token. The setting is read
    # each time: a user may turn it on later. With few tokens the call costs more than the kernel.
    # Heads that are no multiples of 8 go to blocks (attention.py).
    if torch.are_deterministic_algorithms_enabled() or torch.version.hip is not None:
        return "flash"
    if T < 128 or E % 8:
        return "flash"
    name = os.environ.get("HFPATCH_ATTENTION")
    if name is not None:
        kernels = [kernel for kernel in BACKENDS if kernel != "cpu"]
        if name not in kernels:
            raise ValueError(
                f"hfpatch: HFPATCH_ATTENTION must be one of {', '.join(kernels)}, got {name!r}."
            )
        return name
    if len(lengths_met) <= FEW_LENGTHS:
        lengths_met.add((B, T))
    if (
        len(lengths_met) > FEW_LENGTHS
        or E > WIDEST_CUDNN
        or not torch.backends.cuda.cudnn_sdp_enabled()
        or (torch.backends.cudnn.version() or 0) < CUDNN
    ):
        return "flash"
    return FASTEST.get(torch.cuda.get_device_capability(device), "flash")
