"""Elements that the kernels of a step move through device memory outside matmuls and attention.

The counts follow the code that moves them; seconds.py converts them to seconds. Standard library
only.
"""

from hfpatch.budget.adapters import layer_linears
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape


def _turned(shape: ModelShape) -> int:
    """Elements per token that the rotation of q and k (and their norm, if any) moves."""
    return (4 if shape.qk_norm else 2) * (shape.q_size + shape.kv_size)


# Elements that experts move outside their matmuls (ops/experts.py), for each routed element of
# their inner size and of the hidden size: forward, backward. Rows are gathered and combined; the
# activation reads gate and up and writes one, its backward reads them and da and writes three.
OUR_EXPERTS = (3, 2), (6, 2)
# The same for attention with sinks, for each element of its output: the sinks' share of it, and the
# sum of its product with its gradient. Neither is computed again.
SINK_PASSES = 2, 4


def unfused_passes(shape: ModelShape, layer: int) -> tuple[float, float]:
    """Elements per token that code which is not fused moves: (forward, backward). For experts,
    attention with sinks, and adapters.
    """
    sparse, k = shape.is_sparse(layer), shape.experts_per_token * shape.is_sparse(layer)
    inner, ways = k * shape.expert_size, (k + sparse) * shape.hidden_size
    (fore_in, fore_ways), (back_in, back_ways) = OUR_EXPERTS
    fore, back = sinks_and_adapters(shape, layer)
    fore += fore_in * inner + fore_ways * ways + shape.expert_bias * sparse * shape.hidden_size
    return fore, back + back_in * inner + back_ways * ways


def sinks_and_adapters(shape: ModelShape, layer: int) -> tuple[float, float]:
    """unfused_passes of attention with sinks, and of adapters. An adapter's output is scaled and
    added; its gradient is scaled, and its input gradient added.
    """
    adapters = shape.adapters.chosen(layer_linears(shape, layer)) if shape.adapters else {}
    rows = [(shape.sinks * shape.out_size, *SINK_PASSES)]
    rows += [(inner, 0, 3) for inner, _ in adapters.values()]
    rows += [(columns, 5, 2) for _, columns in adapters.values()]
    return sum(n * each for n, each, _ in rows), sum(n * each for n, _, each in rows)


def unfused_made_again(shape: ModelShape, layer: int) -> float:
    """Elements per token of the unfused forward that the backward repeats: all but the sinks' share
    of attention, and the unread values of experts."""
    again = unfused_passes(shape, layer)[0] - SINK_PASSES[0] * shape.sinks * shape.out_size
    if shape.norm_after or not shape.is_sparse(layer):
        return again
    k, D = shape.experts_per_token, shape.hidden_size
    return again - OUR_EXPERTS[0][0] * k * shape.expert_size - (k + 1 + shape.expert_bias) * D


def layer_passes(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Elements per token that a layer's fused operations move: (forward, backward)."""
    D, turned = shape.hidden_size, _turned(shape)
    sparse = shape.is_sparse(layer)
    inner = shape.shared_size if sparse else shape.intermediate_size
    # A norm reads and writes; a residual reads two and writes one, as an activation of gate and up.
    forward = 2 * shape.norms * D + 6 * D + turned + 3 * inner
    # Several projections read one input: adding their input gradients reads two and writes one.
    sums = (0 if shape.joined_qkv else 2) + (shape.gated and not shape.joined and not sparse)
    backward = 4 * shape.norms * D + 4 * D + 3 * sums * D + turned + 5 * inner
    return forward, backward


def passes_again(shape: ModelShape, layer: int, keep: tuple = (), several: bool = False) -> int:
    """Elements per token that the second forward inside a layer's backward moves outside its
    matmuls.

    keep: names of KEEPABLE. Kept q, k and v save the rotation and norm. "mid" saves nothing here:
    its two gradients are then added in a separate pass. several: more than one tile; the norm
    before attention then runs twice, for q, k, v and for their gradients.
    """
    D, turned = shape.hidden_size, _turned(shape)
    dead = turned if not shape.qk_norm else 0  # a rotation whose result is unread moves nothing
    again = layer_passes(shape, layer)[0] - 3 * D * shape.last_unread(layer)
    if "qkv" in keep:
        return again - dead
    return again + (2 * D + turned - dead) * several


def elementwise(
    shape: ModelShape, policy: Policy, rows: int, several: bool, groups: int = 1
) -> tuple[float, float]:
    """Elements that all layers move for `rows` tokens outside matmuls: (forward, backward).

    groups: the number of groups of KV heads in attention's backward.
    """
    tiled = shape.num_layers - min(policy.plain, shape.num_layers)
    less = min(policy.keeps_less, tiled)
    fore, back = (shape.over(lambda i, k=k: layer_passes(shape, i)[k]) for k in (0, 1))
    for kept, layers in ((policy.keep, (0, tiled - less)), ((), (tiled - less, tiled))):
        back += shape.over(lambda i, k=kept: passes_again(shape, i, k, several), *layers)
    if several:
        # Each tile's q, k and v are copied into whole buffers, and their gradients out of such
        # buffers; y, dx and dout are copied tile by tile too.
        whole = shape.q_size + shape.kv_size + shape.v_size
        fore += tiled * 2 * (whole + shape.hidden_size)
        back += tiled * 2 * (2 * whole + shape.hidden_size + shape.out_size)
        back -= (tiled - less) * 2 * whole * ("qkv" in policy.keep)  # computed once
    elif groups > 1:  # each group's part of out and dout is copied out of the whole
        back += tiled * 4 * shape.out_size
    own = [shape.over(lambda i, k=k: unfused_passes(shape, i)[k]) for k in (0, 1)]
    own[1] += shape.over(lambda i: unfused_made_again(shape, i), 0, tiled)
    return rows * (fore + own[0]), rows * (back + own[1])
