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
from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.compat import for_now
from hfpatch.lab.drive import Drive, pieces
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.rates import BLOCK_ROWS, TAIL_SHARE, attention_ramp, matmul_seconds
from hfpatch.lab.simulate import kernels_cost, simulator
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.kernels_cost import Work
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.step_meter import LedgerGauge, StepMeter
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.ops import experts
from hfpatch.store import device as devices
from hfpatch.store.device import DEVICES, Device
from hfpatch.store.transfers import Transfers

# The host's time of one launch.
LAUNCH_SECONDS = 15e-6
UP, DOWN = "copies to the host", "copies to the device"
EXCHANGES = "exchanges"
# (GPU, whether its own kernels run) -> key of an operation -> Work
_WORKS: dict = {}


class Stream:
    """A queue of work. now: the end of its last work, in seconds."""

    now = 0.0


class Event:
    def __init__(self, stream: Stream, time: float):
        self.stream, self.time = stream, time


class ClockDevice(Device):
    """A device whose streams hold only the time.

    Attributes:
        carried: UP, DOWN or EXCHANGES -> bytes over that link.
        waited: UP (copies in both directions) or EXCHANGES -> seconds that compute waits for them.
    """

    pins = True

    def __init__(self, gpu: Gpu, device: torch.device, drive: Drive | None = None):
        """drive: the disk behind the host's memory, None without one."""
        super().__init__(device)
        self.gpu, self.drive, self.host = gpu, drive, 0.0
        self.streams = [Stream()]
        self.stack, self.links = self.streams[:], dict.fromkeys((UP, DOWN), 0.0)
        self.peers = Stream()
        self.carried: Counter = Counter()
        self.waited: Counter = Counter()

    @property
    def compute(self) -> Stream:
        return self.streams[0]

    # -- the device interface ----------------------------------------------------------------------
    def stream(self) -> Stream:
        self.streams.append(Stream())
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
            what = EXCHANGES if event.stream is self.peers else UP
            self.waited[what] += max(0.0, event.time - max(stream.now, self.host))
        stream.now = max(stream.now, event.time)

    def synchronize(self, event=None) -> None:
        times = [event.time] if event is not None else [stream.now for stream in self.streams]
        self.host = max(self.host, *times)

    # -- work --------------------------------------------------------------------------------------
    def launch(self, seconds: float) -> None:
        """Work on the current stream. It begins once the stream is free and the host issued it."""
        stream = self.current()
        self.host += LAUNCH_SECONDS
        stream.now = max(stream.now, self.host) + seconds

    def copy(self, nbytes: int, direction: str) -> None:
        """A copy between host and device on the current stream. Copies in one direction share the
        link.

        A copy to or from a file goes in pieces of a bounce buffer's size.
        """
        stream, drive = self.current(), self.drive
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

    def _held_up(self, until: float) -> None:
        """The host waits for a file. Compute waits for the host once its queue is empty."""
        compute = self.compute
        began, self.host = max(compute.now, self.host), max(self.host, until)
        if until > began:
            self.waited[UP] += until - began
            compute.now = until

    def exchange(self, nbytes: float) -> Event:
        """Sends bytes to other GPUs after the current stream's work."""
        self.host += LAUNCH_SECONDS
        start = max(self.peers.now, self.current().now, self.host)
        self.peers.now = start + nbytes / self.gpu.peer_rate
        self.carried[EXCHANGES] += nbytes
        return Event(self.peers, self.peers.now)


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
        self.clock = clock
        self._works = _WORKS.setdefault((clock.gpu, self.cuda), {})
        self.parts: Counter = Counter()  # (phase, what) -> seconds of kernels
        self.begins: dict = {}  # phase -> its start on the compute stream

    def set_phase(self, name: str) -> None:
        super().set_phase(name)
        self.begins[name] = self.clock.compute.now

    def _work(self, func, args, kwargs, *tensors) -> Work:
        work, seconds = super()._work(func, args, kwargs, *tensors), 0.0
        if (product := kernels_cost.matmul_shape(func, args)) is not None:
            count, *sizes = product
            seconds = matmul_seconds(self.clock.gpu, *sizes, count=count)
        if work.attention is not None:
            seconds = self._attention_seconds(*work.attention, func, args, kwargs)
        return work._replace(seconds=seconds)

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

    def _moved(self, nbytes: int, work: Work | None = None, direction: str | None = None) -> None:
        super()._moved(nbytes)
        seconds, what = 0.0, "elementwise"
        if work is not None:
            seconds, what = work.seconds * self.times, "attention" if work.attention else "matmul"
        if direction is not None:  # nbytes counts the read and the write
            self.clock.copy(nbytes // 2, direction)
        elif seconds or nbytes:
            moving = nbytes * self.times / self.clock.gpu.memory_rate
            self.parts[self.phase, what] += seconds
            self.parts[self.phase, "elementwise"] += moving
            self.clock.launch(seconds + moving)


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
        The Simulation, the ClockDevice, and the follower, whose `meter`
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
        _standing_in(device),
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
