"""A GPU's rates at a step's shapes: matmuls by a roofline, attention by the length of its rows.
Standard library only.

Large matmuls and long rows reach the rates of a GPU row (hardware.py). Narrow outputs, few rows per
expert and short rows of attention do not. The step model computes with the rates of `paced`.
"""

from dataclasses import replace
from functools import lru_cache

from hfpatch.budget.adapters import layer_linears
from hfpatch.budget.cuts import tiles
from hfpatch.budget.flops import attended
from hfpatch.budget.hardware import ATTENTION_RAMP, Gpu
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape

# Rows and columns of the output block that one processor computes at a time, and the part of a
# block's time for which a launch waits for its last block (list scheduling wastes at most one,
# Graham 1969; half a block is assumed, as for attention).
BLOCK, WAVE = 128, 0.5


def matmul_seconds(
    gpu: Gpu, rows: int, inner: int, columns: int, *, count: int = 1, itemsize: int = 2
) -> float:
    """Seconds of `count` matmuls in one launch, each [rows, inner] by [inner, columns]."""
    blocks = count * -(-rows // BLOCK) * -(-columns // BLOCK)
    flops = 2 * BLOCK * BLOCK * inner * (blocks + WAVE * gpu.processors)
    moved = itemsize * count * (rows * inner + inner * columns + rows * columns)
    return max(flops / gpu.matmul_flops, moved / gpu.memory_rate)


def attention_ramp(keys: int) -> float:
    """The factor by which rows that see `keys` keys are slower than long rows, per FLOP."""
    return 1 + ATTENTION_RAMP / max(1, keys)


def _matrices(shape: ModelShape, rows: int) -> list[tuple[int, int, int, int, int, int]]:
    """Forward's matmuls: (matmuls of this size in a step, their number in the model, their count in
    one launch, rows, inner, columns).

    Weights under adapters are frozen and have no gradient; each has two narrow matmuls of its
    adapter.
    """
    D, n = shape.hidden_size, shape.num_layers
    sparse = shape.over(lambda i: int(shape.is_sparse(i)))
    found = [(n, 1, rows, D, c) for c in (shape.q_size, shape.kv_size, shape.v_size)]
    found += [(n, 1, rows, shape.out_size, D), (1, 1, rows, D, shape.vocab_size)]

    def mlp(often, count, rows, width):
        up = [(often * (1 + shape.gated), count, rows, D, width)]
        return [*up, (often, count, rows, width, D)] if often and width else []

    found += mlp(n - sparse, 1, rows, shape.intermediate_size)
    found += mlp(sparse, 1, rows, shape.shared_size)
    if sparse:
        each = max(1, rows * shape.experts_per_token // shape.experts)
        found += mlp(sparse, shape.experts, each, shape.expert_size)
    if shape.adapters is None:
        return [(3, *row) for row in found]
    beside = [
        (3, often, 1, rows, *sides)
        for i in shape.kinds
        for often in (shape.over(lambda j, i=i: shape.is_sparse(j) == shape.is_sparse(i)),)
        for inner, columns in shape.adapters.chosen(layer_linears(shape, i)).values()
        for sides in ((inner, shape.adapters.rank), (shape.adapters.rank, columns))
    ]
    return [(2, *row) for row in found] + beside


@lru_cache(maxsize=1024)
def slowdown(gpu: Gpu, shape: ModelShape, rows: int) -> float:
    """Seconds of a step's matmuls over `rows` rows at a time, relative to the full rate."""
    took = ideal = 0.0
    for ways, often, count, m, k, n in _matrices(shape, rows):
        # Forward, input gradient, weight gradient.
        shapes = ((m, k, n), (m, n, k), (k, m, n))[:ways]
        took += often * sum(matmul_seconds(gpu, *way, count=count) for way in shapes)
        ideal += often * 2 * ways * count * m * k * n / gpu.matmul_flops
    return took / ideal


@lru_cache(maxsize=1024)
def _paced(gpu: Gpu, shape: ModelShape, rows: int, tile_rows: int, plain: int, keys: int) -> Gpu:
    whole, tiled = slowdown(gpu, shape, rows), slowdown(gpu, shape, tile_rows)
    matmul = (plain * whole + (shape.num_layers - plain) * tiled) / shape.num_layers
    work = {w: k * attended(keys, w) for w, k in shape.window_counts().items()}
    ramp = sum(n * attention_ramp(min(w or keys, keys)) for w, n in work.items())
    ramp /= sum(work.values())
    return replace(
        gpu, peak_flops=gpu.peak_flops / matmul,
        attention_forward=gpu.attention_forward / ramp,
        attention_backward=gpu.attention_backward / ramp,
    )  # fmt: skip


def paced(gpu: Gpu, shape: ModelShape, policy: Policy, *, batch: int, tokens: int) -> Gpu:
    """The GPU with the rates that a step of this shape reaches."""
    tile = batch * tiles(batch, tokens, policy.tile)[1]
    plain = min(policy.plain, shape.num_layers)
    return _paced(gpu, shape, batch * tokens, tile, plain, tokens * shape.ranks)
