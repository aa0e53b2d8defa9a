"""The closed forms' old place, kept for one release: `hfpatch.memory.formula` and `hfpatch.memory.flops`."""

from hfpatch.memory import cuts
from hfpatch.memory.cuts import loss_chunk_rows  # noqa: F401
from hfpatch.memory.flops import Flops, step_flops  # noqa: F401
from hfpatch.memory.formula import *  # noqa: F403
from hfpatch.memory.shape import ModelShape


def heads_per_group(batch: int, tokens: int, shape: ModelShape) -> int:
    return cuts.heads_per_group(batch, tokens, shape.num_heads, shape.num_kv_heads)
