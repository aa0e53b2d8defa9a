"""Streams, events, pinned memory and threads: the one way to a device.

`Device` is one whose copies are synchronous, the CPU and all that are not CUDA's; `CudaDevice` the
real one. Tests hand in their own and so see every synchronisation (tests/faults/checker.py).
"""

import mmap
import os
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from hfpatch.budget.nodes import gpu_node, running_on
from hfpatch.compat import has_values, version


def host_empty(nbytes: int, mapped: bool) -> Tensor:
    """A host buffer of nbytes (uint8). Every host buffer of the package is made here.

    mapped: pages of its own, for pinning. Private ones that a fork does not inherit: a data
    loader's workers would keep shared ones alive after they are freed here. MemoryError where the
    system has no more.
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
    return torch.frombuffer(memory, dtype=torch.uint8)


class Threads(ThreadPoolExecutor):
    """Threads that end with the main one: what still trains in another then does their work
    itself.
    """

    def submit(self, function, *args) -> Future:
        try:
            return super().submit(function, *args)
        except RuntimeError as error:
            if "cannot schedule" not in str(error):  # then the job has not been queued
                raise
        done = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Device:
    """A device whose copies are done when they return: there is one stream, None, and events are
    None.
    """

    pins = False  # whether host blocks are worth pinning, and copies return before they are done

    def __init__(self, device: torch.device):
        self.device = device
        self.side = None  # ToHost's stream, made on first need

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

    def wait(self, event, stream=None) -> None:
        """`stream` (the current one by default) waits for the event; the host does not."""

    def synchronize(self, event=None) -> None:
        """The host waits for the event, or for everything."""

    def used_here(self, x: Tensor) -> None:
        """x comes from the memory of another stream, and the current one uses it until it goes."""

    # -- host memory -------------------------------------------------------------------------------
    def pin(self, block: Tensor) -> int:
        """Registers a host buffer with the device; 0, or the error."""
        return 0

    def unpin(self, block: Tensor) -> None:
        """The reverse, once no copy uses it any more."""

    def to_host(self, values: Tensor) -> Tensor:
        """Starts the copy of a few values to the host, on the current stream."""
        return values

    def host_bytes(self, block: Tensor, writes: bool) -> memoryview:
        """A host buffer's bytes, for this thread to read or write."""
        return memoryview(block.numpy())

    def threads(self, count: int, name: str):
        """Threads for files."""
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

    def wait(self, event, stream=None) -> None:
        (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def synchronize(self, event=None) -> None:
        event.synchronize() if event is not None else torch.cuda.synchronize(self.device)

    def used_here(self, x: Tensor) -> None:
        x.record_stream(self.current())

    def pin(self, block: Tensor) -> int:
        node = gpu_node(torch.cuda.get_device_properties(self.device))
        # CUDA makes a context on the current device, which may be another rank's; registering
        # touches every page.
        with torch.cuda.device(self.device), running_on(node[1] if node else set()):
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if status:
            try:  # CUDA keeps the error for the next kernel to report: this one does
                torch.zeros(1, device=self.device)
            except RuntimeError:
                pass
        return status

    def unpin(self, block: Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def threads(self, count: int, name: str):
        # A thread starts with the first device: waiting for an event there would make a context on
        #     it.
        return Threads(count, name, torch.cuda.set_device, (self.device,))

    def to_host(self, values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(
            values, non_blocking=True
        )


class Block:
    """Host memory of an exact size, pinned where the device can; unpinned before its memory
    goes.
    """

    def __init__(self, device: Device, nbytes: int, pin: bool):
        self.bytes = host_empty(nbytes, device.pins)
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
    """A few values computed from a batch, on their way to the host on a side stream: waiting for
    them waits for no layer.

    compute(*inputs) gives the values, or is the tensor itself. The side stream waits for the inputs
    alone where `mark_batch_ready(inputs)` was called when they came, else for what their stream has
    been given so far.
    """

    @torch.compiler.disable  # called between graphs, it would be traced as one of its own
    def __init__(self, compute, *inputs: Tensor):
        if isinstance(compute, Tensor):
            compute, inputs = (lambda x: x), (compute,)
        self.device = device_for(inputs[0].device)
        # alive until the copy has been waited for
        self.inputs, self.stream = inputs, self.device.current()
        side = _side_stream(self.device, inputs)
        with self.device.on(side), torch.no_grad():
            self.values = compute(*inputs)
            self.host = self.device.to_host(self.values)
            self.event = self.device.mark(side)

    def get(self) -> Tensor | None:
        """The values; None where nothing has any: on the meta device, and under a mode that follows
        shapes alone.
        """
        if self.inputs is not None:
            self.device.synchronize(self.event)
            self.inputs = self.values = None
        return self.host if has_values(self.host) else None

    def number(self) -> int | None:
        """The one value that was asked for, or None as above."""
        found = self.get()
        return None if found is None else int(found)

    def __del__(self, finalizing=sys.is_finalizing):
        # Nobody asked: the inputs must not go back to the allocator under the copy.
        if (
            getattr(self, "inputs", None) is not None
            and hasattr(self, "event")
            and not finalizing()
        ):
            self.device.wait(self.event, self.stream)


def _side_stream(device: Device, inputs):
    """The device's side stream, which from here on finds `inputs` complete."""
    if device.side is None:
        device.side = device.stream()
    for event in _arrivals(inputs, device):
        device.wait(event, device.side)
    return device.side


def beside(compute, *inputs: Tensor) -> list[Tensor]:
    """compute(*inputs), a list of tensors, on the side stream: ToHost waits for them alone, the
    current stream for them too.
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
    """Notes that the batch's tensors are complete once the current stream gets here, before later
    steps are queued.

    For hand-written loops with gradient accumulation: call it on each batch (a dict of tensors)
    right after its copy to the device, and fetch a step's batches before its first forward: what is
    then looked up about a batch (documents, the number of labels) waits for its copy alone, not for
    the micro-step before. `hfpatch.Callback` does it in any Trainer.
    """
    events: dict = {}
    for x in batch.values() if hasattr(batch, "values") else ():
        if isinstance(x, Tensor):
            if x.device not in events:
                events[x.device] = device_for(x.device).mark()
            x._hfpatch_arrived = (events[x.device], version(x))
