"""Loops over tokens or chunks in plain code, made short for fake tensors.

The loops: the scan of Mamba, Falcon-Mamba, Jamba and Zamba; the gated delta rule of Qwen3-Next,
Qwen3.5 and OLMo hybrids; our own attention in blocks of queries.

In transformers' loops each operation takes a block of tokens or chunks. A million tokens then need
as few operations as a thousand, with the same bytes and FLOPs. Values mean nothing here.

B batch, H heads, I channels, T tokens, N states a channel, C chunks a block.
"""

import contextlib
import inspect
import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hfpatch.attention import blocks as _attention_blocks
from hfpatch.lab.compat import for_now
from hfpatch.parts.rotation import with_globals

BLOCKS = 64
# Of the gated delta rule's chunks: what a layer keeps for backward does not depend on it.
FEW_BLOCKS = 4


def selective_scan(
    x_BIT: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D, z, delta_bias,
    return_last_state=False, **_,
):  # fmt: skip
    """transformers' function of that name in blocks of tokens, as its mixers call it. The last state
    is the last block's."""
    T = x_BIT.shape[2]
    dt = softplus(dt + delta_bias.to(dt.dtype)[..., None])
    B = B.transpose(1, 2)  # [B, T, N]
    C = C.transpose(1, 2)  # [B, T, N]
    decay_BITN = torch.exp(A[None, :, None, :] * dt[:, :, :, None])
    new_BITN = dt[:, :, :, None] * B[:, None, :, :].float() * x_BIT[:, :, :, None].float()
    # Each step takes a whole block. A token continues from the token at its place in the block
    # before: other values than transformers', but the same bytes and FLOPs.
    size = -(-T // BLOCKS)
    state = x_BIT.new_zeros(*x_BIT.shape[:2], size, A.shape[-1])
    outs = []
    for a in range(0, T, size):
        b = min(a + size, T)
        state = decay_BITN[:, :, a:b] * state[:, :, : b - a] + new_BITN[:, :, a:b]
        # [B, tokens of the block, I, 1]
        out = torch.matmul(state.to(x_BIT.dtype).transpose(1, 2), C[:, a:b].unsqueeze(-1))
        outs.append(out[..., 0].transpose(1, 2))
    out = torch.cat(outs, -1) + x_BIT * D[None, :, None]
    out = out * silu(z)
    return (out, state[:, :, -1]) if return_last_state else out


def gated_delta_rule(stock, query, key, value: Tensor, g, beta, chunk_size: int = 64, **kwargs):
    """`stock`, transformers' function of that name, with a loop over blocks of chunks.

    The loop indexes by slices in place of numbers, and its state has one entry per chunk of a
    block, [B, H, C, K, V]. The first and the last state are [B, H, K, V] as in transformers, and
    gradients flow from one to the other.
    """
    chunks = -(-value.shape[1] // chunk_size)
    size = -(-chunks // FEW_BLOCKS)
    state = value.new_zeros(
        value.shape[0], value.shape[2], size, key.shape[3], value.shape[3], dtype=torch.float32
    )

    def blocks(*bounds):
        if bounds not in ((chunks,), (0, chunks)):
            return range(*bounds)
        begins = (min(a, chunks - size) for a in range(0, chunks, size))
        return [slice(a, a + size) for a in begins]

    given = kwargs.get("initial_state")
    state = state if given is None else state + given[:, :, None]
    whole = inspect.unwrap(stock)
    short = with_globals(whole, {**whole.__globals__, "range": blocks}, whole.__closure__)
    out, last = short(query, key, value, g, beta, chunk_size, **kwargs | {"initial_state": state})
    return out, None if last is None else last[:, :, -1].clone()


# By the function's name in transformers' modules. A loop of another name takes each token or chunk.
_BY_BLOCKS = {
    "mamba_selective_scan": lambda stock: selective_scan,
    "torch_chunk_gated_delta_rule": lambda stock: partial(gated_delta_rule, stock),
}


@contextlib.contextmanager
def scans_by_blocks():
    """A context in which transformers' models run these functions in blocks."""
    with contextlib.ExitStack() as stack:
        # As far as they are imported.
        for module in [
            m for n, m in [*sys.modules.items()] if n.startswith("transformers.models.")
        ]:
            # A lazy module that is asked for a name may import what is not there.
            for name in vars(module).keys() & _BY_BLOCKS:
                made = _BY_BLOCKS[name](vars(module)[name])
                stack.enter_context(for_now(module, **{name: made}))
        yield


def _counted(follower, rows):
    """Yields the item of each (times, item), and has the follower count its work `times` times."""
    for times, item in rows:
        follower.times = times
        yield item
    follower.times = 1


@contextlib.contextmanager
def few_blocks(follower):
    """A context in which attention in blocks (attention/blocks.py) runs a few blocks in place of
    all.

    The middle blocks are counted for all. The last two, which take the most bytes (each block finds
    memory of the one before alive), are not counted.
    """
    stock = _attention_blocks._blocks

    def few(q_BTHE, pattern):
        blocks = list(stock(q_BTHE, pattern))
        middle = sorted({(len(blocks) - 1) // 2, len(blocks) // 2})
        counted = [(len(blocks) // len(middle), blocks[i]) for i in middle]
        counted += [(0, blocks[max(0, len(blocks) - 2)]), (0, blocks[-1])]
        return _counted(follower, counted)

    with for_now(_attention_blocks, _blocks=few):
        yield
