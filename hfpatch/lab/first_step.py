"""Seconds by which a run's first step is longer than later ones. Standard library only."""

from hfpatch.budget.copies import weight_bytes
from hfpatch.budget.formula import ModelShape, StepMemory
from hfpatch.budget.hardware import PIN_BYTES_PER_SECOND, Gpu
from hfpatch.budget.policy import Policy
from hfpatch.lab.stock import STOCKS

# Triton compiles 1,518 variants of the kernels in about 240 s on one core (profiles/kernels); a
# step uses about a dozen.
COMPILE_SECONDS = 12 * 240 / 1518
# attention/attention.py tries two backends with four forwards and backwards each, on at most this
# many tokens.
TRIALS, TRIAL_TOKENS = 8, 16384


def first_step(
    gpu: Gpu, memory: StepMemory, policy, shape: ModelShape, *, tokens: int, itemsize: int = 2
) -> dict[str, float]:
    """Seconds by which the first step is longer than later ones, by cause.

    pinning: host memory for checkpoints and frozen weights. compiling: kernels, cached on disk
    afterwards. attention_choice: trials of attention's backends, on one row for any batch.
    """
    pinned = 0
    if isinstance(policy, Policy):
        pinned = memory.host if policy.offload == "host" else 0
        pinned += weight_bytes(shape, policy, itemsize)[0]
    found = {"pinning": pinned / PIN_BYTES_PER_SECOND, "compiling": 0.0, "attention_choice": 0.0}
    if policy in STOCKS:
        return found
    tried, own = min(tokens * shape.ranks, TRIAL_TOKENS), -(-shape.num_heads // shape.ranks)
    once = own * tried**2 * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    trial = once / gpu.attention_forward + 2.5 * once / gpu.attention_backward
    return found | {"compiling": COMPILE_SECONDS, "attention_choice": TRIALS * trial}
