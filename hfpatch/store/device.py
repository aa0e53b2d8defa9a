"""Streams, events, pinned memory and threads: the package's only way to a device.

`Device` has synchronous copies: the CPU and every device that is not CUDA. `CudaDevice` has
streams. tests/dry/test_order.py sees every synchronisation.
"""

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from hfpatch.budget.free import hold
from hfpatch.budget.limits import gib
from hfpatch.compat import has_values


def host_empty(nbytes: int, mapped: bool) -> Tensor:
    """Allocates a host buffer of nbytes (uint8). Those of checkpoints and frozen weights come from here.

    mapped: whole pages from mmap, for pinning. The mapping is private and a fork does not inherit
    it: data loader workers would keep a shared one alive after this process frees it. Raises
    MemoryError if the system has no memory left.
    """
    if not mapped:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # not on Windows
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, nbytes, **flags)
    except OSError as error:
        raise MemoryError(
            f"hfpatch: the system could not give {gib(nbytes, 2)} of host memory: {error}. "
            "Give the container more memory, or use Checkpointing(every=2) or "
            "Checkpointing(offload='/a/directory')."
        ) from error
    # Registering huge pages touches fewer of them.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # a system or a kernel without it
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


class Device:
    """A device with synchronous copies. Its only stream is None, and so is every event."""

    pins = False  # whether pinned host memory makes copies asynchronous

    def __init__(self, device: torch.device):
        self.device = device

    # -- streams and events ------------------------------------------------------------------------
    def stream(self):
        """A new stream for copies."""

    def current(self):
        """The stream on which this thread's kernels run now."""

    def on(self, stream):
        """Context in which kernels and copies run on `stream`."""
        return nullcontext()

    def mark(self, stream=None, blocking: bool = False):
        """An event recorded now on `stream` (the current one by default). blocking: a thread that
        waits for it sleeps, and takes no core from the thread that starts kernels."""

    def wait(self, event, stream=None) -> None:
        """`stream` (the current one by default) waits for the event; the host does not."""

    def synchronize(self, event=None) -> None:
        """The host waits for the event, or for everything."""

    def clock(self):
        """An event that knows its time, recorded now on the current stream; None without one."""

    # -- host memory -------------------------------------------------------------------------------
    def pin(self, block: Tensor) -> int:
        """Registers a host buffer with the device. Returns 0 or CUDA's error."""
        return 0

    def unpin(self, block: Tensor) -> None:
        """Unregisters a host buffer that no copy uses any more."""

    def to_host(self, values: Tensor) -> Tensor:
        """A few values, once the current stream has computed them."""
        return values

    def from_host(self, values: Tensor) -> Tensor:
        """Starts the copy of a few values to the device, on the current stream."""
        return values.to(self.device)

    def host_bytes(self, block: Tensor, writes: bool) -> memoryview:
        """A host buffer's bytes, for this thread to read or write."""
        return memoryview(block.numpy())

    def threads(self, count: int, name: str):
        """A thread pool for file I/O."""
        return ThreadPoolExecutor(count, name)


class CudaDevice(Device):
    pins = True

    def stream(self):
        return torch.cuda.Stream(self.device)

    def current(self):
        return torch.cuda.current_stream(self.device)

    def on(self, stream):
        return torch.cuda.stream(stream)

    def mark(self, stream=None, blocking: bool = False):
        event = torch.cuda.Event(blocking=blocking)
        event.record(stream or self.current())
        return event

    def clock(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current())
        return event

    def wait(self, event, stream=None) -> None:
        (stream or self.current()).wait_event(event)

    def synchronize(self, event=None) -> None:
        event.synchronize() if event is not None else torch.cuda.synchronize(self.device)

    def pin(self, block: Tensor) -> int:
        # CUDA makes a context on the current device, which may be another rank's.
        with torch.cuda.device(self.device):
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if status:
            # CUDA reports the error again at the next kernel: this one.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return status

    def unpin(self, block: Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def threads(self, count: int, name: str):
        # A new thread's current device is the first one: waiting for an event would make a context
        # there.
        return ThreadPoolExecutor(count, name, torch.cuda.set_device, (self.device,))

    def to_host(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)  # to pageable memory the host waits twice
        self.synchronize(self.mark())
        return host

    def from_host(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)


def seconds_between(begins, ends) -> float | None:
    """Between two clock() events; None as long as the second lies ahead."""
    return begins.elapsed_time(ends) / 1000 if ends is not None and ends.query() else None


class Speed:
    """Bytes a second of copies on the current stream. One large copy is timed at a time."""

    LEAST = 16 << 20  # bytes of a copy that is timed

    def __init__(self, device: Device):
        self.device = device
        self.rate = 0.0
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
            self.rate = self.copy[0] / took
            self.copy = None
        return self.rate


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


@torch.compiler.disable  # dynamo would trace a call between two graphs as a graph of its own
def on_host(x: Tensor) -> Tensor | None:
    """The values of a small tensor, for the host to read. None if it has no data: on the meta
    device, under fake tensors.

    The host waits for the work queued so far on the current stream. So a batch is read once, before
    its forward.
    """
    return device_for(x.device).to_host(x.detach()) if has_values(x) else None
