"""Closed forms: the bytes of a training step; flops.py has its FLOPs. Standard library only, so a
plan needs no torch.

A step's memory is the largest of a few moments. Each moment is a sum of the buffers that its code
holds (layer/call.py, ops/linear_cross_entropy.py, ops/embedding.py). The simulator runs that code; tests
keep the two within 3% of each other, within 5% for the families beside Llama.

sizes.py explains the names of sizes; tiled.py has the moments of tiled layers, moments.py all
others.
"""

from dataclasses import dataclass
from functools import lru_cache

from hfpatch.budget.hardware import GiB
from hfpatch.budget.moments import FORWARD, Moment
from hfpatch.budget.policy import RING_SLOTS, WEIGHT_SLOTS, Policy  # noqa: F401
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.sizes import Sizes, plain_bytes
from hfpatch.budget.tiled import TiledStep

__all__ = ["GiB", "ModelShape", "Moment", "Policy", "RING_SLOTS", "StepMemory", "step_memory"]


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step whose parameters and gradients stay on the device. host: pinned
    checkpoints."""

    parameters: int
    gradients: int
    moments: tuple
    host: int

    @property
    def peak_moment(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)

    @property
    def peak(self) -> int:
        return self.parameters + self.peak_moment.total

    @property
    def beyond(self) -> int:
        """Bytes beyond parameters and gradients at the moment of the highest total."""
        return self.peak_moment.beyond


# A search needs the same sizes thousands of times.
_sizes = lru_cache(maxsize=16)(Sizes)


def step_memory(
    shape: ModelShape, policy: Policy, *, batch: int, tokens: int, itemsize: int = 2
) -> StepMemory:
    """Memory of one forward and backward."""
    sizes = _sizes(shape, batch, tokens, itemsize)
    step = TiledStep(sizes, policy)
    return StepMemory(sizes.parameters, sizes.gradients, tuple(step.moments()), step.host)


def spare_bytes(
    memory: StepMemory,
    shape: ModelShape,
    policy: Policy,
    *,
    batch: int,
    tokens: int,
    itemsize: int = 2,
) -> tuple[int, ...]:
    """Bytes that the sources of copies may take during each layer's forward, and 0 behind the last
    layer: the step's peak minus the peak of that forward.

    memory: of the same policy and sizes.
    """
    n, tiled = shape.num_layers, shape.num_layers - min(policy.plain, shape.num_layers)
    if policy.offload == "gpu" or policy.every > 1 or shape.ranks > 1 or not tiled:
        return (0,) * (n + 1)
    (forward,) = (m.beyond for m in memory.moments if m.name == FORWARD)
    left, sizes, found = (
        max(m.beyond for m in memory.moments) - forward,
        _sizes(shape, batch, tokens, itemsize),
        [],
    )
    for layer in range(n):
        left -= plain_bytes(sizes, layer) if layer >= tiled else 0
        found.append(max(0, left))
    return (*found, 0)
