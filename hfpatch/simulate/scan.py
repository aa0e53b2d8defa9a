"""The scan of Mamba, Falcon-Mamba, Jamba and Zamba where transformers runs it token by token in plain code, for fake tensors.

Each operation of its loop takes a block of tokens: the same bytes and FLOPs in as few operations at a million tokens as at a
thousand. Values mean nothing here.

B batch, I channels, T tokens, N states a channel.
"""

import contextlib
import sys
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

NAME = "mamba_selective_scan"  # in transformers' modules; where it has another, each token is an operation
BLOCKS = 64


def selective_scan(
    x_BIT: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False, **_,
):  # fmt: skip
    """transformers' function of that name with blocks for tokens; last state: of the last block."""
    dtype, T = x_BIT.dtype, x_BIT.shape[2]
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = softplus(dt) if delta_softplus else dt
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    decay_BITN = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    new_BITN = dt[:, :, :, None] * B[:, None, :, :].float() * x_BIT[:, :, :, None].float()
    size = -(-T // BLOCKS)
    state = x_BIT.new_zeros(*x_BIT.shape[:2], size, A.shape[-1])
    outs = []
    for a in range(0, T, size):
        b = min(a + size, T)
        state = decay_BITN[:, :, a:b] * state[:, :, : b - a] + new_BITN[:, :, a:b]
        out = torch.matmul(state.to(dtype).transpose(1, 2), C[:, a:b].unsqueeze(-1))
        outs.append(out[..., 0].transpose(1, 2))
    out = torch.cat(outs, -1)
    out = out if D is None else out + x_BIT * D[None, :, None]
    out = out if z is None else out * silu(z)
    return (out, state[:, :, -1]) if return_last_state else out


@contextlib.contextmanager
def scans_by_blocks():
    """Within, transformers' models scan so."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and NAME in vars(module):
                stack.enter_context(mock.patch.object(module, NAME, selective_scan))
        yield
