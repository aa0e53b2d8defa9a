"""The step model: seconds of a training step, as FLOPs and bytes over the rates of a GPU row.

The policy's choice, the plan and the callback all use this one model. hardware.py has the rates and
their sources, traffic.py the elements that kernels move, copies.py the copies between host and
device. Standard library only.
"""

from dataclasses import dataclass

from hfpatch.budget.copies import Step, behind_layers, link_bytes, passes_wait, weight_bytes
from hfpatch.budget.cuts import head_groups, loss_chunk_rows
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import ModelShape, StepMemory
from hfpatch.budget.hardware import Gpu
from hfpatch.budget.pace import paced
from hfpatch.budget.policy import Policy
from hfpatch.budget.sequence import rounds_for, sent_bytes
from hfpatch.budget.traffic import elementwise

# Bytes per element of a weight gradient that is summed over tiles in float32. The matmul adds into
# the sum (ops/_wide_sums.py): each tile reads and writes 4 bytes instead of writing a bfloat16
# gradient (2). The first tile reads nothing; after the last tile the sum is rounded.
SUM_BYTES, SUM_BYTES_ONCE = 6, 2
# Rows of keys in one block of a flash attention backward, and the part of a block's time for which
# a launch waits for its last block. List scheduling wastes at most one block a launch (Graham,
# 1969); half a block is assumed.
BLOCK_ROWS, TAIL_SHARE = 128, 0.5
# Python's time, forward and backward together: for a tiled layer, for each of its tiles, and for a
# layer that keeps everything. Timed on a CPU over small tensors (the last rows of profiles/host).
# The device waits for Python where its own work is shorter.
HOST_SECONDS_PER_LAYER, HOST_SECONDS_PER_TILE, HOST_SECONDS_PLAIN = 0.92e-3, 0.66e-3, 0.94e-3
FORWARD_SHARE = 0.3  # forward's part of Python's time for a tile, from the same rows


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one GPU.

    matmul, attention: forward and backward.
    tails: the waits at the end of attention's backward launches (one launch per group of heads).
    elementwise: norms, rotations, activations and residuals.
    sums: float32 sums of weight gradients over tiles.
    loss: passes over the logits.
    copy_wait: the part of the host copies and of an engine's gathers that computing does not hide.
    python_wait: waiting for Python to issue the work.
    exchange: of heads between ranks that share rows: the part that attention does not hide, and
        the passes over memory that pack it.
    """

    matmul: float
    attention: float
    tails: float
    elementwise: float
    sums: float
    loss: float
    copy_wait: float
    python_wait: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def tails(gpu: Gpu, shape: ModelShape, policy: Policy, batch: int, tokens: int) -> float:
    """Seconds for which attention's backward launches wait for their last blocks.

    A block makes five products of its keys with all queries that see them. There is one launch per
    group of heads; a layer that runs whole, or a policy with `wide`, has one for all heads. Where
    ranks share rows, every layer has one per round.
    """
    long = tokens * shape.ranks

    def seen(last):
        return sum(k * min(w or long, long) for w, k in shape.window_counts(last=last).items())

    plain = min(policy.plain, shape.num_layers) if shape.ranks == 1 else 0
    groups = head_groups(batch, tokens, shape, policy.wide)
    launches = seen(shape.num_layers) + (groups - 1) * seen(shape.num_layers - plain)
    block = 5 * BLOCK_ROWS * launches * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    return TAIL_SHARE * block * gpu.processors / gpu.attention_backward


def work_seconds(gpu: Gpu, flops: Flops) -> tuple[float, float]:
    """Seconds of (all matmuls, attention), forward and backward."""
    forward = flops.attention_forward / gpu.attention_forward
    backward = flops.attention_backward / gpu.attention_backward
    return flops.matmul / gpu.matmul_flops, forward + backward


def step_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy: Policy, shape: ModelShape, *,
    batch: int, tokens: int, itemsize: int = 2, link: int = 0, gathers: int = 0,
) -> tuple[StepTime, int]:  # fmt: skip
    """(the step's seconds, the bytes that its layers send over the host link).

    link, gathers: an engine's bytes over the link in a step, and of one gather of all weights.
    """
    gpu = paced(gpu, shape, policy, batch=batch, tokens=tokens)
    step = Step(gpu, flops, memory, policy, shape, batch, tokens, itemsize)
    (fore, back), sums, loss = _elementwise(step), _sums(step), _loss(step)
    matmul, attend = work_seconds(gpu, flops)
    waits = tails(gpu, shape, policy, batch, tokens)
    total = matmul + attend + fore + back + sums + loss + waits
    wait, computing, moved = _copies(step, link, gathers, total, fore, loss)
    python = _python_wait(step, computing + wait)
    sent = exchange_seconds(
        gpu, shape, flops, attend, batch=batch, tokens=tokens, itemsize=itemsize
    )
    return StepTime(matmul, attend, waits, fore + back, sums, loss, wait, python, sent), moved


def exchange_seconds(
    gpu: Gpu, shape: ModelShape, flops: Flops, hidden: float, *, batch: int, tokens: int, itemsize: int
) -> float:  # fmt: skip
    """Seconds of exchanges of heads between ranks that share rows, as far as nothing hides them.
    hidden: seconds of attention, during which exchanges run."""
    if shape.ranks == 1:
        return 0.0
    forwards = flops.attention_forward / (flops.model_attention / 3)
    nbytes = sent_bytes(shape, batch * tokens, itemsize, forwards=forwards)
    sent, rounds = nbytes / gpu.peer_rate, rounds_for(shape, batch, tokens).count
    # Nothing hides the first round's exchange. Each exchange is packed before, unpacked after.
    return max(sent / rounds, sent - hidden) + 4 * nbytes / gpu.memory_rate


def _elementwise(step: Step) -> tuple[float, float]:
    """Seconds of kernels other than matmuls, attention and the loss: (forward, backward)."""
    policy, shape, rate = step.policy, step.shape, step.gpu.memory_rate
    groups = head_groups(step.batch, step.tokens, shape, policy.wide)
    moved = elementwise(shape, policy, step.rows, step.count > 1, groups)
    fore, back = (step.itemsize * n / rate for n in moved)
    if shape.adapters:
        dense = shape.over(lambda i: shape.dequantised_bytes(i, step.itemsize)) * step.count / rate
        fore, back = fore + dense, back + 2 * dense
    return fore, back


def _sums(step: Step) -> float:
    """Seconds of float32 sums of weight gradients."""
    if step.count == 1:
        return 0.0
    weights = step.shape.over(step.shape.trained_of, 0, step.tiled_layers)
    return (SUM_BYTES * step.count + SUM_BYTES_ONCE) * weights / step.gpu.memory_rate


def _loss(step: Step) -> float:
    """Seconds of the passes over logits, and of the head's gradient, which is summed over their
    chunks."""
    shape, rows = step.shape, step.rows
    chunks = loss_chunk_rows(shape, rows, step.itemsize)[1]
    logits = rows * shape.vocab_size * 3 * step.itemsize
    wide = 8 * shape.trained_head * chunks if chunks > 1 else 0
    return (logits + wide) / step.gpu.memory_rate


def _copies(
    step: Step, link: int, gathers: int, total: float, fore: float, loss: float
) -> tuple[float, float, int]:
    """(seconds of copies that nothing hides, seconds of computing, bytes over the host link).

    link, gathers: as in step_time. total: seconds of all computing. fore: of forward outside
    matmuls and attention. loss: of the passes over logits.
    """
    gpu, shape, policy = step.gpu, step.shape, step.policy
    # An engine that keeps weights on the host sends them to the device in both passes, and
    # gradients to the host in backward: a third of its bytes each.
    to_host, to_gpu = link_bytes(
        step.memory, policy, shape, batch=step.batch, tokens=step.tokens, itemsize=step.itemsize
    )
    third, on_disk = link / 3, policy.offload == "disk"
    first, second = weight_bytes(shape, policy, step.itemsize)
    up, down = (to_host, third), (third + first, to_gpu + third + second)
    files = (to_host, to_gpu) if on_disk else (0, 0)
    wait, *passes = passes_wait(gpu, step.flops, total, fore, up, down, files, gathers)
    if step.tiled_layers and to_host:
        rates = (gpu.link_rate,) * 2
        if on_disk:
            rates = tuple(map(min, rates, gpu.disk_rates))
        head = 6 * step.rows * shape.vocab_size * shape.hidden_size / gpu.matmul_flops + loss
        copies = to_host / rates[0], to_gpu / rates[1]
        wait = max(wait, sum(behind_layers(step, total - head, fore, copies, rates)))
    return wait, sum(passes), to_host + to_gpu + first + second


def _python_wait(step: Step, hidden: float) -> float:
    """Seconds in which the device waits for Python. hidden: seconds in which Python is ahead."""
    n = step.tiled_layers
    # the layers of segments run forward once more
    again = n - -(-n // step.policy.every) if n else 0
    each = HOST_SECONDS_PER_LAYER + step.count * HOST_SECONDS_PER_TILE
    python = (n + FORWARD_SHARE * again) * each
    return max(0.0, python + (step.shape.num_layers - n) * HOST_SECONDS_PLAIN - hidden)
