"""Seconds of single kernels on a GPU: matmuls by a roofline, attention by the length of its rows.
Standard library only.
"""

from hfpatch.lab.hardware import ATTENTION_RAMP, Gpu

# Rows and columns of the output block that one processor computes at a time, and the part of a
# block's time for which a launch waits for its last block (list scheduling wastes at most one,
# Graham 1969; half a block is assumed).
BLOCK = 128
TAIL_SHARE = 0.5


def matmul_seconds(
    gpu: Gpu, rows: int, inner: int, columns: int, *, count: int = 1, itemsize: int = 2
) -> float:
    """Seconds of `count` matmuls in one launch, each [rows, inner] by [inner, columns]."""
    blocks = count * -(-rows // BLOCK) * -(-columns // BLOCK)
    flops = 2 * BLOCK * BLOCK * inner * (blocks + TAIL_SHARE * gpu.processors)
    moved = itemsize * count * (rows * inner + inner * columns + rows * columns)
    return max(flops / gpu.matmul_flops, moved / gpu.memory_rate)


def attention_ramp(keys: int) -> float:
    """The factor by which rows that see `keys` keys are slower than long rows, per FLOP."""
    return 1 + ATTENTION_RAMP / max(1, keys)
