"""The closed forms' old place, kept for one release: `hfpatch.memory.formula` and `hfpatch.memory.flops`."""

from hfpatch.memory.cuts import heads_per_group, loss_chunk_rows  # noqa: F401
from hfpatch.memory.flops import Flops, step_flops  # noqa: F401
from hfpatch.memory.formula import *  # noqa: F403
