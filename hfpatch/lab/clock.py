"""A training step on the clock: the real model, runtime and policy on fake tensors, and a device
whose streams are clocks.

    simulation, device, follower = run_on_clock(model, gpu, policy, batch=1, seq_len=131072)

Nothing is computed, and no GPU is needed. Each operation takes seconds of its stream: FLOPs and
bytes over the rates of lab/hardware.py. A copy takes its bytes over the link, a launch some of
the host's time. Events order the streams as CUDA's do: a copy is exposed if compute waits for it.

The clock models one GPU that holds weights, gradients and optimizer states. If ranks share rows, it
models one of them, and exchanges take their bytes over the links between GPUs. It omits engines
that gather or offload weights, and kernels slower than the model's rates.
"""

import contextlib
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.compat import for_now
from hfpatch.lab.drive import Drive, pieces
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.rates import BLOCK_ROWS, TAIL_SHARE, attention_ramp, matmul_seconds
from hfpatch.lab.simulate import kernels_cost, simulator
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.step_meter import LedgerGauge, StepMeter
from hfpatch.layer.call import LayerCall
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.ops import experts
from hfpatch.store import device as devices
from hfpatch.store.device import DEVICES, Device
from hfpatch.store.transfers import Transfers

# The host's time of one launch.
LAUNCH_SECONDS = 15e-6
COMPUTE, WAITS, UP, DOWN = "compute", "waits", "copies to the host", "copies to the device"
EXCHANGES, RANK_WAITS = "exchanges", "waits for ranks"
_LAYER = re.compile(r"\blayers\.(\d+)\b")


@dataclass(slots=True)
class Slice:
    """Work of one kind on one stream, from start to end in seconds. turn: "forward", "backward" or
    "optimizer".
    """

    stream: str
    start: float
    end: float
    turn: str
    layer: str
    nbytes: int = 0  # of a copy


class Stream:
    """A queue of work. now: the end of its last work."""

    def __init__(self, name: str):
        self.name, self.now = name, 0.0


class Event:
    def __init__(self, stream: Stream, time: float):
        self.stream, self.time = stream, time


class ClockDevice(Device):
    """A device whose streams hold only the time. It records each slice of work, and each wait of
    compute for a copy.
    """

    pins = True

    def __init__(self, gpu: Gpu, device: torch.device, drive: Drive | None = None):
        """drive: the disk behind the host's memory, None without one."""
        super().__init__(device)
        self.gpu, self.drive, self.host = gpu, drive, 0.0
        self.streams = [Stream(COMPUTE)]
        self.stack, self.links = self.streams[:], dict.fromkeys((UP, DOWN), 0.0)
        self.rows: dict[str, list[Slice]] = {WAITS: []}
        self.peers = Stream(EXCHANGES)
        self.carried: Counter = Counter()  # direction -> bytes over the link
        self.turn, self.layer = "setup", ""

    @property
    def compute(self) -> Stream:
        return self.streams[0]

    # -- the device interface ----------------------------------------------------------------------
    def stream(self) -> Stream:
        self.streams.append(Stream("side stream"))
        return self.streams[-1]

    def current(self) -> Stream:
        return self.stack[-1]

    @contextmanager
    def on(self, stream: Stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def mark(self, stream=None, blocking: bool = False) -> Event:
        stream = stream or self.current()
        return Event(stream, max(stream.now, self.host))

    def wait(self, event: Event, stream=None) -> None:
        stream = stream or self.current()
        if stream is self.compute and event.stream is not stream:
            began = max(stream.now, self.host)
            if event.time > began:
                row = RANK_WAITS if event.stream is self.peers else WAITS
                self._note(Slice(row, began, event.time, self.turn, self.layer))
        stream.now = max(stream.now, event.time)

    def synchronize(self, event=None) -> None:
        times = [event.time] if event is not None else [stream.now for stream in self.streams]
        self.host = max(self.host, *times)

    # -- work --------------------------------------------------------------------------------------
    def launch(self, seconds: float) -> None:
        """Work on the current stream. It begins once the stream is free and the host issued it."""
        stream = self.current()
        self.host += LAUNCH_SECONDS
        start = max(stream.now, self.host)
        stream.now = start + seconds
        self._note(Slice(stream.name, start, stream.now, self.turn, self.layer))

    def copy(self, nbytes: int, direction: str) -> None:
        """A copy between host and device on the current stream. Copies in one direction share the
        link.

        A copy to or from a file goes in pieces of a bounce buffer's size.
        """
        stream, drive = self.current(), self.drive
        if stream is not self.compute:
            stream.name = direction
        for piece in (nbytes,) if drive is None else pieces(nbytes):
            self.host += LAUNCH_SECONDS
            ready = 0.0
            if drive is not None and direction == UP:
                self._held_up(drive.writable())
            elif drive is not None:
                ready = drive.read(self.host, piece)
            start = max(stream.now, self.host, self.links[direction], ready)
            self.carried[direction] += piece
            stream.now = self.links[direction] = start + piece / self.gpu.link_rate
            if drive is not None:
                (drive.write if direction == UP else drive.landed)(stream.now, piece)
            self._note(Slice(stream.name, start, stream.now, self.turn, self.layer, piece))

    def _held_up(self, until: float) -> None:
        """The host waits for a file. Compute waits for the host once its queue is empty."""
        compute = self.compute
        began, self.host = max(compute.now, self.host), max(self.host, until)
        if until > began:
            self._note(Slice(WAITS, began, until, self.turn, self.layer))
            compute.now = until

    def exchange(self, nbytes: float) -> Event:
        """Sends bytes to other GPUs after the current stream's work."""
        self.host += LAUNCH_SECONDS
        start = max(self.peers.now, self.current().now, self.host)
        self.peers.now = start + nbytes / self.gpu.peer_rate
        self._note(Slice(EXCHANGES, start, self.peers.now, self.turn, self.layer, int(nbytes)))
        return Event(self.peers, self.peers.now)

    def _note(self, new: Slice) -> None:
        """Appends a slice to its row, or extends the row's last slice."""
        row = self.rows.setdefault(new.stream, [])
        last = row[-1] if row else None
        if (
            last is not None
            and (last.turn, last.layer) == (new.turn, new.layer)
            and new.start - last.end < 1e-9
        ):
            last.end, last.nbytes = new.end, last.nbytes + new.nbytes
        elif new.end > new.start:
            row.append(new)


class ClockRank(LoneRank):
    """Rank 0 of `size`, whose exchanges take time on a clock."""

    def __init__(self, clock: ClockDevice, size: int):
        super().__init__(size)
        self.clock = clock

    def all_to_all(self, send: torch.Tensor) -> torch.Tensor:
        self.clock.wait(self.clock.exchange(send.nbytes * (self.size - 1) / self.size))
        return torch.empty_like(send)


class ClockFollower(Follower):
    """Follows storages, and gives each operation its seconds on the clock."""

    def __init__(self, clock: ClockDevice, **settings):
        super().__init__(**settings)
        self.clock, self.layer, self.pending = clock, None, None
        self.parts: Counter = Counter()  # (turn, what) -> seconds of kernels

    def set_phase(self, name: str) -> None:
        super().set_phase(name)
        self.clock.turn, self.clock.layer = name, ""
        self.begins[name] = self.clock.compute.now

    @property
    def begins(self) -> dict[str, float]:
        """Turn -> its start on the compute stream."""
        return self.__dict__.setdefault("_begins", {})

    @contextmanager
    def tiled(self, layer: int):
        """A context in which a layer runs in tiles."""
        before, self.layer = self.layer, layer
        self.clock.layer = f"layer {layer}"
        try:
            yield
        finally:
            self.layer = before

    def _cost(self, func, args, kwargs) -> None:
        super()._cost(func, args, kwargs)
        gpu, seconds, kind = self.clock.gpu, 0.0, None
        product = kernels_cost.matmul_shape(func, args)
        if product is not None:
            count, *sizes = product
            seconds = matmul_seconds(gpu, *sizes, count=count)
        attention = kernels_cost.attention(func, args, kwargs)
        if attention is not None:
            kind, flops = attention
            seconds = self._attention_seconds(kind, flops, func, args, kwargs)
        if self.layer is None and self.clock.current() is self.clock.compute:
            found = _LAYER.search(self._where())
            self.clock.layer = f"layer {found[1]}" if found else ""
        what = "attention" if kind else "matmul"
        self.pending = seconds * self.times, self._direction(func, args), what

    def _attention_seconds(self, kind: str, flops: int, func, args, kwargs) -> float:
        gpu, q = self.clock.gpu, 0 if kind == "forward" else 1
        *_, columns, width = kernels_cost.sizes(func, args[q], args[q + 1])
        left = kernels_cost.window(func, args, kwargs)
        keys = columns if left is None else min(columns, left + 1)
        if kind == "forward":
            return flops * attention_ramp(keys) / gpu.attention_forward
        block = 5 * BLOCK_ROWS * keys * 2 * width * gpu.processors
        return (flops + TAIL_SHARE * block) * attention_ramp(keys) / gpu.attention_backward

    def _direction(self, func, args) -> str | None:
        """UP or DOWN for a copy between host and device, else None."""
        if func is not torch.ops.aten.copy_.default:
            return None
        on_host = [
            self.ledger.blocks[self._refs[id(x.untyped_storage())][1]].host for x in args[:2]
        ]
        return {(True, False): UP, (False, True): DOWN}.get(tuple(on_host))

    def _moved(self, nbytes: int) -> None:
        super()._moved(nbytes)
        (seconds, direction, what), self.pending = self.pending or (0.0, None, ""), None
        if direction is not None:  # nbytes counts the read and the write
            self.clock.copy(nbytes // 2, direction)
        elif seconds or nbytes:
            moving = nbytes * self.times / self.clock.gpu.memory_rate
            self.parts[self.clock.turn, what or "elementwise"] += seconds
            self.parts[self.clock.turn, "elementwise"] += moving
            self.clock.launch(seconds + moving)


@contextmanager
def _tiles_on(follower: list):
    """A context in which layers in tiles tell the follower when they run. follower: a list, empty
    until there is one.
    """

    def watched(name):
        real = getattr(LayerCall, name)

        def run(call, *args, **kwargs):
            with (
                follower[0].tiled(call.layer._hfpatch.index)
                if follower
                else contextlib.nullcontext()
            ):
                return real(call, *args, **kwargs)

        return for_now(LayerCall, **{name: run})

    with watched("forward"), watched("backward"):
        yield


@contextmanager
def _standing_in(clock: ClockDevice):
    """A context in which the clock is the runtime's device, and host memory has no pages."""
    before, host_empty = DEVICES.get(clock.device), devices.host_empty
    DEVICES[clock.device] = clock
    try:
        with for_now(devices, host_empty=lambda nbytes, mapped: host_empty(nbytes, False)):
            yield
    finally:
        del DEVICES[clock.device]
        if before is not None:
            DEVICES[clock.device] = before


def run_on_clock(
    model, gpu: Gpu, policy: Checkpointing | None, *, batch: int, seq_len: int, ranks: int = 1,
    optimizer=None, follower=ClockFollower, gradients: int = 0, kinds: dict | None = None,
    ahead: tuple = (None, None), **more,
):  # fmt: skip
    """One step of a model that hfpatch.apply patched, on meta or any device, under the policy.

    Args:
        optimizer: a function from parameters to a torch optimizer, whose operations run.
        ranks: that share each row. seq_len is this rank's part.
        follower: makes the ClockFollower from the clock and a Follower's settings.
        gradients: bytes of those of the whole model, of which this one is a part.
        kinds: what earlier steps showed of kinds of layers. ahead: as of StepMeter. more: of
            simulate.

    Returns:
        The Simulation, the ClockDevice with each stream's work, and the follower, whose `meter`
        measured the step.
    """
    disk = policy is not None and policy.tier == "disk"
    drive = Drive(gpu.disk_rates) if disk else None
    device, made = ClockDevice(gpu, torch.device("cpu"), drive), []
    kinds = {} if kinds is None else kinds

    def following(**settings):
        made.append(follower(device, **settings))
        made[0].meter = StepMeter(LedgerGauge(device, made[0]), model, gradients, kinds, ahead)
        return made[0]

    around = (
        _standing_in(device), _tiles_on(made),
        for_now(simulator, LoneRank=partial(ClockRank, device)),
        for_now(Transfers, late=disk),
        for_now(experts, _major=lambda _: gpu.major),
        for_now(LayerRuntime, _say=lambda *_: None),
        for_now(
            LayerRuntime, meter_of=lambda self, on: self.meters.setdefault(on, made[0].meter)
        ),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for context in around:
            stack.enter_context(context)
        asked = {"policy": policy, "ranks": ranks, "follower": following, "optimizer": optimizer}
        found = simulate(model, batch, seq_len, **asked, **more)
    return found, device, made[0]
