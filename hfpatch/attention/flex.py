"""Attention through torch's flex_attention, for patterns that no other kernel supports.

These are capped scores (Gemma 2), and hidden keys at head dim 256, which leaves no room for another
column. Forward and backward are two operators, so the backward needs no second forward. On a GPU
both are compiled, at lengths rounded up so that few shapes are compiled. Elsewhere torch's plain
code runs; it holds all scores and is for tests. A device is trusted after one forward and backward
of a few tokens agreed with plain blocks there.

B batch, T tokens, H query heads, K key-value heads, E head dim; Q blocks of SIZE tokens.
"""

from functools import lru_cache, partial
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfpatch.attention.pattern import Pattern
from hfpatch.attention.trial import why_not
from hfpatch.compat import compiled_for, flex_operators

SIZE = 128
COMPILED = ("cuda",)  # devices on which the operators are compiled
# The options that flex_attention() itself sets. Its lse has base 2.
OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


# --- which blocks are seen ------------------------------------------------------------------------


def _first_seen(pattern: Pattern, B: int, T: int, device) -> Tensor:
    """int32 [B, T]: the first token of its row that each token may see."""
    first_BT = torch.zeros(B, T, dtype=torch.int32, device=device)
    if pattern.documents is not None:
        starts = pattern.documents.cu_seqlens.to(device)
        token_N = torch.arange(B * T, device=device, dtype=torch.int32)
        row_B1 = T * torch.arange(B, device=device, dtype=torch.int32)[:, None]
        first_BT = starts[torch.bucketize(token_N, starts[1:], right=True)].view(B, T) - row_B1
    if pattern.window is not None:
        token_T = torch.arange(T, device=device, dtype=torch.int32)
        first_BT = torch.maximum(first_BT, token_T - pattern.window + 1)
    return first_BT


def _blocks_of(first_BT: Tensor, hidden_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Two bool [B, 1, Q, Q]: key blocks that a query block sees partly, and those that it sees
    entirely.
    """
    B, T = first_BT.shape
    filled = pad(first_BT, (0, -T % SIZE), value=-1).view(B, -1, SIZE)
    most, least = filled.amax(2), filled.masked_fill(filled < 0, T).amin(2)
    block_Q = torch.arange(filled.shape[1], device=first_BT.device)
    keys, queries = block_Q[None, None], block_Q[None, :, None]
    seen = (keys <= queries) & (keys >= (least // SIZE)[..., None])
    whole = seen & (keys < queries) & (keys * SIZE >= most[..., None])
    whole &= ~pad(hidden_BT, (0, -T % SIZE)).view(B, -1, SIZE).any(2)[:, None]
    return (seen & ~whole)[:, None], whole[:, None]


def _counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(count, indices with the set ones first): int32 [B, 1, Q] and [B, 1, Q, Q], as in a
    BlockMask."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _seen(b, h, q, k, first_BT, hidden_BT):
    return (k <= q) & (k >= first_BT[b, q]) & ~hidden_BT[b, k]


@lru_cache(maxsize=4)
def _mask(
    documents, window, hidden_BT, B: int, T: int, length: int, device: torch.device
) -> tuple[list, Tensor, Tensor]:
    """(the fields of a BlockMask without its function, first_BT, hidden_BT). Never [T, T].

    Cached, so all layers of a batch share it. length: T with padding. Tokens before the padding do
    not see it, and a padding token sees itself alone.
    """
    first_BT = pad(_first_seen(Pattern(documents, window), B, T, device), (0, length - T), value=T)
    hidden = torch.zeros(B, T, dtype=torch.bool, device=device) if hidden_BT is None else hidden_BT
    hidden = pad(hidden, (0, length - T))
    some, whole = (_counted(blocks) for blocks in _blocks_of(first_BT, hidden))
    made = flex_operators()[2].from_kv_blocks(
        *some, *whole, BLOCK_SIZE=SIZE, seq_lengths=(length, length)
    )
    return list(made.as_tuple()[:-1]), first_BT, hidden


# --- the two operators ----------------------------------------------------------------------------


def _score(softcap: float | None):
    """The score function, and its backward in the form that the operator takes."""
    if softcap is None:
        return lambda score, b, h, q, k: score, lambda score, b, h, q, k, grad: [
            grad,
            None,
            None,
            None,
            None,
        ]

    def capped(score, b, h, q, k):
        return softcap * torch.tanh(score / softcap)

    def backward(score, b, h, q, k, grad):
        bent = torch.tanh(score / softcap)
        return [grad * (1 - bent * bent), None, None, None, None]

    return capped, backward


def _operator(forward: bool, softcap: float | None, scale: float, blocks: tuple, n: int, *tensors):
    """Calls one operator.

    blocks: the BlockMask's fields, with `...` in place of each tensor. tensors: n inputs, then
    first_BT, hidden_BT, then the BlockMask's tensors.
    """
    score, joint = _score(softcap)
    given, seen_by, rest = tensors[:n], tensors[n : n + 2], iter(tensors[n + 2 :])
    mask = (*(next(rest) if x is ... else x for x in blocks), _seen)
    if forward:
        return flex_operators()[0](*given, score, mask, scale, OPTIONS, (), seen_by)[:2]
    return flex_operators()[1](*given, None, score, joint, mask, scale, OPTIONS, (), seen_by)[:3]


_compiled: dict = {}  # (options, shapes, strides, dtypes, devices) -> compiled operator


def _run(forward: bool, pattern: Pattern, scale: float, *given):
    """Calls an operator on [B, T, heads, E] tensors and lse [B, H, T]. Pads T if the operator is
    compiled.
    """
    B, T = given[0].shape[:2]
    device = given[0].device
    compiles = device.type in COMPILED
    length = (
        T + -T % max(SIZE, 1 << max(0, T.bit_length() - 4)) if compiles else T
    )  # at most an eighth more
    mask, *seen_by = _mask(
        pattern.documents, pattern.window, pattern.hidden_BT, B, T, length, device
    )
    given = [x.transpose(1, 2) if x.dim() == 4 else x for x in given]
    if length > T:
        given = [pad(x, (0, 0) * (x.dim() - 3) + (0, length - T)) for x in given]
    tensors = [*given, *seen_by, *(x for x in mask if isinstance(x, Tensor))]
    blocks = tuple(... if isinstance(x, Tensor) else x for x in mask)
    run = partial(_operator, forward, pattern.softcap, scale, blocks, len(given))
    if compiles:
        key = (*run.args, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
        if key not in _compiled:
            _compiled[key] = compiled_for(run, tensors)
        run = _compiled[key]
    return [x[:, :, :T] for x in run(*tensors)]


def flex_forward(q_BTHE, k_BTKE, v_BTKE, pattern: Pattern, scale: float):
    """out_BTHE, lse_BHT (float32 or wider), ()."""
    out, lse = _run(True, pattern, scale, q_BTHE, k_BTKE, v_BTKE)
    return out.transpose(1, 2), lse * log(2), ()


def flex_backward(dout, q_BTHE, k_BTKE, v_BTKE, out, lse, state, pattern: Pattern, scale: float):
    """dq, dk, dv from the outputs of flex_forward. The forward does not run again."""
    grads = _run(False, pattern, scale, q_BTHE, k_BTKE, v_BTKE, out, lse / log(2), dout)
    return [g.transpose(1, 2) for g in grads]


@lru_cache(maxsize=32)
def why_no_flex(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None
) -> str | None:
    """None if flex_attention agrees with plain blocks on this device, else the reason (see
    why_not).
    """
    if flex_operators() is None:
        return f"torch {torch.__version__} has no operators for it"
    pattern = Pattern(window=SIZE, softcap=softcap)
    return why_not(flex_forward, flex_backward, device, dtype, head_dim, pattern, 2 * SIZE + 1)
