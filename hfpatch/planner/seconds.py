"""Seconds of a run's step: the layers' (budget/seconds.py), with the optimizer's step and exchanges
between GPUs; of transformers' own layers; of a simulated step. Standard library only.
"""

from dataclasses import dataclass, replace

from hfpatch.budget.copies import passes_wait
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import ModelShape, StepMemory
from hfpatch.budget.hardware import HOST_BYTES_PER_SECOND, Gpu
from hfpatch.budget.pace import paced
from hfpatch.budget.policy import Policy
from hfpatch.budget.seconds import (
    HOST_SECONDS_PLAIN,
    StepTime,
    exchange_seconds,
    step_time,
    tails,
    work_seconds,
)
from hfpatch.lab.stock import (
    STOCK_CHECKPOINTING,
    STOCK_LOGIT_BYTES,
    STOCKS,
    stock_elementwise,
    untiled,
)
from hfpatch.planner.placements import Resident


@dataclass(frozen=True)
class RunTime(StepTime):
    """Seconds of one step on one GPU, of a whole run.

    optimizer: gradient norm, clipping and the optimizer's step.
    exchange: with an engine also the first layer's gather and the last layer's gradients, which
        nothing can hide.
    """

    optimizer: float = 0.0

    def parts(self) -> dict[str, float]:
        """The seconds by name, exchanges last."""
        found = dict(vars(self))
        exchange = found.pop("exchange")
        return found | {"exchange": exchange}


def run_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy: Policy | str, shape: ModelShape,
    stays: Resident, *, batch: int, tokens: int, itemsize: int = 2,
) -> tuple[RunTime, int]:  # fmt: skip
    """(the step's seconds, its bytes over the host link). policy: as in lab/stock.py."""
    sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
    if policy in STOCKS:
        again = policy == STOCK_CHECKPOINTING
        time, moved = _stock_time(gpu, flops, again, shape, stays, **sizes), 0
    else:
        policy = policy if isinstance(policy, Policy) else untiled(shape)
        engine = {"link": stays.link, "gathers": stays.gathers}
        time, moved = step_time(gpu, flops, memory, policy, shape, **sizes, **engine)
    optimizer = optimizer_seconds(gpu, memory, stays)
    time = replace(
        time, exchange=time.exchange + 2 * stays.gathers / shape.num_layers / gpu.peer_rate
    )
    return RunTime(**vars(time), optimizer=optimizer), moved + stays.link


def optimizer_seconds(gpu: Gpu, memory: StepMemory, stays: Resident) -> float:
    """Seconds of gradient norm, clipping and the optimizer's step.

    The norm reads every gradient, the clip reads and writes it, the step reads it. The step reads
    and writes parameters and optimizer states.
    """
    if stays.host_optimizer:
        return stays.host_optimizer / HOST_BYTES_PER_SECOND
    own = memory.gradients if stays.gradients is None else stays.gradients
    return (4 * own + 2 * (stays.parameters - stays.passed + stays.optimizer)) / gpu.memory_rate


def _stock_time(
    gpu: Gpu, flops: Flops, again: bool, shape: ModelShape, stays: Resident, *,
    batch: int, tokens: int, itemsize: int,
) -> StepTime:  # fmt: skip
    """Seconds of transformers' own layers. again: they run a second time in backward."""
    whole, rows, third = untiled(shape), batch * tokens, stays.link / 3
    gpu = paced(gpu, shape, whole, batch=batch, tokens=tokens)
    moved = stock_elementwise(shape, again)
    fore, back = (rows * itemsize * n / gpu.memory_rate for n in moved)
    if shape.adapters:
        dense = shape.over(lambda i: shape.dequantised_bytes(i, itemsize)) / gpu.memory_rate
        fore, back = fore + dense, back + 2 * dense
    loss = rows * shape.vocab_size * STOCK_LOGIT_BYTES / gpu.memory_rate
    matmul, attend = work_seconds(gpu, flops)
    waits = tails(gpu, shape, whole, batch, tokens)
    total = matmul + attend + fore + back + loss + waits
    copies = (0, third), (third, third)
    wait, *passes = passes_wait(gpu, flops, total, fore, *copies, gathers=stays.gathers)
    python = max(0.0, shape.num_layers * HOST_SECONDS_PLAIN - sum(passes) - wait)
    sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
    sent = exchange_seconds(gpu, shape, flops, attend, **sizes)
    return StepTime(matmul, attend, waits, fore + back, 0.0, loss, wait, python, sent)


def counted_time(
    gpu: Gpu,
    flops: Flops,
    memory: StepMemory,
    stays: Resident,
    waits: float = 0.0,
    *,
    on_disk: bool = False,
) -> RunTime:
    """Seconds of a simulated step of any implementation, from the bytes that the simulator counted.

    `flops.moved_forward` and `moved_backward` hold these bytes. The step's host memory is assumed
    to be copied there once and back once. Python's time is unknown and counted as 0.

    Args:
        waits: seconds from `budget.seconds.tails()`.
        on_disk: checkpoints are kept in files.
    """
    matmul, attend = work_seconds(gpu, flops)
    fore, back = flops.moved_forward / gpu.memory_rate, flops.moved_backward / gpu.memory_rate
    third = stays.link / 3
    up, down = (memory.host, third), (third, memory.host + third)
    files = (memory.host, memory.host) if on_disk else (0, 0)
    total = matmul + attend + fore + back + waits
    wait, *_ = passes_wait(gpu, flops, total, fore, up, down, files, stays.gathers)
    optimizer = optimizer_seconds(gpu, memory, stays)
    return RunTime(
        matmul, attend, waits, fore + back, 0.0, 0.0, wait, python_wait=0.0, optimizer=optimizer
    )
