"""flash-linear-attention's chunked gated delta rule for fake tensors.

The autograd function here saves, allocates, moves and multiplies what fla's kernels do, in the same
shapes and dtypes (read from its ops/gated_delta_rule/chunk.py). Values mean nothing.

B batch, T tokens, H value heads, G key heads, K and V their columns, C tokens a chunk.
"""

import importlib.util

import torch

from hfpatch.lab.simulate.follow import current

C = 64


def installed() -> bool:
    """Whether fla is installed; transformers then runs it on a GPU."""
    return importlib.util.find_spec("fla") is not None


def _note(products: int, *moved) -> None:
    """Counts work of kernels that no dispatcher sees.

    products: multiply-adds of matmuls. moved: tensors that kernels read or write, listed once per
    pass.
    """
    follower = current()
    if follower is not None:
        follower.ledger.matmul_flops[follower.phase] += 2 * products * follower.times
        follower.moves(list(moved))


def _states(k, v, sums, A):
    """(w, first state of each chunk, new values). Forward makes them, and backward again."""
    B, T, _, K = k.shape
    H, V = v.shape[2:]
    w, u = v.new_empty(B, T, H, K), torch.empty_like(v)
    states, new = v.new_empty(B, -(-T // C), H, K, V), torch.empty_like(v)
    _note(B * T * H * (C * (K + V) + 2 * K * V), k, v, A, sums, w, u, k, w, u, sums, states, new)
    return w, states, new


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, v, g, beta, initial):
        B, T, G, K = key.shape
        H, V = v.shape[2:]
        q, k = torch.empty_like(query), torch.empty_like(key)  # of norm 1
        scales = [v.new_empty(B, T, G, dtype=torch.float32) for _ in "qk"]
        sums = torch.empty_like(g, dtype=torch.float32)
        wide = v.new_empty(B, T, H, C, dtype=torch.float32)
        A = torch.empty_like(wide, dtype=k.dtype)
        _note(B * T * H * C * K, query, q, key, k, g, sums, k, beta, sums, wide, wide, A)
        del wide
        _, states, new = _states(k, v, sums, A)
        out, last = torch.empty_like(v), v.new_empty(B, H, K, V, dtype=torch.float32)
        _note(B * T * H * (C * K + K * V + C * V), q, k, new, states, sums, out)
        ctx.save_for_backward(q, k, *scales, v, sums, beta, A, initial)
        return out, last

    @staticmethod
    def backward(ctx, dout, dlast):
        q, k, *_, v, sums, beta, A, initial = ctx.saved_tensors
        B, T, G, K = k.shape
        H, V = v.shape[2:]
        w, states, new = _states(k, v, sums, A)
        local = torch.empty_like(v)
        dstates, dnew = torch.empty_like(states), torch.empty_like(v)
        _note(
            B * T * H * (C * (K + V) + 3 * K * V),
            *(q, k, sums, dout, local, q, k, w, sums, dout, local, dstates, dnew),
        )
        del local
        dq, dk, dw = (torch.empty_like(w) for _ in "qkw")
        dg = torch.empty_like(sums)
        _note(
            B * T * H * (3 * C * K + C * V + 3 * K * V),
            *(q, k, new, w, sums, states, dnew, dout, dstates, dq, dk, dw, dg),
        )
        more, dv = torch.empty_like(dk), torch.empty_like(v)
        dbeta = torch.empty_like(beta)
        _note(
            B * T * H * (5 * C * K + 2 * C * V + 2 * C * C),
            k,
            v,
            sums,
            A,
            dw,
            dnew,
            more,
            dv,
            dbeta,
        )
        dk.add_(more)
        dq, dk = (x if G == H else x.view(B, T, G, H // G, K).sum(3) for x in (dq, dk))
        dfirst = None if initial is None else torch.empty_like(initial)
        _note(0, q, dq, dq, k, dk, dk)  # through the norms
        return torch.empty_like(dq), torch.empty_like(dk), dv, dg, dbeta, dfirst


def gated_delta_rule(
    query, key, value, g, beta, initial_state=None, output_final_state=False, **_
):  # fmt: skip
    """transformers' function of that name as fla runs it. fla scales queries and keys to norm 1."""
    out, last = _Rule.apply(query, key, value, g, beta, initial_state)
    return out, last if output_final_state else None
