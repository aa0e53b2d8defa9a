"""The least time of a training step on this card: its FLOPs at the matmul and attention rates
measured here and now.

A step that checkpoints layers multiplies each layer's weights forward twice and backward twice,
runs the attention forward once and its backward once, and the head's three matmuls. T tokens; one
sequence.
"""

import common
import torch

from hfpatch.attention.attention import attention_backward, attention_forward, pick
from hfpatch.budget.cuts import heads_per_group


def gemm_seconds(shape, rows: int, device, small: bool) -> dict[str, float]:
    """Seconds of one layer's matmuls over `rows` tokens: forward, input gradient, weight gradient,
    bf16.
    """
    D, I, Q, KV = shape.hidden_size, shape.intermediate_size, shape.q_size, shape.kv_size
    weights = {(Q, D): 1, (KV, D): 2, (D, Q): 1, (I, D): 2, (D, I): 1}  # (out, in): how many
    total = {"forward": 0.0, "input gradient": 0.0, "weight gradient": 0.0}
    for (out, into), count in weights.items():
        w = torch.randn(out, into, device=device, dtype=torch.bfloat16)
        x, dy = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for n in (into, out))

        def run(i, mark, w=w, x=x, dy=dy):
            x @ w.t()
            mark()
            dy @ w
            mark()
            dy.t() @ x
            mark()

        for kind, ms in zip(total, common.timed(run, budget_ms=60, least=3)):
            total[kind] += count * ms / 1e3
    return total


def attention_seconds(shape, tokens: int, device, backend: str | None = None) -> dict:
    """Seconds of one layer's attention as the layer engine calls it: forward of all heads, backward
    of each group of KV heads.
    """
    H, K, E, scale = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5
    group = heads_per_group(1, tokens, H, K)
    hs, ks, groups = slice(0, group * (H // K)), slice(0, group), K // group
    q, dout = (torch.randn(1, tokens, H, E, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, tokens, K, E, device=device, dtype=torch.bfloat16) for _ in range(2))
    backend = backend or pick(q, k, groups)

    def run(i, mark):
        out, lse, state = attention_forward(q, k, v, scale=scale, backend=backend)
        part = [
            dout[:, :, hs],
            q[:, :, hs],
            k[:, :, ks],
            v[:, :, ks],
            out[:, :, hs],
            lse[:, hs].contiguous(),
        ]
        mark()
        attention_backward(*part, state, scale=scale, backend=backend)
        mark()

    forward, backward = common.timed(run, budget_ms=400, least=2, most=10)
    return {
        "backend": backend,
        "group": group,
        "forward": forward / 1e3,
        "backward": backward * groups / 1e3,
    }


def floor(shape, tokens: int, device, small: bool) -> dict:
    """Seconds a step cannot undercut, from rates measured now, and the rates."""
    rows = min(tokens, 64 if small else 8192)
    gemm = gemm_seconds(shape, rows, device, small)
    attention = attention_seconds(shape, tokens, device)
    cube = common.matmul_rate(device, small)
    layer = (2 * gemm["forward"] + gemm["input gradient"] + gemm["weight gradient"]) * tokens / rows
    layer_flops = 8 * (shape.layer_parameters - 2 * shape.hidden_size) * tokens
    head_flops = 6 * shape.embedding_parameters * tokens
    layer_rate = layer_flops / layer
    matmul = shape.num_layers * layer + head_flops / layer_rate
    attend = shape.num_layers * (attention["forward"] + attention["backward"])
    one_way = 2 * tokens**2 * shape.q_size  # causal FLOPs of one layer's attention forward
    return {
        "floor_s": matmul + attend,
        "floor_cube_s": (shape.num_layers * layer_flops + head_flops) / cube + attend,
        "floor_matmul_s": matmul,
        "floor_attention_s": attend,
        "attention_backend": attention["backend"],
        "attention_fwd_tflop_s": one_way / attention["forward"] / 1e12,
        "attention_bwd_tflop_s": 2.5 * one_way / attention["backward"] / 1e12,
        "gemm_tflop_s": layer_rate / 1e12,
        "matmul_tflop_s": cube / 1e12,
    }
