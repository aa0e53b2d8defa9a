"""Closed forms: the bytes of a training step; flops.py has its FLOPs. Standard library only, so a
plan needs no torch.

A step's memory is the largest of a few moments. Each moment is a sum of the buffers that its code
holds (layer/call.py, ops/_linear_ce_loop.py, ops/embedding.py; for stock models transformers' own
code). The simulator runs that code; tests keep the two within 3% of each other.

sizes.py explains the names of sizes; tiled.py has the moments of tiled layers, moments.py all
others.
"""

from dataclasses import dataclass
from functools import lru_cache

from hfpatch.budget.hardware import GiB
from hfpatch.budget.moments import (
    FORWARD,
    Moment,
    embedding_moments,
    loss_moment,
    plain_moments,
)
from hfpatch.budget.policy import Policy
from hfpatch.budget.shape import ModelShape
from hfpatch.budget.sizes import Sizes, plain_bytes
from hfpatch.budget.tiled import RING_SLOTS, TiledStep

__all__ = ["GiB", "ModelShape", "Moment", "Policy", "RING_SLOTS", "StepMemory", "step_memory"]

STOCK, STOCK_CHECKPOINTING, UNTILED = "stock", "stock-checkpointing", "off"
# layers whose frozen weights fit on the device at once, if frozen weights wait on the host
WEIGHT_SLOTS = 2


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
    shape: ModelShape, policy, *, batch: int, tokens: int, itemsize: int = 2
) -> StepMemory:
    """Memory of one forward and backward.

    policy: a Policy, or "off" (hfpatch's kernels, layers run whole), "stock" or
    "stock-checkpointing" (transformers without hfpatch).

    Raises:
        ValueError: another policy.
    """
    sizes = _sizes(shape, batch, tokens, itemsize)
    if isinstance(policy, Policy):
        step = TiledStep(sizes, policy)
        moments, host = step.moments(), step.host
    elif policy in (STOCK, STOCK_CHECKPOINTING):
        moments, host = _stock(sizes, policy == STOCK_CHECKPOINTING), 0
    elif policy == UNTILED:
        moments, host = _untiled(sizes), 0
    else:
        raise ValueError(
            f"hfpatch: a policy, off, stock or stock-checkpointing was expected, {policy!r} came; "
            "pass one."
        )
    return StepMemory(sizes.parameters, sizes.gradients, tuple(moments), host)


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
    if (
        policy.offload == "gpu"
        or policy.every > 1
        or policy.by_group
        or shape.ranks > 1
        or not tiled
    ):
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


def _stock(z: Sizes, checkpointing: bool):
    """Moments of transformers' own Llama with sdpa: autograd's saved tensors, and three fp32
    logits."""
    shape, n = z.shape, z.shape.num_layers
    wide = z.rows * shape.hidden_size * 4
    norm = wide + 2 * z.u + 4 * z.rows  # fp32 input, normalised, scaled, rstd
    saved = 2 * norm + z.q + z.out + z.kv + z.lse + 4 * z.f
    kept = n * (z.u if checkpointing else saved)
    logits = z.rows * shape.vocab_size
    final = wide + z.u
    last = z.u + final + z.always
    moments = [Moment("loss", 0, checkpoints=kept, layer=last, loss=3 * 4 * logits)]
    # gate, silu, up, their gradients and the gradient of the product
    working = saved - z.f + 3 * z.f + z.u + z.always
    others = kept if checkpointing else kept - saved + z.u
    moments.append(Moment("last layer", z.head_gradient, checkpoints=others, layer=working))
    moments.append(
        Moment("first layer", z.head_gradient + z.body - z.first, checkpoints=z.u, layer=working)
    )
    moments += embedding_moments(z, fused=False)
    return moments


def _untiled(z: Sizes):
    """Moments of hfpatch's kernels in layers that run whole, without checkpoints."""
    plain = z.shape.over(lambda i: plain_bytes(z, i))
    return [
        loss_moment(z, plain),
        *plain_moments(z, 0, 0, plain),
        *embedding_moments(z, fused=True),
    ]
