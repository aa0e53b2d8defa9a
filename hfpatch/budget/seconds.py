"""The step model: seconds of a training step, as FLOPs and bytes over the rates of a GPU row.

The policy's choice, the plan and the callback all use this one model. hardware.py has the rates and
their sources. The byte counts here follow the code that moves the bytes. Standard library only.
"""

from dataclasses import dataclass
from operator import add

from hfpatch.budget.adapters import layer_linears
from hfpatch.budget.cuts import head_groups, loss_chunk_rows, tiles
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import (
    STOCK,
    STOCK_CHECKPOINTING,
    ModelShape,
    StepMemory,
    spare_bytes,
)
from hfpatch.budget.hardware import HOST_BYTES_PER_SECOND, PIN_BYTES_PER_SECOND, Gpu
from hfpatch.budget.pace import paced
from hfpatch.budget.policy import LOSS_WORKSPACE, Policy
from hfpatch.budget.sequence import filled_up, sent_bytes
from hfpatch.budget.sizes import kept_columns

# transformers' own layers move so many times the bytes of fused ones, and so many bytes a logit
# (counted on their code, tests/budget/test_flops.py): norms and logits run in float32, rotation and
# activation are not fused.
STOCK_FACTOR, STOCK_LOGIT_BYTES = 3.2, 44
# Bytes an element of a weight gradient that is summed over tiles in float32. The matmul adds into
# the sum (ops/_wide_sums.py): each tile reads and writes 4 bytes where a bfloat16 gradient would be
# written (2). The first tile reads nothing; after the last one the sum is rounded.
SUM_BYTES, SUM_BYTES_ONCE = 6, 2
# Rows of keys in one block of a flash attention backward, and the part of a block's time for which
# a launch waits for its last block. List scheduling wastes at most one block a launch (Graham,
# 1969); half a block is assumed.
BLOCK_ROWS, TAIL_SHARE = 128, 0.5
# Python's time, forward and backward together: for a tiled layer, for each of its tiles, and for a
# layer that keeps everything. Timed on a CPU over small tensors (the last rows of profiles/host).
# The device waits for Python where its own work is shorter.
HOST_SECONDS_PER_LAYER, HOST_SECONDS_PER_TILE, HOST_SECONDS_PLAIN = 0.92e-3, 0.66e-3, 0.94e-3
FORWARD_SHARE = 0.3  # forward's part of Python's time for a tile, by the same rows


@dataclass(frozen=True)
class Resident:
    """Bytes that a placement (planner/placements.py) keeps for the whole step. Default: none.

    parameters, optimizer: on one GPU.
    gradients: on one GPU; None where all gradients stay there, as StepMemory counts them.
    host: on the machine, for all its ranks.
    link: over one GPU's host link in each step.
    host_optimizer: host memory that the optimizer reads and writes, 0 where it runs on the GPU.
    passed: the part of `parameters` that the optimizer skips (frozen ones, copies, gathered ones).
    gathers: received from other GPUs by one gather of all weights; forward gathers them once,
        backward gathers them and sends as much of their gradients.
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

    matmul, attention: products, forward and backward.
    tails: the waits at the end of attention's backward launches (one launch a group of heads).
    elementwise: norms, rotations, activations and residuals.
    sums: float32 sums of weight gradients over tiles.
    loss: passes over the logits.
    copy_wait: the part of the host copies and of an engine's gathers that computing does not hide.
    python_wait: waiting for Python to issue the work.
    optimizer: gradient norm, clipping and the optimizer's step.
    exchange: of heads between ranks that share rows, the part that attention does not hide; of an
        engine the first layer's gather and the last one's gradients, which nothing can hide.
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


def _turned(shape: ModelShape) -> int:
    """Elements a token that rotating q and k (and norming them, where the model does) moves."""
    return (4 if shape.qk_norm else 2) * (shape.q_size + shape.kv_size)


# Elements that experts move beside their products (ops/experts.py), for each routed element of their
# inner size and of the hidden size: forward, backward. Rows go there and come back; the activation
# reads gate and up and writes one, its backward reads them and da and writes three.
OUR_EXPERTS = (3, 2), (6, 2)
# The same of transformers' grouped products, by whether experts have biases.
EXPERT_PASSES = {False: ((5, 6.25), (13, 12.25)), True: ((24, 11), (36, 14))}
# The same of attention with sinks and its rotation, for each element of q and k.
SINK_PASSES = 19, 22


def unfused_passes(shape: ModelShape, layer: int, ours: bool = True) -> tuple[float, float]:
    """Elements a token that the code of transformers and PEFT moves beside
    what is fused: (forward, backward). Of experts, attention with sinks, and adapters.
    """
    k, turned = shape.experts_per_token * shape.is_sparse(layer), shape.q_size + shape.kv_size
    # Elements, and how often they move: an adapter's output is scaled and added, its gradient
    # scaled, its input gradient added.
    (fore_in, fore), (back_in, back) = OUR_EXPERTS if ours else EXPERT_PASSES[shape.expert_bias]
    # of rows, and of the tokens beside
    ways = (k + ours * shape.is_sparse(layer)) * shape.hidden_size
    rows = [(k * shape.expert_size, fore_in, back_in), (ways, fore, back)]
    rows += [(shape.sinks * turned, *SINK_PASSES)]
    adapters = shape.adapters.chosen(layer_linears(shape, layer)) if shape.adapters else {}
    rows += [(inner, 0, 3) for inner, _ in adapters.values()]
    rows += [(columns, 5, 2) for _, columns in adapters.values()]
    return sum(n * each for n, each, _ in rows), sum(n * each for n, _, each in rows)


def unread_of_experts(shape: ModelShape, layer: int) -> int:
    """Those of the forward that experts leave out when they run again: nobody reads their output."""
    if shape.norm_after or not shape.is_sparse(layer):
        return 0
    k, D = shape.experts_per_token, shape.hidden_size
    return OUR_EXPERTS[0][0] * k * shape.expert_size + (k + 1) * D


def layer_passes(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Elements a token that a layer's fused operations move: (forward, backward)."""
    D, turned = shape.hidden_size, _turned(shape)
    sparse = shape.is_sparse(layer)
    inner = shape.shared_size if sparse else shape.intermediate_size
    # A norm reads and writes; a residual reads two and writes one, as an activation of gate and up.
    forward = 2 * shape.norms * D + 6 * D + turned + 3 * inner
    # Several projections read one input: adding their input gradients reads two and writes one.
    sums = (0 if shape.joined_qkv else 2) + (shape.gated and not shape.joined and not sparse)
    backward = 4 * shape.norms * D + 4 * D + 3 * sums * D + turned + 5 * inner
    return forward, backward


def passes_again(shape: ModelShape, layer: int, keep: tuple = (), several: bool = False) -> int:
    """Elements a token that the second forward inside a layer's backward moves outside its matmuls.

    keep: names of KEEPABLE. Kept q, k and v save the rotation and norm. "mid" saves nothing here:
    its two gradients are then added in a pass of their own. several: more than one tile; the norm
    before attention then runs twice, for q, k, v and for their gradients.
    """
    D, turned = shape.hidden_size, _turned(shape)
    dead = turned if not shape.qk_norm else 0  # a rotation whose result is unread moves nothing
    again = layer_passes(shape, layer)[0] - 3 * D * shape.last_unread(layer)
    if "qkv" in keep:
        return again - dead
    return again + (2 * D + turned - dead) * several


def _elementwise(
    shape: ModelShape, policy, rows: int, several: bool, groups: int = 1
) -> tuple[float, float]:
    """Elements that all layers move for `rows` tokens outside matmuls: (forward, backward).

    groups: how many groups of KV heads attention's backward goes by.
    """
    n = shape.num_layers
    tiled = n if policy == STOCK_CHECKPOINTING else 0
    if isinstance(policy, Policy):
        tiled = n - min(policy.plain, n)
    fore, back = (shape.over(lambda i, k=k: layer_passes(shape, i)[k]) for k in (0, 1))
    keep = policy.keep if isinstance(policy, Policy) else ()
    back += shape.over(lambda i: passes_again(shape, i, keep, several), 0, tiled)
    if several:
        # Each tile's q, k and v are copied into whole buffers, their gradients out of such; y, dx
        # and dout are copied tile by tile too.
        whole = shape.q_size + shape.kv_size + shape.v_size
        fore += tiled * 2 * (whole + shape.hidden_size)
        made = 1 if "qkv" in keep else 2
        back += tiled * 2 * (made * whole + shape.hidden_size + shape.out_size)
    elif groups > 1:  # each group's part of out and dout is cut out of the whole
        back += tiled * 4 * shape.out_size
    factor = STOCK_FACTOR if policy in (STOCK, STOCK_CHECKPOINTING) else 1
    ours = policy not in (STOCK, STOCK_CHECKPOINTING)
    own = [shape.over(lambda i, k=k: unfused_passes(shape, i, ours)[k]) for k in (0, 1)]
    own[1] += shape.over(
        lambda i: unfused_passes(shape, i)[0] - unread_of_experts(shape, i), 0, tiled
    )
    return rows * (factor * fore + own[0]), rows * (factor * back + own[1])


def link_bytes(
    memory: StepMemory, policy, shape: ModelShape, *, batch: int, tokens: int, itemsize: int = 2
) -> tuple[int, int]:
    """Bytes of checkpoints over the host link in one step: (to the host, back to the device).

    The first go in forward, the second come in backward; the bytes that go against that direction
    are fewer, so they hide. x comes back once for each pass over the tiles.
    """
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
    # Host buffers that one running layer uses, and those of a segment that runs again.
    passing = 0
    if policy.by_group:
        passing = heads + attended + again + (min(policy.every, n) - 1) * (x + attended + lse)
    outputs = memory.host - inputs - kept - one - passing
    # Each phase that reads x fetches it; a kept sum after attention is read in place of x.
    passes = 1 if single else 3 - ("qkv" in policy.keep) - ("mid" in policy.keep)
    back = passes * inputs + kept + outputs
    if policy.stream_attention and not single:
        # Attention outputs come once for the tiles and once for the groups of heads, lse once.
        back += outputs - saved * lse
    if policy.every > 1:  # a segment of several layers fetches its input once more, to run again
        back += (n // policy.every + (n % policy.every > 1)) * rows * shape.hidden_size
    out, home = memory.host - one - passing, back + 2 * n * one
    if policy.by_group:
        skipped = n - -(-n // policy.every)
        out, home = out + n * (heads + again), home + n * (2 * heads + attended + 2 * again)
        home += skipped * (passes * x + 2 * attended + heads)
    return out, home


def weight_bytes(shape: ModelShape, policy, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of frozen weights that come from the host: (in forward, in backward).

    Two layers' weights fit the device at once, so backward starts with the last two already there,
    and a segment that ran again still has its last two.
    """
    if getattr(policy, "frozen_weights", "gpu") != "host":
        return 0, 0
    forward, n = shape.over(lambda i: shape.frozen_bytes_of(i, itemsize)), shape.num_layers
    every = min(policy.every, n)
    again = n if every == 1 else n // every * max(1, 2 * every - 2)
    return forward, forward * max(0, again - 2) // n


def tails(gpu: Gpu, shape: ModelShape, policy, batch: int, tokens: int) -> float:
    """Seconds for which attention's backward launches wait for their last blocks.

    A block makes five products of its keys with all queries that see them. There is one launch a
    group of heads; a layer that runs whole, or a policy with `wide`, has one for all heads.
    """
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
# attention/attention.py tries two backends with four forwards and backwards each, on so many
# tokens at most.
TRIALS, TRIAL_TOKENS = 8, 16384
FIRST_STEP_BUDGET = 60.0  # seconds that the first step may take beyond an ordinary step


def first_step(
    gpu: Gpu, memory: StepMemory, policy, shape: ModelShape, *, tokens: int, itemsize: int = 2
) -> dict[str, float]:
    """Seconds by which the first step is longer than later ones, by cause.

    pinning: host memory for checkpoints and frozen weights. compiling: kernels, cached on disk
    afterwards. attention_choice: trials of attention's backends, on one row whatever the batch.
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


def _copy_wait(
    gpu: Gpu, flops: Flops, total: float, fore: float, up: tuple, down: tuple,
    files: tuple = (0, 0), gathers: int = 0,
) -> tuple[float, float, float]:  # fmt: skip
    """(seconds by which copies exceed the work that hides them, that work in forward, in backward).

    Forward is a third of the FLOPs that the mathematics needs. The copies of a pass hide behind the
    work of that pass; the link's two directions run at once.

    Args:
        total: seconds of the whole step's work.
        fore: seconds of forward's work outside matmuls and attention.
        up, down: bytes (to the host, to the device), each for (forward, backward).
        files: those of them that are (written to a disk in forward, read in backward).
        gathers: bytes of one gather between GPUs, over links of their own or over the host's.
    """
    needed = (flops.model - flops.model_attention) / gpu.matmul_flops
    forward = needed / 3 + flops.model_attention / 3 / gpu.attention_forward + fore
    passes = forward, total - forward
    on_link = (max(u, d) / gpu.link_rate for u, d in zip(up, down))
    on_disk = (n / rate for n, rate in zip(files, gpu.disk_rates))
    peers = (passes * gathers / gpu.peer_rate for passes in (1, 2))
    on_link = map(max if gpu.peer else add, on_link, peers)
    copies = map(max, on_link, on_disk)
    waits = (max(0.0, copy - work) for copy, work in zip(copies, passes))
    return sum(waits), *passes


def _behind_layers(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy: Policy, shape: ModelShape, layers: float,
    fore: float,
    copies: tuple[float, float], rates: tuple[float, float], *, batch: int, tokens: int,
    itemsize: int,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the checkpoints' copies, forward and backward, that layers do not hide: n tiled
    ones, behind them p plain ones.

    layers: seconds of all layers, both ways; fore: of their forward, beside matmuls and attention;
    copies, rates: seconds and bytes/s, to the host and back. A layer's copies may run on beside
    later layers as far as memory has room for their sources; in backward the tensors of a layer are
    sent for one layer ahead, but for q, k and v, which the layer itself sends for: nothing hides
    them where attention runs again. The head hides nothing.
    """
    L, rows = shape.num_layers, batch * tokens
    p = min(policy.plain, L)
    n, (up, down) = L - p, copies
    products = (
        2
        * rows
        * (L * (shape.qkv_weights + shape.o_weights) + shape.over(shape.mlp_weights))
        / gpu.matmul_flops
    )
    attention = flops.model_attention / 3
    forward = (products + attention / gpu.attention_forward + fore) / L
    trained = 1 if shape.adapters else 2
    plain = (trained * products + 2.5 * attention / gpu.attention_backward) / L
    (to_host, to_gpu), waits = rates, [0.0]
    behind = down - (layers - L * forward - p * plain) - (plain if p > 1 else 0)
    # Nothing runs beside what the last layer saves inside its last tile, nor beside the way back of
    # that layer's first tile.
    count, alone = tiles(batch, tokens, policy.tile)[0], policy.every == 1
    tile, inside = (
        rows * itemsize / count,
        alone * sum(kept_columns(shape, name) for name in policy.keep if name != "qkv"),
    )
    first = shape.hidden_size + alone * policy.save_attention * shape.out_size + inside
    if inside or up > n * forward:
        spares = spare_bytes(memory, shape, policy, batch=batch, tokens=tokens, itemsize=itemsize)
        # As the last tiled layer ends, and then each plain one; and what each layer saves last,
        # where nothing may live on beside the next.
        waits += [up - (n + k) * forward - spares[n + k] / to_host for k in range(p + 1)]
        waits += [n * max(0, tile * inside - spares[n - 1]) / to_host]
    if alone and "qkv" in policy.keep:
        again = min(policy.again, n) if policy.save_attention else n
        # Of several tiles the first one's tensors may be on the link before q, k and v.
        waited = count * kept_columns(shape, "qkv") + (count > 1) * (
            inside + shape.hidden_size * ("mid" not in policy.keep)
        )
        behind = max(behind, again * tile * waited / to_gpu)
    return (
        max(waits) + tile * inside * (p == 0) / to_host,
        max(0.0, behind) + tile * first * (p < 2) / to_gpu,
    )


def counted_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, stays, tails: float = 0.0, *, on_disk: bool = False
) -> StepTime:
    """Seconds of a simulated step of any implementation, from the bytes that the simulator counted.

    `flops.moved_forward` and `moved_backward` are those bytes. What the step keeps on the host is
    taken to go there once and come back once. Python's time is unknown and counted as 0.

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
    wait, *_ = _copy_wait(gpu, flops, total, fore, up, down, files, stays.gathers)
    optimizer = optimizer_seconds(gpu, memory, stays)
    return StepTime(matmul, attend, tails, fore + back, 0.0, 0.0, wait, 0.0, optimizer)


def step_time(
    gpu: Gpu, flops: Flops, memory: StepMemory, policy, shape: ModelShape, resident=None, *,
    batch: int, tokens: int, itemsize: int = 2,
) -> tuple[StepTime, int]:  # fmt: skip
    """(the step's seconds, its bytes over the host link). resident: None where nothing stays."""
    stays = resident or Resident()
    gpu, rows = paced(gpu, shape, policy, batch=batch, tokens=tokens), batch * tokens
    tiled = isinstance(policy, Policy)
    count = tiles(batch, tokens, policy.tile)[0] if tiled else 1
    several = count > 1
    groups = head_groups(batch, tokens, shape, policy.wide) if tiled else 1
    moved = _elementwise(shape, policy, rows, several, groups)
    fore, back = (itemsize * n / gpu.memory_rate for n in moved)

    sums = 0.0
    n = shape.num_layers - min(policy.plain, shape.num_layers) if tiled else 0
    if several:
        weights = shape.over(shape.trained_of, 0, n)
        sums = (SUM_BYTES * count + SUM_BYTES_ONCE) * weights / gpu.memory_rate
    workspace = policy.loss_bytes if tiled else LOSS_WORKSPACE
    chunks = loss_chunk_rows(shape, rows, itemsize, workspace)[1]
    if shape.adapters:
        times = 1 if tiled and policy.dense else count
        dense = shape.over(lambda i: shape.dequantised_bytes(i, itemsize)) * times / gpu.memory_rate
        fore, back = fore + dense, back + 2 * dense
    fused = tiled or policy == "off"
    logits = rows * shape.vocab_size * (3 * itemsize if fused else STOCK_LOGIT_BYTES)
    wide = 8 * shape.trained_head * chunks if chunks > 1 and fused else 0
    loss = (logits + wide) / gpu.memory_rate

    matmul, attend = _seconds(gpu, flops)
    waits = tails(gpu, shape, policy, batch, tokens)

    # An engine that keeps weights on the host sends them to the device in both passes, and
    # gradients to the host in backward: a third of its bytes each.
    sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
    to_host, to_gpu = link_bytes(memory, policy, shape, **sizes)
    third = stays.link / 3
    first, second = weight_bytes(shape, policy, itemsize)
    up, down = (to_host, third), (third + first, to_gpu + third + second)
    total = matmul + attend + fore + back + sums + loss + waits
    files = (to_host, to_gpu) if tiled and policy.offload == "disk" else (0, 0)
    wait, forward, backward = _copy_wait(gpu, flops, total, fore, up, down, files, stays.gathers)
    if n and to_host:
        rates = (gpu.link_rate,) * 2
        if policy.offload == "disk":
            rates = tuple(map(min, rates, gpu.disk_rates))
        head = 6 * rows * shape.vocab_size * shape.hidden_size / gpu.matmul_flops + loss
        copies = to_host / rates[0], to_gpu / rates[1]
        sizes = {"batch": batch, "tokens": tokens, "itemsize": itemsize}
        behind = _behind_layers(
            gpu, flops, memory, policy, shape, total - head, fore, copies, rates, **sizes
        )
        wait = max(wait, sum(behind))

    again = n - -(-n // policy.every) if n else 0  # layers of segments run forward once more
    each = HOST_SECONDS_PER_LAYER + count * HOST_SECONDS_PER_TILE
    python = (n + FORWARD_SHARE * again) * each + (shape.num_layers - n) * HOST_SECONDS_PLAIN
    python_wait = max(0.0, python - forward - backward - wait)

    optimizer = optimizer_seconds(gpu, memory, stays)
    exchange = 2 * stays.gathers / shape.num_layers / gpu.peer_rate
    if shape.ranks > 1:
        forwards = flops.attention_forward / (filled_up(shape) * flops.model_attention / 3)
        sent = sent_bytes(shape, rows, itemsize, forwards=forwards) / gpu.peer_rate
        # With stream_attention memory is short: no exchange runs beside another round's attention.
        hides = not (tiled and policy.stream_attention)
        exchange += max(0.0, sent - attend) if hides else sent
    time = StepTime(
        matmul, attend, waits, fore + back, sums, loss, wait, python_wait, optimizer, exchange,
    )  # fmt: skip
    return time, to_host + to_gpu + stays.link + first + second
