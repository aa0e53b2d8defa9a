"""Bytes that a step copies between host and device, and the seconds of copies that nothing hides.

A pass's copies hide behind the work of that pass, and behind layers as far as memory has room for
the copies' sources. lab/clock.py shows the same copy by copy. Standard
library only.
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
    keeping = n - min(policy.keeps_less, n)
    kept = keeping * rows * sum(kept_columns(shape, name) for name in policy.keep)
    single = tiles(batch, tokens, policy.tile)[0] == 1
    parked = rows * shape.hidden_size if policy.parks_dx and not single else 0
    outputs = memory.host - inputs - kept - parked
    # Each phase that reads x fetches it; a kept sum after attention is read in place of x.
    passes = 1 if single else 3 - ("qkv" in policy.keep) - ("mid" in policy.keep)
    back = passes * inputs + kept + outputs
    back += (0 if single else 3 - passes) * (n - keeping) * rows * shape.hidden_size
    if policy.every > 1:  # a segment of several layers fetches its input again to run forward
        back += _segments(policy, n) * rows * shape.hidden_size
    return memory.host - parked + n * parked, back + n * parked


def _segments(policy: Policy, layers: int) -> int:
    """The number of segments with several layers."""
    return (layers // policy.every + (layers % policy.every > 1)) * (policy.every > 1)


def weight_bytes(shape: ModelShape, policy: Policy, itemsize: int = 2) -> tuple[int, int]:
    """Bytes of frozen weights that come from the host: (in forward, in backward).

    Two layers' weights fit the device at once. Backward starts with the last two there, and so does
    that of a segment which has run again.
    """
    if policy.frozen_weights != "host":
        return 0, 0
    forward, n = shape.over(lambda i: shape.frozen_bytes_of(i, itemsize)), shape.num_layers
    every = min(policy.every, n)
    last = n % every or every  # layers of the last segment
    again = n - 2
    if every > 1:
        again = (n - last) // every * (2 * every - 2) + (2 * last - 2 if last > 2 else 0)
    return forward, forward * max(0, again) // n


def passes_wait(
    gpu: Gpu, flops: Flops, total: float, fore: float, up: tuple, down: tuple,
    files: tuple = (0, 0), gathers: int = 0,
) -> tuple[float, float, float]:  # fmt: skip
    """(seconds by which copies exceed the work that hides them, that work in forward, in backward).

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
    return sum(waits), *passes


def behind_layers(
    step: Step, layers: float, fore: float, copies: tuple[float, float], rates: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of the checkpoints' copies, forward and backward, that layers do not hide. n tiled
    layers come first, p plain ones behind them.

    A layer's copies may continue during later layers as far as memory has room for their sources.
    In backward a layer's tensors are fetched one layer ahead, except q, k and v, which the layer
    itself fetches: if attention runs again, nothing hides them. The head hides nothing.

    Args:
        layers: seconds of all layers, both passes.
        fore: seconds of their forward outside matmuls and attention.
        copies, rates: seconds and bytes/s, to the host and back.
    """
    gpu, flops, policy, shape, rows = step.gpu, step.flops, step.policy, step.shape, step.rows
    L, n, p = shape.num_layers, step.tiled_layers, min(policy.plain, shape.num_layers)
    (to_host, to_gpu), (up, down), count = rates, copies, step.count
    products = L * (shape.qkv_weights + shape.o_weights) + shape.over(shape.mlp_weights)
    products *= 2 * rows / gpu.matmul_flops
    attention = flops.model_attention / 3
    forward = (products + attention / gpu.attention_forward + fore) / L
    trained = 1 if shape.adapters else 2
    plain = (trained * products + 2.5 * attention / gpu.attention_backward) / L
    alone, less = policy.every == 1, min(policy.keeps_less, n)
    tile, columns = rows * step.itemsize / count, {k: kept_columns(shape, k) for k in policy.keep}
    inside = alone * sum(n for name, n in columns.items() if name != "qkv")
    kept = alone * (n - less) * sum(columns.values()) * tile * count
    # for the layers that keep less, which are the last tiled ones
    own_up, own_down = (less * max(0.0, s - kept / r) / n for s, r in zip(copies, rates))
    work = (layers - L * forward - p * plain) * (n - less) / max(n, 1)
    behind = down - own_down - work - (plain if p > 1 else 0)
    waits = [0.0]
    if inside or up > n * forward:
        sizes = {"batch": step.batch, "tokens": step.tokens, "itemsize": step.itemsize}
        spares = spare_bytes(step.memory, shape, policy, **sizes)
        # Waits at the end of the last tiled layer and of each plain one; at the end of the last
        # layer that keeps all of `keep`; and for each layer's last saves, if their sources may not
        # live on during the next layer.
        waits += [up - (n + k) * forward - spares[n + k] / to_host for k in range(p + 1)]
        waits += [up - own_up - (n - less) * forward - spares[n - 1] / to_host] * (less > 0)
        waits += [(n - less) * max(0, tile * inside - spares[n - 1]) / to_host]
    if policy.offload == "disk":
        attend = attention / gpu.attention_forward / L
        held_up, starved = files_wait(step, up, forward, attend, rates)
        waits.append(held_up)
        behind = max(behind, starved)
    if alone and "qkv" in policy.keep and not policy.save_attention:
        # With several tiles the first tile's tensors may be on the link before q, k and v.
        waited = count * columns["qkv"] + (count > 1) * (
            inside + shape.hidden_size * ("mid" not in policy.keep)
        )
        behind = max(behind, (n - less) * tile * waited / to_gpu)
    if alone and policy.offload == "host" and policy.save_attention and count > 1:
        behind = max(behind, first_tiles_wait(step, trained, products / L, fore / L, to_gpu))
    # Nothing runs during the last layer's saves inside its last tile, during the fetch of that
    # layer's first tile, or during the fetch of the input from which a segment runs again.
    begins = _segments(policy, n) * (policy.offload == "host")
    last = 0 if less else inside
    first = shape.hidden_size + alone * policy.save_attention * shape.out_size + last
    return (
        max(waits) + tile * last * (p == 0) / to_host,
        max(0.0, behind)
        + tile * (first * (p < 2) * (not begins) + begins * count * shape.hidden_size) / to_gpu,
    )


def first_tiles_wait(
    step: Step, trained: int, products: float, fore: float, to_gpu: float
) -> float:
    """Seconds for which layers of several tiles wait for kept tiles as their backward begins. These
    are fetched while the last two tiles of the previous layer's backward leave the ring, so
    attention hides none of them.

    Args:
        trained: matmuls of a matmul's backward.
        products, fore: seconds of a layer's forward, in matmuls and outside them.
        to_gpu: bytes/s.
    """
    policy, shape, count = step.policy, step.shape, step.count
    ahead = max(0, RING_SLOTS - count)  # tiles with a slot while attention runs
    qkv = 2 * step.rows * shape.qkv_weights / step.gpu.matmul_flops
    leaving = (RING_SLOTS - 1 - ahead) * (1 + trained) * qkv / count
    run = (trained * (products - qkv) + fore) / count
    tile = step.rows * step.itemsize / count / to_gpu

    def wait(keep: tuple) -> float:
        columns = sum(kept_columns(shape, name) for name in keep if name != "qkv")
        columns += shape.out_size + shape.hidden_size * ("mid" not in keep)
        # q, k and v are fetched behind the tiles for which the ring has slots
        between = kept_columns(shape, "qkv") * ("qkv" in keep and count > RING_SLOTS)
        last = ((count - ahead) * columns + count * between) * tile - leaving - (count - 1) * run
        return max(0.0, last, 0 if ahead else columns * tile - leaving)

    n = step.tiled_layers
    less, again = min(policy.keeps_less, n), min(policy.attends_again, n)
    return (n - less - again) * wait(policy.keep) + less * wait(())


def files_wait(
    step: Step, up: float, forward: float, attend: float, rates: tuple[float, float]
) -> tuple[float, float]:
    """(seconds by which files hold the host up in forward, seconds for which the short passes of
    backward wait for reading).

    A layer's writes are issued behind its compute, where the host waits for a free buffer: when the
    next layer begins, at most all buffers are left to write. What attention makes is complete late,
    and the disk may have written all before it. Values kept inside tiles are issued tile by tile,
    in front of the next tile's compute. With several tiles, the last pass of a layer and the first
    of the next one read their inputs faster than a disk does; the ring's slots and the buffers read
    ahead.

    Args:
        up: seconds of writing.
        forward, attend: seconds of a layer and of its attention.
        rates: bytes/s, written and read.
    """
    policy, shape, n = step.policy, step.shape, step.tiled_layers
    again, buffers = "qkv" not in policy.keep, BUFFERS * PIECE / rates[0]
    x = step.rows * step.itemsize * shape.hidden_size
    qkv = 2 * step.rows * shape.qkv_weights / step.gpu.matmul_flops
    if policy.every == 1 and any(name != "qkv" for name in policy.keep):
        beyond = sum(max(0.0, run - buffers) for run in (attend, forward - attend))
    else:  # the disk idles until q, k and v are there, and until attention's outputs are
        early = 0 if again else step.rows * step.itemsize * kept_columns(shape, "qkv")
        idle = [qkv - x / rates[0]] * (not again)
        idle += [qkv + attend - (x + early) / rates[0]] * policy.save_attention
        beyond = max([0.0, *(s - buffers for s in idle)]) * (policy.every == 1)
    held_up = up + n * (beyond - forward)
    if step.count == 1:
        return held_up, 0.0
    ahead = RING_SLOTS * x // step.count + (BUFFERS - RESERVE) * PIECE
    work = (again + (2 if shape.adapters else 3)) * qkv
    return held_up, n * (((1 + again) * x - ahead) / rates[1] - work)
