"""How long a step takes: FLOPs and bytes over the rates of a GPU row. The policy, the plan and the callback ask this one
model. Standard library only.

Rates and their sources stand in hardware.py; the counts of bytes here are read off the code that moves them.
"""

from dataclasses import dataclass

from hfpatch.memory.cuts import head_groups, loss_chunk_rows, tiles
from hfpatch.memory.flops import Flops
from hfpatch.memory.formula import STOCK, STOCK_CHECKPOINTING, ModelShape, StepMemory, kept_columns
from hfpatch.memory.hardware import HOST_BYTES_PER_SECOND, PIN_BYTES_PER_SECOND, Gpu
from hfpatch.memory.policy import LOSS_WORKSPACE, Policy
from hfpatch.memory.sequence import filled_up, sent_bytes

# Layers of transformers' own make about twice as many passes: norms in float32, rotation and activation unfused.
STOCK_FACTOR = 2
# A float32 sum over tiles, added up in its matmul (ops/_wide_sums.py): read and written in the place of a bfloat16 gradient that is
# written; the first tile's is not read, the last sum rounded.
SUM_BYTES, SUM_BYTES_ONCE = 6, 2
# Rows of keys that one block of a flash attention backward works through, and the share of its time that a launch waits
# for its last block: list scheduling wastes at most one block a launch (Graham, 1969), half of one is assumed.
BLOCK_ROWS, TAIL_SHARE = 128, 0.5
# Python's own time, forward and backward, for a layer in tiles, for each of them, and for a layer that keeps everything: timed on a
# CPU over small tensors (profiles/host, whose last rows of hfpatch and of stock layers these give). The device waits for it where
# its own work is shorter.
HOST_SECONDS_PER_LAYER, HOST_SECONDS_PER_TILE, HOST_SECONDS_PLAIN = 0.92e-3, 0.66e-3, 0.94e-3
FORWARD_SHARE = 0.3  # of the host's time for a tile, by the same rows


@dataclass(frozen=True)
class Resident:
    """Bytes that stand all step long on one GPU, and what a placement does to the rest; nothing where all is left out.

    parameters, optimizer: on the GPU. gradients: on the GPU, None where they are the step's own (all of them, kept).
    host: on the machine, for all its ranks. link: over one GPU's host link each step. host_optimizer: bytes of host
    memory that the optimizer step walks through, 0 where it runs on the GPU. passed: of parameters, those that it does not (frozen
    ones, copies, what is gathered for a while).
    """

    parameters: int = 0
    gradients: int | None = 0
    optimizer: int = 0
    host: int = 0
    link: int = 0
    host_optimizer: int = 0
    passed: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one GPU. elementwise: norms, rotation, activations, residuals; sums: float32 sums of weight
    gradients over tiles; loss: passes over logits; tails: of attention launches, a group of heads each; copy_wait: of
    host copies, what computing does not hide; python_wait: for the host to issue the work; optimizer: gradient norm, clip
    and step; exchange: of heads between the ranks that share rows, what attention does not hide."""

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


def _turned(shape: ModelShape) -> int:
    """Elements of q and k that a token moves to have them rotated, and normed where they are."""
    return (4 if shape.qk_norm else 2) * (shape.q_size + shape.kv_size)


def layer_passes(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Elements that one token of a layer moves beside its matmuls: (forward, backward)."""
    D, turned = shape.hidden_size, _turned(shape)
    sparse = shape.is_sparse(layer)
    gathered = shape.experts_per_token * D if sparse else 0
    inner = shape.experts_per_token * shape.expert_size + shape.shared_size if sparse else shape.intermediate_size
    # A norm reads and writes, a residual reads two and writes one; an activation reads gate and up and writes one.
    forward = 2 * shape.norms * D + 6 * D + turned + 3 * inner + 6 * gathered
    # What several projections read has a gradient from each: their sums read two and write one.
    sums = (0 if shape.joined_qkv else 2) + (shape.gated and not shape.joined and not sparse)
    backward = 4 * shape.norms * D + 4 * D + 3 * sums * D + turned + 5 * inner + 8 * gathered
    return forward, backward


def passes_again(shape: ModelShape, layer: int, keep: tuple = (), several: bool = False) -> int:
    """The same of what a layer's backward runs again. What is kept is not made once more (but the sum after attention, which then
    has its two gradients summed apart); over several tiles the norm before attention runs for q, k and v and for their
    gradients."""
    D, turned = shape.hidden_size, _turned(shape)
    dead = turned if not shape.qk_norm else 0  # a rotation that nobody reads moves nothing
    again = layer_passes(shape, layer)[0] - 3 * D * shape.last_unread(layer)
    if "qkv" in keep:
        return again - dead
    return again + (2 * D + turned - dead) * several


def _elementwise(shape: ModelShape, policy, rows: int, several: bool) -> tuple[float, float]:
    """Bytes an element, forward and backward, of all layers."""
    n = shape.num_layers
    tiled = n - min(policy.plain, n) if isinstance(policy, Policy) else n if policy == STOCK_CHECKPOINTING else 0
    fore, back = (shape.over(lambda i, k=k: layer_passes(shape, i)[k]) for k in (0, 1))
    keep = policy.keep if isinstance(policy, Policy) else ()
    back += shape.over(lambda i: passes_again(shape, i, keep, several), 0, tiled)
    if several:
        # q, k, v into whole buffers, their gradients out of them; dx, dout and y tile by tile.
        whole = shape.q_size + shape.kv_size + shape.v_size
        fore += tiled * 2 * (whole + shape.hidden_size)
        made = 1 if "qkv" in keep else 2
        back += tiled * 2 * (made * whole + shape.hidden_size + shape.out_size)
    factor = STOCK_FACTOR if policy in (STOCK, STOCK_CHECKPOINTING) else 1
    return factor * rows * fore, factor * rows * back


def link_bytes(memory: StepMemory, policy, shape: ModelShape, *, batch: int, tokens: int, itemsize: int = 2) -> tuple:
    """Bytes of checkpoints over the host link in one step: (to the host in forward, back in backward), beside which fewer go the
    other way. x comes back once a pass over the tiles."""
    if not isinstance(policy, Policy) or not memory.host:
        return 0, 0
    rows, n = batch * tokens * itemsize, shape.num_layers - min(policy.plain, shape.num_layers)
    inputs = -(-n // policy.every) * rows * shape.hidden_size
    kept = n * rows * sum(kept_columns(shape, name) for name in policy.keep)
    single = tiles(batch, tokens, policy.tile)[0] == 1
    one = 0 if single or not policy.park else rows * shape.hidden_size
    attended, heads = rows * shape.out_size, rows * (shape.q_size + shape.kv_size + shape.v_size)
    saved = n - min(policy.again, n) if policy.save_attention and policy.every == 1 else 0
    again = attended if saved < n else 0
    x, lse = rows * shape.hidden_size, 4 * batch * tokens * shape.num_heads
    # Of one layer, and of a segment that runs again.
    passing = heads + attended + again + (min(policy.every, n) - 1) * (x + attended + lse) if policy.by_group else 0
    outputs = memory.host - inputs - kept - one - passing
    # x comes back for each phase that reads it; the sum after attention serves in its place.
    passes = 1 if single else 3 - ("qkv" in policy.keep) - ("mid" in policy.keep)
    back = passes * inputs + kept + outputs
    if policy.stream_attention and not single:  # once for the tiles, once for the groups of heads; their lse once
        back += outputs - saved * lse
    if policy.every > 1:  # and once for the segment's layers to run again, where it has more than one
        back += (n // policy.every + (n % policy.every > 1)) * rows * shape.hidden_size
    out, home = memory.host - one - passing, back + 2 * n * one
    if policy.by_group:
        skipped = n - -(-n // policy.every)
        out, home = out + n * (heads + again), home + n * (2 * heads + attended + 2 * again)
        home += skipped * (passes * x + 2 * attended + heads)
    return out, home


def weight_bytes(shape: ModelShape, policy, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of frozen weights that come from the host in forward and in backward. Both slots are full as backward begins, and a
    segment's last two as it has run again."""
    if getattr(policy, "weights", "gpu") != "host":
        return 0, 0
    forward, n = shape.over(lambda i: shape.frozen_bytes_of(i, itemsize)), shape.num_layers
    every = min(policy.every, n)
    again = n if every == 1 else n // every * max(1, 2 * every - 2)
    return forward, forward * max(0, again - 2) // n


def tails(gpu: Gpu, shape: ModelShape, policy, batch: int, tokens: int) -> float:
    """Seconds in which attention's backward launches wait for their last blocks: five products of a block of keys with
    all queries that see it. A layer that runs whole has one launch, as has a policy that is wide."""
    long = tokens * shape.ranks

    def seen(last):
        return sum(k * min(w or long, long) for w, k in shape.window_counts(last=last).items())

    launches = seen(shape.num_layers)
    if isinstance(policy, Policy):
        tiled = shape.num_layers - min(policy.plain, shape.num_layers)
        launches += (head_groups(batch, tokens, shape, policy.wide) - 1) * seen(tiled)
    block = 5 * BLOCK_ROWS * launches * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    return TAIL_SHARE * block * gpu.processors / gpu.attention_backward


def optimizer_seconds(gpu: Gpu, memory: StepMemory, stays) -> float:
    """Gradient norm, clip and step: every gradient is read for the norm, read and written by the clip, read by the step; the
    rest read and written."""
    if stays.host_optimizer:
        return stays.host_optimizer / HOST_BYTES_PER_SECOND
    own = memory.gradients if stays.gradients is None else stays.gradients
    return (4 * own + 2 * (stays.parameters - stays.passed + stays.optimizer)) / gpu.bandwidth


# Triton compiles 1,518 forms of the kernels in about 240 s of a core (profiles/kernels); a step meets about a dozen.
COMPILE_SECONDS = 12 * 240 / 1518
# ops/attention.py: two backends, three forwards and backwards each, over as many tokens at most.
TRIALS, TRIAL_TOKENS = 6, 16384
FIRST_STEP_BUDGET = 60.0  # seconds that a first step may take beside a step's own


def first_step(
    gpu: Gpu, memory: StepMemory, policy, shape: ModelShape, *, tokens: int, itemsize: int = 2
) -> dict[str, float]:
    """Seconds that the first step takes beside a step's own: host memory pinned, for checkpoints and frozen weights, kernels
    compiled (kept on disk from then on), attention's backends tried, on one row whatever the batch."""
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
    """Seconds of all matmuls and of attention, both ways."""
    attend = flops.attention_forward / gpu.attention_forward + flops.attention_backward / gpu.attention_backward
    return flops.matmul / gpu.matmul_flops, attend


def _copy_wait(
    gpu: Gpu, flops: Flops, total: float, fore: float, up: tuple, down: tuple, files: tuple = (0, 0)
) -> tuple[float, float, float]:
    """Seconds that copies take beyond the work which they hide behind, and those of that work, forward and backward: a third of
    what the mathematics needs is forward. total: seconds of the work; fore: of its forward, beside matmuls and attention; up,
    down: bytes to the host and to the device, in forward and in backward; each direction of the link hides behind its own pass.
    files: bytes of them written to a disk in forward and read in backward."""
    needed = (flops.model - flops.model_attention) / gpu.matmul_flops
    forward = needed / 3 + flops.model_attention / 3 / gpu.attention_forward + fore
    passes = forward, total - forward
    on_link = (max(u, d) / gpu.link_rate for u, d in zip(up, down))
    on_disk = (n / rate for n, rate in zip(files, gpu.disk_rates))
    waits = (max(0.0, link - hides, disk - hides) for link, disk, hides in zip(on_link, on_disk, passes))
    return sum(waits), *passes


def counted_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, stays, tails: float = 0.0, *, on_disk: bool = False
) -> StepTime:
    """The seconds of a step whose bytes were counted (flops.moved_forward, moved_backward), whoever's code it runs. What it keeps
    on the host goes there once and comes back once; no time of Python's is known. stays: a placement's bytes;
    tails: seconds of attention's launches (`tails`); on_disk: that it is kept in files."""
    matmul, attend = _seconds(gpu, flops)
    fore, back = flops.moved_forward / gpu.bandwidth, flops.moved_backward / gpu.bandwidth
    third = stays.link / 3
    up, down = (memory.host, third), (third, memory.host + third)
    files = (memory.host, memory.host) if on_disk else (0, 0)
    wait, *_ = _copy_wait(gpu, flops, matmul + attend + fore + back + tails, fore, up, down, files)
    optimizer = optimizer_seconds(gpu, memory, stays)
    return StepTime(matmul, attend, tails, fore + back, 0.0, 0.0, wait, 0.0, optimizer)


def step_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy, shape: ModelShape, resident=None, *,
    batch: int, tokens: int, itemsize: int = 2,
) -> tuple[StepTime, int]:  # fmt: skip
    """The step's seconds and its bytes over the link. resident: a placement's bytes (planner/placements.py)."""
    stays = resident or Resident()
    rows = batch * tokens
    tiled = isinstance(policy, Policy)
    count = tiles(batch, tokens, policy.tile)[0] if tiled else 1
    several = count > 1
    fore, back = (itemsize * n / gpu.bandwidth for n in _elementwise(shape, policy, rows, several))

    sums = 0.0
    n = shape.num_layers - min(policy.plain, shape.num_layers) if tiled else 0
    if several:
        weights = shape.over(shape.trained_of, 0, n)
        sums = (SUM_BYTES * count + SUM_BYTES_ONCE) * weights / gpu.bandwidth
    chunks = loss_chunk_rows(shape, rows, itemsize, policy.loss_bytes if tiled else LOSS_WORKSPACE)[1]
    if shape.adapters:
        times = 1 if tiled and policy.dense else count
        dense = shape.over(lambda i: shape.dequantised_bytes(i, itemsize)) * times / gpu.bandwidth
        fore, back = fore + dense, back + 2 * dense
    logits = 3 * rows * shape.vocab_size * (itemsize if tiled or policy == "off" else 4)
    wide = 8 * shape.trained_head * chunks if chunks > 1 and (tiled or policy == "off") else 0
    loss = (logits + wide) / gpu.bandwidth

    matmul, attend = _seconds(gpu, flops)
    waits = tails(gpu, shape, policy, batch, tokens)

    # An engine that keeps weights on the host sends them down in both passes and gradients up in the second.
    to_host, to_gpu = link_bytes(memory, policy, shape, batch=batch, tokens=tokens, itemsize=itemsize)
    third = stays.link / 3
    first, second = weight_bytes(shape, policy, itemsize)
    up, down = (to_host, third), (third + first, to_gpu + third + second)
    total = matmul + attend + fore + back + sums + loss + waits
    files = (to_host, to_gpu) if tiled and policy.offload == "disk" else (0, 0)
    wait, forward, backward = _copy_wait(gpu, flops, total, fore, up, down, files)

    again = n - -(-n // policy.every) if n else 0  # in segments, forward once more
    each = HOST_SECONDS_PER_LAYER + count * HOST_SECONDS_PER_TILE
    python = (n + FORWARD_SHARE * again) * each + (shape.num_layers - n) * HOST_SECONDS_PLAIN
    python_wait = max(0.0, python - forward - backward - wait)

    optimizer = optimizer_seconds(gpu, memory, stays)
    exchange = 0.0
    if shape.ranks > 1:
        forwards = flops.attention_forward / (filled_up(shape) * flops.model_attention / 3)
        exchange = sent_bytes(shape, rows, itemsize, forwards=forwards) / gpu.peer_rate
        hides = not (tiled and policy.stream_attention)  # short of memory, no round is under way beside another
        exchange = max(0.0, exchange - attend) if hides else exchange
    time = StepTime(matmul, attend, waits, fore + back, sums, loss, wait, python_wait, optimizer, exchange)
    return time, to_host + to_gpu + stays.link + first + second
