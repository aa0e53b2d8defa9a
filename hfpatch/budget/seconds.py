"""The step model: seconds of a training step, as FLOPs and bytes over the rates of a GPU row.

The policy's choice, the plan and the callback all use this one model. hardware.py has the rates and
their sources, traffic.py the elements that kernels move, copies.py the copies between host and
device. Standard library only.
"""

from dataclasses import dataclass

from hfpatch.budget.copies import Step, behind_layers, link_bytes, passes_wait, weight_bytes
from hfpatch.budget.cuts import head_groups, loss_chunk_rows
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import STOCK, STOCK_CHECKPOINTING, ModelShape, StepMemory
from hfpatch.budget.hardware import HOST_BYTES_PER_SECOND, PIN_BYTES_PER_SECOND, Gpu
from hfpatch.budget.pace import paced
from hfpatch.budget.policy import LOSS_WORKSPACE, Policy
from hfpatch.budget.sequence import filled_up, rounds_for, sent_bytes
from hfpatch.budget.traffic import STOCK_LOGIT_BYTES, elementwise

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
class Resident:
    """Bytes that a placement (planner/placements.py) keeps for the whole step. Default: none.

    parameters, optimizer: on one GPU.
    gradients: on one GPU; None if all gradients stay there, as StepMemory counts them.
    host: on the machine, for all its ranks.
    link: over one GPU's host link in each step.
    host_optimizer: host memory that the optimizer reads and writes; 0 if it runs on the GPU.
    passed: the part of `parameters` that the optimizer skips (frozen ones, copies, gathered ones).
    gathers: received from other GPUs by one gather of all weights; forward gathers them once,
        backward gathers them and sends as many bytes of their gradients.
    """

    parameters: int = 0
    gradients: int | None = 0
    optimizer: int = 0
    host: int = 0
    link: int = 0
    host_optimizer: int = 0
    passed: int = 0
    gathers: int = 0


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
    optimizer: gradient norm, clipping and the optimizer's step.
    exchange: of heads between ranks that share rows: the part that attention does not hide, and
        the passes over memory that pack it. With an engine also the first layer's gather and the
        last layer's gradients, which nothing can hide.
    """

    matmul: float
    attention: float
    tails: float
    elementwise: float
    sums: float
    loss: float
    copy_wait: float
    python_wait: float
    optimizer: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def tails(gpu: Gpu, shape: ModelShape, policy, batch: int, tokens: int) -> float:
    """Seconds for which attention's backward launches wait for their last blocks.

    A block makes five products of its keys with all queries that see them. There is one launch per
    group of heads; a layer that runs whole, or a policy with `wide`, has one for all heads. Where
    ranks share rows, every layer has one per round.
    """
    long = tokens * shape.ranks

    def seen(last):
        return sum(k * min(w or long, long) for w, k in shape.window_counts(last=last).items())

    launches = seen(shape.num_layers)
    if isinstance(policy, Policy):
        plain = min(policy.plain, shape.num_layers) if shape.ranks == 1 else 0
        groups = head_groups(batch, tokens, shape, policy.wide)
        launches += (groups - 1) * seen(shape.num_layers - plain)
    block = 5 * BLOCK_ROWS * launches * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    return TAIL_SHARE * block * gpu.processors / gpu.attention_backward


def optimizer_seconds(gpu: Gpu, memory: StepMemory, stays) -> float:
    """Seconds of gradient norm, clipping and the optimizer's step.

    The norm reads every gradient, the clip reads and writes it, the step reads it. The step reads
    and writes parameters and optimizer states.
    """
    if stays.host_optimizer:
        return stays.host_optimizer / HOST_BYTES_PER_SECOND
    own = memory.gradients if stays.gradients is None else stays.gradients
    return (4 * own + 2 * (stays.parameters - stays.passed + stays.optimizer)) / gpu.memory_rate


# Triton compiles 1,518 variants of the kernels in about 240 s on one core (profiles/kernels); a
# step uses about a dozen.
COMPILE_SECONDS = 12 * 240 / 1518
# attention/attention.py tries two backends with four forwards and backwards each, on at most this
# many tokens.
TRIALS, TRIAL_TOKENS = 8, 16384
FIRST_STEP_BUDGET = 60.0  # seconds that the first step may take beyond an ordinary step


def first_step(
    gpu: Gpu, memory: StepMemory, policy, shape: ModelShape, *, tokens: int, itemsize: int = 2
) -> dict[str, float]:
    """Seconds by which the first step is longer than later ones, by cause.

    pinning: host memory for checkpoints and frozen weights. compiling: kernels, cached on disk
    afterwards. attention_choice: trials of attention's backends, on one row for any batch.
    """
    pinned = memory.host if isinstance(policy, Policy) and policy.offload == "host" else 0
    pinned += weight_bytes(shape, policy, itemsize)[0]
    found = {"pinning": pinned / PIN_BYTES_PER_SECOND, "compiling": 0.0, "attention_choice": 0.0}
    if policy in (STOCK, STOCK_CHECKPOINTING):
        return found
    tried, own = min(tokens * shape.ranks, TRIAL_TOKENS), -(-shape.num_heads // shape.ranks)
    once = own * tried**2 * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    trial = once / gpu.attention_forward + 2.5 * once / gpu.attention_backward
    return found | {"compiling": COMPILE_SECONDS, "attention_choice": TRIALS * trial}


def _seconds(gpu: Gpu, flops: Flops) -> tuple[float, float]:
    """Seconds of (all matmuls, attention), forward and backward."""
    forward = flops.attention_forward / gpu.attention_forward
    backward = flops.attention_backward / gpu.attention_backward
    return flops.matmul / gpu.matmul_flops, forward + backward


def counted_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, stays, tails: float = 0.0, *, on_disk: bool = False
) -> StepTime:
    """Seconds of a simulated step of any implementation, from the bytes that the simulator counted.

    `flops.moved_forward` and `moved_backward` hold these bytes. The step's host memory is assumed
    to be copied there once and back once. Python's time is unknown and counted as 0.

    Args:
        stays: the `Resident` bytes of a placement.
        tails: seconds from `tails()`.
        on_disk: checkpoints are kept in files.
    """
    matmul, attend = _seconds(gpu, flops)
    fore, back = flops.moved_forward / gpu.memory_rate, flops.moved_backward / gpu.memory_rate
    third = stays.link / 3
    up, down = (memory.host, third), (third, memory.host + third)
    files = (memory.host, memory.host) if on_disk else (0, 0)
    total = matmul + attend + fore + back + tails
    wait, *_ = passes_wait(gpu, flops, total, fore, up, down, files, stays.gathers)
    optimizer = optimizer_seconds(gpu, memory, stays)
    return StepTime(matmul, attend, tails, fore + back, 0.0, 0.0, wait, 0.0, optimizer)


def step_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy, shape: ModelShape, resident=None, *,
    batch: int, tokens: int, itemsize: int = 2,
) -> tuple[StepTime, int]:  # fmt: skip
    """(the step's seconds, its bytes over the host link). resident: None without a placement."""
    stays = resident or Resident()
    gpu = paced(gpu, shape, policy, batch=batch, tokens=tokens)
    step = Step(gpu, flops, memory, policy, shape, batch, tokens, itemsize)
    (fore, back), sums, loss = _elementwise(step), _sums(step), _loss(step)
    matmul, attend = _seconds(gpu, flops)
    waits = tails(gpu, shape, policy, batch, tokens)
    total = matmul + attend + fore + back + sums + loss + waits
    wait, computing, link = _copies(step, stays, total, fore, loss)
    time = StepTime(
        matmul, attend, waits, fore + back, sums, loss, wait, _python_wait(step, computing + wait),
        optimizer_seconds(gpu, memory, stays), _exchange(step, stays, attend),
    )  # fmt: skip
    return time, link


def _elementwise(step: Step) -> tuple[float, float]:
    """Seconds of kernels other than matmuls, attention and the loss: (forward, backward)."""
    policy, shape, rate, tiled = step.policy, step.shape, step.gpu.memory_rate, step.in_tiles
    groups = head_groups(step.batch, step.tokens, shape, policy.wide) if tiled else 1
    moved = elementwise(shape, policy, step.rows, step.count > 1, groups)
    fore, back = (step.itemsize * n / rate for n in moved)
    if shape.adapters:
        times = 1 if tiled and policy.dense else step.count
        dense = shape.over(lambda i: shape.dequantised_bytes(i, step.itemsize)) * times / rate
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
    shape, rows, tiled = step.shape, step.rows, step.in_tiles
    workspace = step.policy.loss_bytes if tiled else LOSS_WORKSPACE
    chunks = loss_chunk_rows(shape, rows, step.itemsize, workspace)[1]
    fused = tiled or step.policy == "off"
    logits = rows * shape.vocab_size * (3 * step.itemsize if fused else STOCK_LOGIT_BYTES)
    wide = 8 * shape.trained_head * chunks if chunks > 1 and fused else 0
    return (logits + wide) / step.gpu.memory_rate


def _copies(step: Step, stays: Resident, total: float, fore: float, loss: float) -> tuple:
    """(seconds of copies that nothing hides, seconds of computing, bytes over the host link).

    total: seconds of all computing. fore: of forward outside matmuls and attention. loss: of the
    passes over logits.
    """
    gpu, shape, policy = step.gpu, step.shape, step.policy
    # An engine that keeps weights on the host sends them to the device in both passes, and
    # gradients to the host in backward: a third of its bytes each.
    to_host, to_gpu = link_bytes(
        step.memory, policy, shape, batch=step.batch, tokens=step.tokens, itemsize=step.itemsize
    )
    third, on_disk = stays.link / 3, step.in_tiles and policy.offload == "disk"
    first, second = weight_bytes(shape, policy, step.itemsize)
    up, down = (to_host, third), (third + first, to_gpu + third + second)
    files = (to_host, to_gpu) if on_disk else (0, 0)
    wait, *passes = passes_wait(gpu, step.flops, total, fore, up, down, files, stays.gathers)
    if step.tiled_layers and to_host:
        rates = (gpu.link_rate,) * 2
        if on_disk:
            rates = tuple(map(min, rates, gpu.disk_rates))
        head = 6 * step.rows * shape.vocab_size * shape.hidden_size / gpu.matmul_flops + loss
        copies = to_host / rates[0], to_gpu / rates[1]
        wait = max(wait, sum(behind_layers(step, total - head, fore, copies, rates)))
    return wait, sum(passes), to_host + to_gpu + stays.link + first + second


def _python_wait(step: Step, hidden: float) -> float:
    """Seconds in which the device waits for Python. hidden: seconds in which Python is ahead."""
    n = step.tiled_layers
    # the layers of segments run forward once more
    again = n - -(-n // step.policy.every) if n else 0
    each = HOST_SECONDS_PER_LAYER + step.count * HOST_SECONDS_PER_TILE
    python = (n + FORWARD_SHARE * again) * each
    return max(0.0, python + (step.shape.num_layers - n) * HOST_SECONDS_PLAIN - hidden)


def _exchange(step: Step, stays: Resident, attend: float) -> float:
    """Seconds of exchanges between GPUs that nothing hides. attend: seconds of attention."""
    gpu, shape, flops, policy = step.gpu, step.shape, step.flops, step.policy
    exchange = 2 * stays.gathers / shape.num_layers / gpu.peer_rate
    if shape.ranks > 1:
        forwards = flops.attention_forward / (filled_up(shape) * flops.model_attention / 3)
        nbytes = sent_bytes(shape, step.rows, step.itemsize, forwards=forwards)
        sent, rounds = nbytes / gpu.peer_rate, rounds_for(shape, step.batch, step.tokens).count
        # stream_attention means short memory: no exchange runs during another round's attention.
        hides = not (step.in_tiles and policy.stream_attention)
        # Nothing hides the first round's exchange. Each exchange is packed before, unpacked after.
        exchange += max(sent / rounds, sent - attend) if hides else sent
        exchange += 4 * nbytes / gpu.memory_rate
    return exchange
