"""How long a step takes: FLOPs and bytes over the rates of a GPU row. Standard library only."""

from dataclasses import dataclass

from hfpatch.memory.formula import STOCK, STOCK_CHECKPOINTING, Flops, ModelShape, Policy, StepMemory
from hfpatch.memory.hardware import HOST_BYTES_PER_SECOND, Gpu
from hfpatch.planner.placements import Resident

# Bytes that norms, RoPE, SwiGLU, residuals and copies move for one token of one layer, in multiples of hidden and of
# intermediate size: forward, recomputation and backward together. Stock layers make about twice as many passes.
HIDDEN_PASSES, INTERMEDIATE_PASSES, STOCK_FACTOR = 40, 22, 2


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one GPU. copy_wait: of host copies, what computing does not hide."""

    matmul: float
    attention: float
    elementwise: float
    copy_wait: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.copy_wait + self.optimizer


def link_bytes(memory: StepMemory, policy, shape: ModelShape, *, batch: int, tokens: int, itemsize: int = 2) -> int:
    """Bytes of checkpoints over the host link in one step, both ways; x comes back once a pass over the tiles."""
    if not isinstance(policy, Policy) or not memory.host:
        return 0
    inputs = -(-shape.num_layers // policy.every) * batch * tokens * shape.hidden_size * itemsize
    passes = 1 if max(1, policy.tile // batch) >= tokens else 3
    streamed = 1 if policy.stream_attention else 0
    outputs = memory.host - inputs
    return memory.host + passes * inputs + (1 + streamed) * outputs


def step_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy, shape: ModelShape, resident: Resident, *,
    batch: int, tokens: int, itemsize: int = 2,
) -> tuple[StepTime, int]:  # fmt: skip
    """The step's seconds and its bytes over the link."""
    matmul = flops.matmul / gpu.matmul_flops
    attention = flops.attention_forward / gpu.attention_forward + flops.attention_backward / gpu.attention_backward
    passes = HIDDEN_PASSES * shape.hidden_size + INTERMEDIATE_PASSES * shape.intermediate_size
    factor = STOCK_FACTOR if policy in (STOCK, STOCK_CHECKPOINTING) else 1
    elementwise = factor * passes * itemsize * batch * tokens * shape.num_layers / gpu.bandwidth
    moved = link_bytes(memory, policy, shape, batch=batch, tokens=tokens, itemsize=itemsize) + resident.link
    copy_wait = max(0.0, moved / gpu.link_rate - matmul - attention - elementwise)
    walked = 2 * (resident.parameters + resident.optimizer) if not resident.host_optimizer else 0
    optimizer = walked / gpu.bandwidth + resident.host_optimizer / HOST_BYTES_PER_SECOND
    return StepTime(matmul, attention, elementwise, copy_wait, optimizer), moved
