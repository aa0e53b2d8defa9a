"""Streams, events, pinned memory and threads: the package's only way to a device.

`Device` has synchronous copies: the CPU and every device that is not CUDA. `CudaDevice` has
streams. tests/dry/test_order.py sees every synchronisation.
"""

import mmap
import os
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from hfpatch.budget.free import hold
from hfpatch.budget.nodes import gpu_node, running_on
from hfpatch.compat import has_values, version

# Drivers from r580 on refuse to register 512 GiB at once (github.com/LMCache/LMCache/issues/5177).
PINNED_AT_ONCE = 64 << 30


def host_empty(nbytes: int, mapped: bool) -> Tensor:
    """Allocates a host buffer of nbytes (uint8). All host buffers of the package come from here.

    mapped: whole pages from mmap, for pinning. The mapping is private and a fork does not inherit
    it: data loader workers would keep a shared one alive after this process frees it. Raises
    MemoryError if the system has no memory left.
    """
    if not mapped:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        private = (
            {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        )
        memory = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(
            f"hfpatch: expected {nbytes / 2**30:.2f} GiB of host memory, the system answered: "
            f"{error}; "
            "give the container more memory, or use Checkpointing(every=2) or "
            "Checkpointing(offload='/a/directory')."
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # registering touches fewer pages
    return torch.frombuffer(memory, dtype=torch.uint8)


class Threads(ThreadPoolExecutor):
    """A thread pool that runs jobs in the calling thread once Python shuts down: another thread may
    still be training then.
    """

    def submit(self, function, *args) -> Future:
        try:
            return super().submit(function, *args)
        except RuntimeError as error:
            if "cannot schedule" not in str(error):  # otherwise the job was never queued
                raise
        done = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Device:
    """A device with synchronous copies. Its only stream is None, and so is every event."""

    pins = False  # whether pinned host memory makes copies asynchronous

    def __init__(self, device: torch.device):
        self.device = device
        self.side = None  # ToHost's stream, made on first use

    # -- streams and events ------------------------------------------------------------------------
    def stream(self):
        """A new stream for copies."""
        return None

    def current(self):
        """The stream on which this thread's kernels run now."""
        return None

    def on(self, stream):
        """Context in which kernels and copies run on `stream`."""
        return nullcontext()

    def mark(self, stream=None):
        """An event recorded now on `stream` (the current one by default)."""
        return None

    def mark_for_thread(self, stream):
        """An event recorded now on `stream`, on which a thread waits asleep: it takes no core from
        the thread that starts kernels."""
        return self.mark(stream)

    def wait(self, event, stream=None) -> None:
        """`stream` (the current one by default) waits for the event; the host does not."""

    def synchronize(self, event=None) -> None:
        """The host waits for the event, or for everything."""

    def used_here(self, x: Tensor) -> None:
        """Tells the allocator that the current stream uses x, which another stream allocated."""

    def clock(self):
        """An event that knows its time, recorded now on the current stream; None without one."""
        return None

    # -- host memory -------------------------------------------------------------------------------
    def pin(self, block: Tensor) -> int:
        """Registers a host buffer with the device. Returns 0 or CUDA's error."""
        return 0

    def unpin(self, block: Tensor) -> None:
        """Unregisters a host buffer that no copy uses any more."""

    def to_host(self, values: Tensor) -> Tensor:
        """Starts the copy of a few values to the host, on the current stream."""
        return values

    def from_host(self, values: Tensor) -> Tensor:
        """Starts the copy of a few values to the device, on the current stream."""
        return values.to(self.device)

    def host_bytes(self, block: Tensor, writes: bool) -> memoryview:
        """A host buffer's bytes, for this thread to read or write."""
        return memoryview(block.numpy())

    def threads(self, count: int, name: str):
        """A thread pool for file I/O."""
        return Threads(count, name)


class CudaDevice(Device):
    pins = True

    def stream(self):
        return torch.cuda.Stream(self.device)

    def current(self):
        return torch.cuda.current_stream(self.device)

    def on(self, stream):
        return torch.cuda.stream(stream)

    def mark(self, stream=None):
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def mark_for_thread(self, stream):
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def clock(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event, stream=None) -> None:
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def synchronize(self, event=None) -> None:
        event.synchronize() if event is not None else torch.cuda.synchronize(self.device)

    def used_here(self, x: Tensor) -> None:
        x.record_stream(self.current())

    def pin(self, block: Tensor) -> int:
        node = gpu_node(torch.cuda.get_device_properties(self.device))
        # CUDA makes a context on the current device, which may be another rank's. Registering
        # touches every page, so this runs on the CPUs of the GPU's memory node.
        with torch.cuda.device(self.device), running_on(node[1] if node else set()):
            runtime, status = torch.cuda.cudart(), 0
            for start in range(0, block.numel(), PINNED_AT_ONCE):
                nbytes = min(PINNED_AT_ONCE, block.numel() - start)
                status = int(runtime.cudaHostRegister(block.data_ptr() + start, nbytes, 0))
                if status:
                    self._unregister(block, start)
                    break
        if status:
            try:  # CUDA reports the error again at the next kernel: this one
                torch.zeros(1, device=self.device)
            except RuntimeError:
                pass
        return status

    def unpin(self, block: Tensor) -> None:
        with torch.cuda.device(self.device):
            self._unregister(block, block.numel())

    def _unregister(self, block: Tensor, stop: int) -> None:
        for start in range(0, stop, PINNED_AT_ONCE):
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr() + start)

    def threads(self, count: int, name: str):
        # A new thread's current device is the first one: waiting for an event would make a context
        # there.
        return Threads(count, name, torch.cuda.set_device, (self.device,))

    def to_host(self, values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(
            values, non_blocking=True
        )

    def from_host(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)


def seconds_between(begins, ends) -> float | None:
    """Between two clock() events; None as long as the second lies ahead."""
    return begins.elapsed_time(ends) / 1000 if ends is not None and ends.query() else None


class Speed:
    """Bytes a second of copies on the current stream. One large copy is timed after another."""

    LEAST = 16 << 20  # bytes of a copy that is timed

    def __init__(self, device: Device):
        self.device, self.found = device, 0.0
        self.copy: list | None = None  # [bytes, event before, event after]

    def begin(self, nbytes: int) -> None:
        if self.copy is None and nbytes >= self.LEAST:
            self.copy = [nbytes, self.device.clock()]

    def end(self) -> None:
        if self.copy is not None and len(self.copy) == 2:
            self.copy.append(self.device.clock())

    def now(self) -> float:
        """Of the last copy that was timed; 0 before one."""
        took = self.copy and len(self.copy) == 3 and seconds_between(*self.copy[1:])
        if took:
            self.found, self.copy = self.copy[0] / took, None
        return self.found


class Block:
    """Host memory of an exact size, optionally pinned. It is unpinned before the memory is
    freed.
    """

    def __init__(self, device: Device, nbytes: int, pin: bool):
        self.bytes = host_empty(nbytes, device.pins)
        hold(nbytes)
        weakref.finalize(self, hold, -nbytes).atexit = False
        self.status = device.pin(self.bytes) if pin else 0
        if pin and not self.status:
            weakref.finalize(self, _unpin, device, self.bytes, os.getpid()).atexit = False


def _unpin(device: Device, block: Tensor, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has neither the memory nor the device
        device.synchronize()
        device.unpin(block)


DEVICES: dict[torch.device, Device] = {}


def device_for(device: torch.device) -> Device:
    if device not in DEVICES:
        DEVICES[device] = (CudaDevice if device.type == "cuda" else Device)(device)
    return DEVICES[device]


class ToHost:
    """Computes a few values from a batch on a side stream and copies them to the host.

    compute(*inputs) returns the values; a tensor in its place is the value itself. get() waits for
    these values only, not for any layer. After `mark_batch_ready` the side stream waits only for
    the inputs, otherwise for all work queued so far on the current stream.
    """

    @torch.compiler.disable  # dynamo would trace a call between two graphs as a graph of its own
    def __init__(self, compute, *inputs: Tensor):
        if isinstance(compute, Tensor):
            compute, inputs = (lambda x: x), (compute,)
        self.device = device_for(inputs[0].device)
        # keeps the inputs alive until get() has waited for the copy
        self.inputs, self.stream = inputs, self.device.current()
        side = _side_stream(self.device, inputs)
        with self.device.on(side), torch.no_grad():
            self.values = compute(*inputs)
            self.host = self.device.to_host(self.values)
            self.event = self.device.mark(side)

    def get(self) -> Tensor | None:
        """Waits for the values. None if they have no data: on the meta device, under fake
        tensors.
        """
        if self.inputs is not None:
            self.device.synchronize(self.event)
            self.inputs = self.values = None
        return self.host if has_values(self.host) else None

    def number(self) -> int | None:
        """The single value as an int, or None as in get()."""
        found = self.get()
        return None if found is None else int(found)

    def __del__(self, finalizing=sys.is_finalizing):
        # get() never ran: the inputs must not return to the allocator during the copy.
        if (
            getattr(self, "inputs", None) is not None
            and hasattr(self, "event")
            and not finalizing()
        ):
            self.device.wait(self.event, self.stream)


def _side_stream(device: Device, inputs):
    """The device's side stream, after it is made to wait for `inputs`."""
    if device.side is None:
        device.side = device.stream()
    for event in _arrivals(inputs, device):
        device.wait(event, device.side)
    return device.side


def beside(compute, *inputs: Tensor) -> list[Tensor]:
    """Runs compute(*inputs) on the side stream; it returns a list of tensors.

    The current stream waits for these tensors. A ToHost of them waits for nothing else.
    """
    device = device_for(inputs[0].device)
    side = _side_stream(device, inputs)
    with device.on(side), torch.no_grad():
        found = compute(*inputs)
        event = device.mark(side)
    device.wait(event, device.current())
    for x in found:
        device.used_here(x)
        x._hfpatch_arrived = (event, version(x))
    return found


def _arrivals(inputs, device: Device) -> list:
    events = []
    for x in inputs:
        event, written = vars(x).get("_hfpatch_arrived") or (None, None)
        if written != version(x):
            return [device.mark()]
        events.append(event)
    return events


def mark_batch_ready(batch) -> None:
    """Records an event after the batch's copy to the device, on the current stream.

    For hand-written loops with gradient accumulation. Fetch all batches of a step before its first
    forward, and call this on each batch (a dict of tensors) right after its copy. Lookups in a
    batch (documents, the number of labels) then wait for its copy only, not for the previous
    micro-step. `hfpatch.Callback` does this in any Trainer.
    """
    events: dict = {}
    for x in batch.values() if hasattr(batch, "values") else ():
        if isinstance(x, Tensor):
            if x.device not in events:
                events[x.device] = device_for(x.device).mark()
            x._hfpatch_arrived = (events[x.device], version(x))
