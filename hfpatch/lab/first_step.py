"""Seconds by which a run's first step is longer than later ones. Standard library only."""

from hfpatch.budget.copies import weight_bytes
from hfpatch.budget.formula import ModelShape, StepMemory
from hfpatch.budget.hardware import PIN_BYTES_PER_SECOND
from hfpatch.budget.policy import Policy
from hfpatch.lab.stock import STOCKS

# Triton compiles 1,518 variants of the kernels in about 240 s on one core (profiles/kernels); a
# step uses about a dozen.
COMPILE_SECONDS = 12 * 240 / 1518


def first_step(
    memory: StepMemory, policy, shape: ModelShape, itemsize: int = 2
) -> dict[str, float]:
    """Seconds by which the first step is longer than later ones, by cause.

    pinning: host memory for checkpoints and frozen weights. compiling: kernels, cached on disk
    afterwards.
    """
    pinned = 0
    if isinstance(policy, Policy):
        pinned = memory.host if policy.offload == "host" else 0
        pinned += weight_bytes(shape, policy, itemsize)[0]
    compiling = 0.0 if policy in STOCKS else COMPILE_SECONDS
    return {"pinning": pinned / PIN_BYTES_PER_SECOND, "compiling": compiling}
