"""Bytes that a step copies between host and device, and the seconds of copies that nothing hides.

A pass's copies hide behind the work of that pass. A layer also waits for its own first tiles, and
for files. `hfpatch profile --clock` shows copies one by one (lab/clock.py). Standard library only.
"""

from dataclasses import dataclass
from functools import cached_property
from operator import add

from hfpatch.budget.cuts import tiles
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import RING_SLOTS, ModelShape, StepMemory, spare_bytes
from hfpatch.budget.hardware import Gpu
from hfpatch.budget.policy import Policy
from hfpatch.budget.sizes import kept_columns

# Bounce buffers of the disk tier (store/disk.py): bytes of one, buffers per direction, and those
# among them that do not read ahead.
PIECE, BUFFERS, RESERVE = 64 << 20, 8, 2


@dataclass(frozen=True)
class Step:
    """A step to predict. gpu: with the rates at the step's shapes (pace.py)."""

    gpu: Gpu
    flops: Flops
    memory: StepMemory
    policy: Policy
    shape: ModelShape
    batch: int
    tokens: int
    itemsize: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @cached_property
    def count(self) -> int:
        """Tiles of a layer."""
        return tiles(self.batch, self.tokens, self.policy.tile)[0]

    @property
    def tiled_layers(self) -> int:
        layers = self.shape.num_layers
        return layers - min(self.policy.plain, layers)

    @property
    def qkv(self) -> float:
        """Seconds of one layer's projections before attention, forward."""
        return 2 * self.rows * self.shape.qkv_weights / self.gpu.matmul_flops

    @property
    def attend(self) -> float:
        """Seconds of an average layer's attention, forward."""
        attention = self.flops.model_attention / 3 / self.gpu.attention_forward
        return attention / self.shape.num_layers

    @property
    def products(self) -> float:
        """Seconds of an average layer's matmuls, forward."""
        shape = self.shape
        weights = shape.qkv_weights + shape.o_weights
        weights += shape.over(shape.mlp_weights) / shape.num_layers
        return 2 * self.rows * weights / self.gpu.matmul_flops


def link_bytes(
    memory: StepMemory,
    policy: Policy,
    shape: ModelShape,
    *,
    batch: int,
    tokens: int,
    itemsize: int = 2,
) -> tuple[int, int]:
    """Bytes of checkpoints over the host link in one step: (to the host, back to the device).

    The first are copied in forward, the second in backward. The bytes against the main direction
    are fewer, so they hide. x comes back once for each pass over the tiles.
    """
    if not memory.host:
        return 0, 0
    rows, n = batch * tokens * itemsize, shape.num_layers - min(policy.plain, shape.num_layers)
    inputs = -(-n // policy.every) * rows * shape.hidden_size
    kept = n * rows * sum(kept_columns(shape, name) for name in policy.keep)
    single = tiles(batch, tokens, policy.tile)[0] == 1
    one = 0 if single or not policy.offload_dx else rows * shape.hidden_size
    attended, heads = rows * shape.out_size, rows * (shape.q_size + shape.kv_size + shape.v_size)
    saved = n - min(policy.again, n) if policy.save_attention and policy.every == 1 else 0
    again = attended if saved < n else 0
    x, lse = rows * shape.hidden_size, 4 * batch * tokens * shape.num_heads
    # Host buffers that one running layer uses, and the buffers of a segment that runs again.
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
    if policy.every > 1:  # a segment of several layers fetches its input again to run forward
        back += _segments(policy, n) * rows * shape.hidden_size
    out, home = memory.host - one - passing, back + 2 * n * one
    if policy.by_group:
        skipped = n - -(-n // policy.every)
        out, home = out + n * (heads + again), home + n * (2 * heads + attended + 2 * again)
        home += skipped * (passes * x + 2 * attended + heads)
    return out, home


def _segments(policy: Policy, layers: int) -> int:
    """The number of segments with several layers."""
    return (layers // policy.every + (layers % policy.every > 1)) * (policy.every > 1)


def weight_bytes(shape: ModelShape, policy: Policy, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of frozen weights that come from the host: (in forward, in backward).

    Two layers' weights fit the device at once, so backward starts with the last two already there,
    and a segment that ran again still has its last two.
    """
    if policy.frozen_weights != "host":
        return 0, 0
    forward, n = shape.over(lambda i: shape.frozen_bytes_of(i, itemsize)), shape.num_layers
    every = min(policy.every, n)
    again = n if every == 1 else n // every * max(1, 2 * every - 2)
    return forward, forward * max(0, again - 2) // n


def passes_wait(
    gpu: Gpu, flops: Flops, total: float, fore: float, up: tuple, down: tuple,
    files: tuple = (0, 0), gathers: int = 0,
) -> float:  # fmt: skip
    """Seconds by which copies exceed the work that hides them.

    Forward is a third of the model's FLOPs, recomputation excluded. The copies of a pass hide
    behind the work of that pass; the link's two directions run at once.

    Args:
        total: seconds of the whole step's work.
        fore: seconds of forward's work outside matmuls and attention.
        up, down: bytes (to the host, to the device), each for (forward, backward).
        files: the bytes among them that are (written to a disk in forward, read in backward).
        gathers: bytes of one gather between GPUs, over their own links or over the host's.
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
    return sum(waits)


def layers_wait(step: Step, fore: float, to_host: int) -> float:
    """Seconds for which layers wait for their own copies.

    fore: of a layer's forward outside matmuls and attention. to_host: bytes of all layers.
    """
    policy, rate = step.policy, step.gpu.link_rate
    if not to_host:
        return 0.0
    tile = step.rows * step.itemsize // step.count
    inside = sum(kept_columns(step.shape, name) for name in policy.keep if name != "qkv")
    if policy.offload == "disk":
        return files_wait(step, fore, to_host) + _ends_wait(step, tile, inside)
    # The head hides no copies to the host.
    forward = step.products + step.attend + fore
    wait = max(0.0, to_host / rate - step.shape.num_layers * forward)
    if inside:
        # Each layer's last saves, as far as memory has no room for these sources during the next.
        sizes = {"batch": step.batch, "tokens": step.tokens, "itemsize": step.itemsize}
        spare = spare_bytes(step.memory, step.shape, policy, **sizes)[step.tiled_layers - 1]
        wait += step.tiled_layers * max(0, tile * inside - spare) / rate
    if policy.save_attention and policy.every == 1 and step.count > 1:
        wait += first_tiles_wait(step, fore)
    return wait + _ends_wait(step, tile, inside)


def _ends_wait(step: Step, tile: int, inside: int) -> float:
    """Seconds in which nothing runs: the last layer's saves inside its last tile, the fetch of that
    layer's first tile, or the fetch of the input from which a segment runs again.

    tile: bytes of a column. inside: columns saved inside tiles.
    """
    policy, shape = step.policy, step.shape
    writes = reads = step.gpu.link_rate
    if policy.offload == "disk":
        writes, reads = (min(rate, n) for rate, n in zip((writes, reads), step.gpu.disk_rates))
    saves = tile * inside * (policy.plain == 0) / writes
    segments = _segments(policy, step.tiled_layers)
    if segments and policy.offload == "host":
        return saves + segments * tile * step.count * shape.hidden_size / reads
    outs = shape.out_size * (policy.save_attention and policy.every == 1)
    return saves + tile * (shape.hidden_size + outs + inside) * (policy.plain < 2) / reads


def first_tiles_wait(step: Step, fore: float) -> float:
    """Seconds for which layers of several tiles wait for kept tiles as their backward begins. These
    are fetched while the last two tiles of the previous layer's backward leave the ring, so
    attention hides none of them. fore: as in layers_wait.
    """
    policy, shape, count = step.policy, step.shape, step.count
    trained = 1 if shape.adapters else 2  # matmuls of a matmul's backward
    ahead = max(0, RING_SLOTS - count)  # tiles with a slot while attention runs
    leaving = (RING_SLOTS - 1 - ahead) * (1 + trained) * step.qkv / count
    run = (trained * (step.products - step.qkv) + fore) / count
    tile = step.rows * step.itemsize / count / step.gpu.link_rate
    columns = sum(kept_columns(shape, name) for name in policy.keep if name != "qkv")
    columns += shape.out_size + shape.hidden_size * ("mid" not in policy.keep)
    # q, k and v are fetched behind the tiles for which the ring has slots
    between = kept_columns(shape, "qkv") * ("qkv" in policy.keep and count > RING_SLOTS)
    last = ((count - ahead) * columns + count * between) * tile - leaving - (count - 1) * run
    wait = max(0.0, last, 0 if ahead else columns * tile - leaving)
    return (step.tiled_layers - min(policy.again, step.tiled_layers)) * wait


def files_wait(step: Step, fore: float, to_host: int) -> float:
    """Seconds by which files hold the host up in forward, and for which the short passes of
    backward wait for reading.

    A layer's writes are issued behind its compute, where the host waits for a free buffer: when the
    next layer begins, at most all buffers are left to write. What attention makes is complete late,
    and the disk may have written all before it. Values kept inside tiles are issued tile by tile,
    in front of the next tile's compute. With several tiles, the last pass of a layer and the first
    of the next one read their inputs faster than a disk does; the ring's slots and the buffers read
    ahead. fore, to_host: as in layers_wait.
    """
    policy, shape, gpu, n = step.policy, step.shape, step.gpu, step.tiled_layers
    writes, reads = (min(gpu.link_rate, rate) for rate in gpu.disk_rates)
    attend, forward = step.attend, step.products + step.attend + fore
    again, buffers = "qkv" not in policy.keep, BUFFERS * PIECE / writes
    x, qkv = step.rows * step.itemsize * shape.hidden_size, step.qkv
    if policy.every == 1 and any(name != "qkv" for name in policy.keep):
        beyond = sum(max(0.0, run - buffers) for run in (attend, forward - attend))
    else:  # the disk idles until q, k and v are there, and until attention's outputs are
        early = 0 if again else step.rows * step.itemsize * kept_columns(shape, "qkv")
        idle = [qkv - x / writes] * (not again)
        idle += [qkv + attend - (x + early) / writes] * policy.save_attention
        beyond = max([0.0, *(s - buffers for s in idle)]) * (policy.every == 1)
    held_up = max(0.0, to_host / writes + n * (beyond - forward))
    if step.count == 1:
        return held_up
    ahead = RING_SLOTS * x // step.count + (BUFFERS - RESERVE) * PIECE
    work = (again + (2 if shape.adapters else 3)) * qkv
    return held_up + max(0.0, n * (((1 + again) * x - ahead) / reads - work))
