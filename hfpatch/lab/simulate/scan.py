"""Loops over tokens or chunks of tokens in transformers' plain code, for fake tensors: the scan of
Mamba, Falcon-Mamba, Jamba and Zamba, the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrids;
the loop over queries of Qwen4's indexer; and our own attention in blocks of queries. Where fla is
installed the gated delta rule is what its kernels take.

Each operation of transformers' loops takes a block of them: the same bytes and FLOPs in as few
operations at a million tokens as at a thousand. Values mean nothing here.

B batch, H heads, I channels, T tokens, N states a channel, C chunks a block.
"""

import contextlib
import inspect
import sys
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hfpatch.attention import blocks as _attention_blocks
from hfpatch.lab.simulate import fla

BLOCKS = 64
CHUNKS = 8  # a block at least: fewer operations where a row is cut into tiles


def selective_scan(
    x_BIT: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D=None, z=None, delta_bias=None,
    delta_softplus=False,
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


def gated_delta_rule(stock, query, key, value: Tensor, g, beta, chunk_size: int = 64, **kwargs):
    """`stock`, transformers' function of that name, whose loop over chunks meets blocks of them: it
    indexes by a slice where it had a number, and the state that it hands on is one a chunk [B, H,
    C, K, V]. The first state and the last are one [B, H, K, V], as transformers has them, and
    gradients flow from one to the other.
    """
    plain = inspect.unwrap(stock)
    chunks = -(-value.shape[1] // chunk_size)
    size = max(-(-chunks // BLOCKS), min(chunks, CHUNKS))
    state = value.new_zeros(
        value.shape[0], value.shape[2], size, key.shape[3], value.shape[3], dtype=torch.float32
    )

    def blocks(*bounds):
        if bounds not in ((chunks,), (0, chunks)):
            return range(*bounds)
        return [
            slice(min(a, chunks - size), min(a, chunks - size) + size)
            for a in range(0, chunks, size)
        ]

    given = kwargs.get("initial_state")
    state = state if given is None else state + given[:, :, None]
    with mock.patch.dict(plain.__globals__, range=blocks):
        out, last = plain(
            query, key, value, g, beta, chunk_size, **kwargs | {"initial_state": state}
        )
    return out, None if last is None else last[:, :, -1].clone()


# In transformers' modules; where it has other names, each token or chunk is an operation.
_BY_BLOCKS = {
    "mamba_selective_scan": lambda stock: selective_scan,
    "torch_chunk_gated_delta_rule": lambda stock: (
        fla.gated_delta_rule if fla.installed() else partial(gated_delta_rule, stock)
    ),
}


@contextlib.contextmanager
def scans_by_blocks():
    """Within, transformers' models scan so."""
    with contextlib.ExitStack() as stack:
        for file, module in list(sys.modules.items()):
            for name in (
                _BY_BLOCKS.keys() & vars(module).keys()
                if file.startswith("transformers.models.")
                else ()
            ):
                stack.enter_context(
                    mock.patch.object(module, name, _BY_BLOCKS[name](getattr(module, name)))
                )
        yield


def _counted(follower, rows):
    """Yields what stands in rows of (times, item), each counted so many times."""
    for times, item in rows:
        follower.times = times
        yield item
    follower.times = 1


INDEXERS = ("Qwen4ExpTextQSAIndexer",)  # each query of theirs is a loop's turn


@contextlib.contextmanager
def few_queries(follower):
    """Within, transformers' indexers run the query in the middle, which stands for all in what is
    counted, and the last one, which takes the most bytes and is not counted.
    """

    def few(code):
        def counting(*bounds):
            caller = sys._getframe(1)
            inner = caller.f_code is code and "batch_idx" in caller.f_locals
            if not inner:
                return range(*bounds)
            (n,) = bounds
            return _counted(follower, ((n, n // 2), (0, n - 1)))

        return counting

    with contextlib.ExitStack() as stack:
        for file, module in list(sys.modules.items()):
            if file.startswith("transformers.models."):
                for name in vars(module).keys() & INDEXERS:
                    plain = inspect.unwrap(getattr(module, name).forward)
                    around = mock.patch.dict(plain.__globals__, range=few(plain.__code__))
                    stack.enter_context(around)
        yield


@contextlib.contextmanager
def few_blocks(follower):
    """Within, attention in blocks (attention/blocks.py) runs those in the middle, which stand for
    all in what is counted, and the last two, which take the most bytes (of each the next finds
    something alive) and are not counted.
    """
    stock = _attention_blocks._blocks

    def few(q_BTHE, pattern):
        every = list(stock(q_BTHE, pattern))
        middle = sorted({(len(every) - 1) // 2, len(every) // 2})
        counted = [(len(every) // len(middle), every[i]) for i in middle]
        last = (0, every[max(0, len(every) - 2)]), (0, every[-1])
        yield from _counted(follower, (*counted, *last))

    with mock.patch.object(_attention_blocks, "_blocks", few):
        yield
