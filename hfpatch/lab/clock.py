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
from typing import NamedTuple

import torch

from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import values_for_now
from hfpatch.lab.compat import for_now
from hfpatch.lab.drive import Drive
from hfpatch.lab.hardware import Gpu
from hfpatch.lab.rates import BLOCK, TAIL_SHARE, attention_ramp, matmul_seconds
from hfpatch.lab.simulate import kernels_cost
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.kernels_cost import Work
from hfpatch.lab.simulate.sequence import LoneRank
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.step_meter import LedgerGauge, StepMeter
from hfpatch.layer.runtime import LayerRuntime
from hfpatch.ops import experts
from hfpatch.store import device as devices
from hfpatch.store.device import DEVICES, Device
from hfpatch.store.disk import PIECE

# The host's time of one launch.
LAUNCH_SECONDS = 15e-6
TO_HOST = "copies to the host"
TO_DEVICE = "copies to the device"
COPIES = "copies in both directions"
EXCHANGES = "exchanges"
# (GPU, whether its own kernels run) -> key of an operation -> Work
_WORKS: dict = {}


class Stream:
    """A queue of work. now: the end of its last work, in seconds."""

    now = 0.0


class Event(NamedTuple):
    stream: Stream
    time: float


class ClockDevice(Device):
    """A device whose streams hold only the time.

    Attributes:
        follower: the Follower of the step that this device times.
        carried: TO_HOST, TO_DEVICE or EXCHANGES -> bytes over that link.
        waited: COPIES or EXCHANGES -> seconds that compute waits for them.
    """

    pins = True

    def __init__(self, gpu: Gpu, device: torch.device, drive: Drive | None = None):
        """drive: the disk behind the host's memory, None without one."""
        super().__init__(device)
        self.gpu = gpu
        self.drive = drive
        self.host = 0.0  # the host's time
        self.compute = Stream()
        self.streams = [self.compute]
        self.stack = [self.compute]
        self.links: Counter = Counter()  # direction -> the end of the link's last copy
        self.peers = Stream()
        self.carried: Counter = Counter()
        self.waited: Counter = Counter()

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
            what = EXCHANGES if event.stream is self.peers else COPIES
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
        """A copy between host and device on the current stream. A copy to or from a file goes in
        pieces of a bounce buffer's size.
        """
        drive = self.drive
        if drive is None:
            self.host += LAUNCH_SECONDS
            self._carry(nbytes, direction)
            return
        for begin in range(0, nbytes, PIECE):
            piece = min(PIECE, nbytes - begin)
            self.host += LAUNCH_SECONDS
            if direction == TO_HOST:
                self._held_up(drive.write_bounces[0])
                drive.write(self._carry(piece, TO_HOST), piece)
            else:
                ready = drive.read(self.host, piece)
                drive.read_bounces.append(self._carry(piece, TO_DEVICE, ready))

    def _carry(self, nbytes: int, direction: str, ready: float = 0.0) -> float:
        """Takes bytes over the link, from the time `ready` on. Copies in one direction share the
        link. Returns the end.
        """
        stream = self.current()
        start = max(stream.now, self.host, self.links[direction], ready)
        stream.now = start + nbytes / self.gpu.link_rate
        self.links[direction] = stream.now
        self.carried[direction] += nbytes
        return stream.now

    def _held_up(self, until: float) -> None:
        """The host waits for a file. Compute waits for the host once its queue is empty."""
        began = max(self.compute.now, self.host)
        self.host = max(self.host, until)
        if until > began:
            self.waited[COPIES] += until - began
            self.compute.now = until

    def exchange(self, nbytes: float) -> Event:
        """Sends bytes to other GPUs after the current stream's work."""
        self.host += LAUNCH_SECONDS
        start = max(self.peers.now, self.current().now, self.host)
        self.peers.now = start + nbytes / self.gpu.peer_rate
        self.carried[EXCHANGES] += nbytes
        return Event(self.peers, self.peers.now)


class ClockFollower(Follower):
    """Follows storages, and gives each operation its seconds on the clock."""

    def __init__(self, clock: ClockDevice, **settings):
        super().__init__(**settings)
        self.clock = clock
        clock.follower = self
        self._works = _WORKS.setdefault((clock.gpu, self.cuda), {})
        self.parts: Counter = Counter()  # (phase, what) -> seconds of kernels
        self.begins: dict = {}  # phase -> its start on the compute stream

    def set_phase(self, name: str) -> None:
        super().set_phase(name)
        self.begins[name] = self.clock.compute.now

    def _work(self, func, args, kwargs, *tensors) -> Work:
        work = super()._work(func, args, kwargs, *tensors)
        if work.attention is not None:
            seconds = self._attention_seconds(*work.attention, func, args, kwargs)
            return work._replace(seconds=seconds)
        product = kernels_cost.matmul_shape(func, args)
        if product is None:
            return work
        count, *sizes = product
        return work._replace(seconds=matmul_seconds(self.clock.gpu, *sizes, count=count))

    def _attention_seconds(self, kind: str, flops: int, func, args, kwargs) -> float:
        gpu = self.clock.gpu
        first = 0 if kind == "forward" else 1  # backward takes the output's gradient before q and k
        *_, columns, width = kernels_cost.sizes(func, args[first], args[first + 1])
        left = kernels_cost.window(func, args, kwargs)
        keys = columns if left is None else min(columns, left + 1)
        if kind == "forward":
            return flops * attention_ramp(keys) / gpu.attention_forward
        block = 5 * BLOCK * keys * 2 * width * gpu.processors
        return (flops + TAIL_SHARE * block) * attention_ramp(keys) / gpu.attention_backward

    def _direction(self, func, args) -> str | None:
        """TO_HOST or TO_DEVICE for a copy between host and device, else None."""
        if func is not torch.ops.aten.copy_.default:
            return None
        blocks = [self._refs[id(x.untyped_storage())][1] for x in args[:2]]
        to_host, from_host = (self.ledger.blocks[index].host for index in blocks)
        if to_host == from_host:
            return None
        return TO_HOST if to_host else TO_DEVICE

    def _moved(self, nbytes: int, work: Work | None = None, direction: str | None = None) -> None:
        super()._moved(nbytes)
        if direction is not None:  # nbytes counts the read and the write
            self.clock.copy(nbytes // 2, direction)
            return
        seconds = work.seconds * self.times if work is not None else 0.0
        if seconds or nbytes:
            what = "attention" if work is not None and work.attention else "matmul"
            moving = nbytes * self.times / self.clock.gpu.memory_rate
            self.parts[self.phase, what] += seconds
            self.parts[self.phase, "elementwise"] += moving
            self.clock.launch(seconds + moving)


def run_on_clock(
    model, gpu: Gpu, policy: Checkpointing | None, *, batch: int, seq_len: int,
    gradients: int = 0, kinds: dict | None = None, ahead: tuple = (None, None), **more,
):  # fmt: skip
    """One step of a model that hfpatch.apply patched, on meta or any device, under the policy.

    Args:
        seq_len: tokens of a row; of one rank's part if ranks share it.
        gradients: bytes of those of the whole model, of which this one is a part.
        kinds: what earlier steps showed of kinds of layers. ahead: as of StepMeter. more: of
            simulate.

    Returns:
        The Simulation, the ClockDevice, and the follower, whose `meter` measured the step.
    """
    disk = policy is not None and policy.tier == "disk"
    device = ClockDevice(gpu, torch.device("cpu"), Drive(gpu.disk_rates) if disk else None)
    follower = partial(ClockFollower, device)
    kinds = {} if kinds is None else kinds
    meter = StepMeter(LedgerGauge(device), model, gradients, kinds, ahead)
    host_empty = devices.host_empty

    def meter_of(runtime, on):
        runtime.meters[on] = meter  # not that of an earlier step of this model
        return meter

    def all_to_all(rank, send):
        device.wait(device.exchange(send.nbytes * (rank.size - 1) / rank.size))
        return torch.empty_like(send)

    around = (
        values_for_now([(DEVICES, device.device, device)]),
        # Host memory has no pages.
        for_now(devices, host_empty=lambda nbytes, mapped: host_empty(nbytes, False)),
        for_now(LoneRank, all_to_all=all_to_all),
        for_now(experts, _major=lambda _: gpu.major),
        for_now(LayerRuntime, _say=lambda *_: None, meter_of=meter_of),
    )
    with contextlib.ExitStack() as stack:
        for context in around:
            stack.enter_context(context)
        found = simulate(model, batch, seq_len, policy=policy, follower=follower, **more)
    device.follower.meter = meter
    return found, device, device.follower
