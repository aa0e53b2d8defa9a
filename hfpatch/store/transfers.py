"""Tensors that wait for a backward: on the device, in pinned host memory, or in files on a disk.

Beside a device's compute stream each Transfers has two: to_host (copies to the store) and to_device
(copies back).

A stream waits, and the CPU runs ahead:

    save(x)      to_host waits for compute     x is computed, and earlier fetches from the block are
                 copy x -> block on to_host    done: compute waited for their tickets
                 x stays in `unsettled`
    settle()     compute waits for the copies  then those x are freed, and their memory may be
                 of the x that it releases     reused; the others stay
    out buffers  to_device waits for compute   earlier kernels in that memory are done
                                               (kept.destinations)
    fetch(...)   to_device waits for compute,  earlier kernels in that memory are done, and the
                 or for the slot's last use    source is written: the caller settled first
                 copy block -> slot on to_device
    ticket.wait  compute waits for to_device   the tensors may be used
    ticket.done  the tensors' own stream       then their memory may be reused, and the slot records
                 waits for the copy or for     its last use. done() is called at the last use of the
                 the stream that used them     tensors, or when an unused ticket is freed

The CPU waits:

    save(x) to a file       for an older write              at most disk.UNDER_WAY tensors wait to
                                                            be written
    ticket.wait, a file     for the read                    the threads fill host memory
                            for an older tensor's copy      then a thread may fill its host memory
    on_host()               for compute                     the CPU reads labels, padding, documents
                                                            before a batch's layers
    a pinned block's end    for the device                  no copy uses the block (device._unpin)
    streamed_weights.py     for a layer's copies            the caller may write to the host weights

A later settle() hides a copy longer. Callers limit the bytes of sources. Files: disk.py.

This module never calls `record_stream`: the caching allocator would hold freed blocks until the
host has seen an event, and a host that runs ahead sees it late. Instead, the stream that allocated a
tensor waits for its last copy before it is freed.

Host memory is free again once its Loan is freed, a slot of a ring once its Ticket is. So an
exception, wherever it comes, needs no clean-up. tests/dry/test_order.py finds every missing wait.
"""

import sys
from collections import deque
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from hfpatch.compat import graph_task, version
from hfpatch.store.device import Device, Speed, device_for
from hfpatch.store.disk import DiskDirectory, File
from hfpatch.store.pool import HostPool, Loan

WRITTEN_TO = (
    "hfpatch: a layer's input was modified in place after its forward. Clone it before the "
    "in-place operation."
)


@dataclass
class Saved:
    """One tensor [B, T, ...] saved for the backward: `kept` on the device, in a `block` of the pool,
    or in a `file`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Tensor | None = None
    version: int = 0
    block: Loan | None = None
    file: File | None = None
    row_bytes: int = 0  # of one token of one batch row, if off the device
    resident: bool = True  # whether it is on the device

    def tensor(self) -> Tensor:
        """The kept tensor. RuntimeError if it was modified in place."""
        if version(self.kept) != self.version:
            raise RuntimeError(WRITTEN_TO)
        return self.kept


@dataclass
class Slot:
    """A device buffer for the pieces of one tile."""

    bytes: Tensor
    after: object  # event of its last use


@dataclass(eq=False)
class Ticket:
    """A fetch in flight. wait() returns its tensors; done(), or freeing the ticket, frees its
    memory.

    If Ctrl-C interrupts __init__, __del__ still finds the class's default fields.
    """

    device: Device
    side: object  # the stream of the copies
    owner: object  # the stream that allocated the tensors
    tensors: list[Tensor]
    slot: Slot | None = None
    free: deque | None = None  # takes the slot
    user: object = None  # the stream that waited for the copies
    copying: bool = False
    ready: object = None  # event of the copies
    reads: list = field(
        default_factory=list
    )  # (disk, destination, what DiskDirectory.read returned)

    def wait(self) -> list[Tensor]:
        """The tensors, safe to use on the current stream."""
        if self.reads:
            self.copying = True
            with self.device.on(self.side), torch.no_grad():
                while self.reads:
                    disk, destination, read = self.reads[0]
                    disk.land(destination, read, self.side)
                    del self.reads[0]
            self.ready = self.device.mark(self.side)
        if self.copying:
            self.user = self.device.current()
            self.device.wait(self.ready, self.user)
        return self.tensors

    def done(self) -> None:
        """Frees the memory: the last use of the tensors is launched, or they are not needed."""
        if self.copying:
            if self.user is None:
                # wait() never ran; interrupted copies have no event either
                self.device.wait(self.ready or self.device.mark(self.side), self.owner)
            elif self.user != self.owner:
                self.device.wait(self.device.mark(self.user), self.owner)
            self.copying = False
        if self.slot is not None:
            self.slot.after = self.device.mark(self.user or self.owner)
            self.free.append(self.slot)
            self.slot = None
        self.tensors = []
        self.reads = []

    def __del__(self, finalizing=sys.is_finalizing):
        if not finalizing():
            self.done()


class Transfers:
    """Copies between a device and a tier ("gpu", "host" or "disk"), on two streams of its own."""

    def __init__(self, device: torch.device, tier: str, directory: str | None = None):
        self.device = device_for(device)
        self.tier = tier
        self.on_device = device
        self.pool = HostPool(self.device)
        self.disk = DiskDirectory(directory, self.pool) if tier == "disk" else None
        self.to_host = self.device.stream()
        self.to_device = self.device.stream()
        # (source, its version, its stream) of the copies since the last settle(), and their bytes
        self.unsettled: list[tuple[Tensor, int, object]] = []
        self.unsettled_bytes = 0
        self.speed = Speed(self.device)  # of copies to the host, under load
        # (sources, their bytes, event of their copies), the oldest first
        self.copied: deque = deque()

    # -- to the tier -------------------------------------------------------------------------------
    def save(self, x: Tensor) -> Saved:
        """Starts the copy of x [B, T, ...], which stays alive until settle(). Views are copied."""
        if self.tier == "gpu":
            if x.untyped_storage().nbytes() > x.numel() * x.element_size():
                x = x.clone()
            return Saved(tuple(x.shape), x.dtype, kept=x, version=version(x))
        saved = self.reserve(x.shape, x.dtype)
        self.put(saved, 0, x)
        return saved

    def reserve(self, shape, dtype: torch.dtype) -> Saved:
        """Reserves room in the tier for a tensor [B, T, ...], which put() fills piece by piece."""
        row_bytes = prod(shape[2:]) * dtype.itemsize
        saved = Saved(tuple(shape), dtype, row_bytes=row_bytes, resident=False)
        if self.disk is not None:
            saved.file = File(self.disk.directory)
        else:
            saved.block = self.pool.take(shape[0] * shape[1] * saved.row_bytes)
        return saved

    def put(self, saved: Saved, a: int, x: Tensor) -> None:
        """Copies x [B, t, ...] to the tokens of `saved` from a on. x stays alive until settle()."""
        # Detached: a source that outlives its layer must not hold a graph.
        device = self.device
        x = x.detach().contiguous()
        self.unsettled.append((x, version(x), device.current()))
        self.unsettled_bytes += x.untyped_storage().nbytes()
        # The event also orders earlier readers of the block: their tickets made this stream wait.
        device.wait(device.mark(), self.to_host)
        T = saved.shape[1]
        pieces = [(0, x)]  # (first token, tokens), whole or by rows
        if x.shape[1] != T:
            pieces = [(i * T + a, row) for i, row in enumerate(x)]
        with device.on(self.to_host), torch.no_grad():
            self.speed.begin(x.numel() * x.element_size())
            for first, piece in pieces:
                flat = piece.view(-1).view(torch.uint8)
                at = first * saved.row_bytes
                if saved.file is not None:
                    self.disk.write(flat, self.to_host, saved.file, at)
                else:
                    block = saved.block.bytes[at : at + flat.numel()]
                    block.copy_(flat, non_blocking=device.pins)
            self.speed.end()

    def settle(self, recent: int = 0, room: int = 0) -> None:
        """Releases the sources of copies, the oldest first, after their streams wait for the
        copies.

        Args:
            recent: sources of this many latest settle() calls stay in any case.
            room: sources stay while all of them together take at most this many bytes.

        Raises:
            RuntimeError: a source was modified in place while it stayed.
        """
        if self.unsettled:
            copied = self.device.mark(self.to_host)
            self.copied.append((self.unsettled, self.unsettled_bytes, copied))
            self.unsettled = []
            self.unsettled_bytes = 0
        held = sum(nbytes for _, nbytes, _ in self.copied)
        while len(self.copied) > recent and held > room:
            sources, nbytes, copied = self.copied[0]
            written_to = any(version(x) != before for x, before, _ in sources)
            for stream in {stream for _, _, stream in sources}:
                self.device.wait(copied, stream)
            self.copied.popleft()
            held -= nbytes
            if written_to:
                raise RuntimeError(WRITTEN_TO)

    # -- from the tier -----------------------------------------------------------------------------
    def fetch(
        self,
        pieces: list[tuple[Saved, int, int, Tensor | None]],
        slot: Slot | None = None,
        free: deque | None = None,
    ) -> Ticket:
        """Starts copying tokens [a, b) of each piece (saved, a, b, destination) to the device.

        A piece without a destination goes to the slot, or without a slot to a new buffer. free:
        receives the slot once the ticket is done.
        """
        # [Step 1] Find a destination for each piece that is off the device.
        device = self.device
        tensors = []
        copies = []
        offset = 0  # in the slot
        for saved, a, b, destination in pieces:
            if saved.resident:
                kept = saved.tensor()
                if (a, b) != (0, saved.shape[1]):
                    kept = kept[:, a:b]
                tensors.append(kept)
                continue
            if destination is None:
                shape = (saved.shape[0], b - a, *saved.shape[2:])
                nbytes = shape[0] * shape[1] * saved.row_bytes
                if slot is not None:
                    flat = slot.bytes[offset : offset + nbytes]
                    offset += -(-nbytes // 256) * 256
                else:
                    flat = torch.empty(nbytes, dtype=torch.uint8, device=self.on_device)
                destination = flat.view(saved.dtype).view(shape)
            tensors.append(destination)
            copies.append((saved, a, b, destination))
        ticket = Ticket(device, self.to_device, device.current(), tensors, slot, free)
        if not copies:
            return ticket
        # [Step 2] Order the copies. Earlier kernels of the compute stream may still use new memory.
        # settle() made that stream wait for the copies to the tier: the source is written. A slot's
        # last use may be older than settle(): FetchQueue.begin settles and drops such slots.
        device.wait(device.mark() if slot is None else slot.after, self.to_device)
        # [Step 3] Start the copies. From files only the reads start here: wait() copies what they
        # bring.
        if self.disk is not None:
            ticket.reads = [(self.disk, d, self.disk.read(s, a, b)) for s, a, b, d in copies]
            return ticket
        ticket.copying = True
        with device.on(self.to_device), torch.no_grad():
            for saved, a, b, destination in copies:
                nbytes = saved.shape[0] * saved.shape[1] * saved.row_bytes
                source = saved.block.bytes[:nbytes].view(saved.dtype).view(saved.shape)
                # One contiguous copy per batch row: a strided one between host and device would go
                # through a temporary.
                for row in range(saved.shape[0]):
                    destination[row].copy_(source[row, a:b], non_blocking=device.pins)
        ticket.ready = device.mark(self.to_device)
        return ticket

    def close(self) -> None:
        """Frees every host block that no graph holds, once its copies are done (device.py)."""
        self.settle()
        if self.disk is not None:
            self.disk.close()
        self.pool.give_back()


class Ring:
    """Device buffers (slots) for fetches in flight, used in turn.

    A slot is free again once its ticket is done or freed: an exception loses no slot.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.drop_ring()

    def drop_ring(self) -> None:
        """Drops the slots. Each is freed with its last ticket."""
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()
        self.stream = None

    def serves(self, count: int, nbytes: int) -> bool:
        """Whether the ring has `count` slots of nbytes that the current stream allocated."""
        slots = self.slots
        large = len(slots) >= count and slots[0].bytes.numel() >= nbytes
        return large and self.stream == self.transfers.device.current()

    def make_ring(self, count: int, nbytes: int) -> None:
        """Allocates `count` slots of nbytes, unless the present ones serve."""
        if self.serves(count, nbytes):
            return
        self.drop_ring()
        device = self.transfers.device
        for _ in range(count):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.transfers.on_device)
            self.slots.append(Slot(buffer, device.mark()))
        self.stream = device.current()
        self.free += self.slots


class FetchQueue(Ring):
    """The tiles that one backward pass needs, in order, across layers. The ring's slots limit how
    many are in flight.

    begin() drops what an interrupted pass left.
    """

    def __init__(self, transfers: Transfers):
        super().__init__(transfers)
        self.task = -1
        self.pending: deque = deque()  # (owner, pieces)
        self.under_way: deque = deque()  # (owner, ticket)

    def begin(self) -> None:
        """Resets the queue unless the current backward pass is the one that filled it."""
        task = graph_task()
        if task != self.task:
            self.transfers.settle()  # orders the writes before this pass's reads
            self.reset()
            self.drop_ring()
            self.task = task

    def push(self, owner, tiles: list) -> None:
        """Queues the pieces of each tile. Just before a tile's fetch, owner.destinations(pieces)
        adds the destinations.
        """
        self.pending += ((owner, pieces) for pieces in tiles)
        self._fill()

    def _fill(self) -> None:
        while self.pending and self.free:
            owner, pieces = self.pending[0]
            destined = owner.destinations(pieces)
            ticket = self.transfers.fetch(destined, self.free.popleft(), self.free)
            self.under_way.append((owner, ticket))
            self.pending.popleft()

    def drop_if_mixed(self, owner) -> bool:
        """Drops all fetches if any belongs to another call; returns whether fetches of `owner` are
        still queued. They mix where one backward interleaves graphs that two threads made.
        """
        if any(one is not owner for one, _ in (*self.under_way, *self.pending)):
            self.reset()
        return bool(self.under_way or self.pending)

    def reset(self) -> None:
        """Drops all fetches: the backward left the order of the forward, or ended early."""
        self.pending.clear()
        self.under_way.clear()

    def turns(self, count: int):
        """Yields the tensors of the next `count` tiles. The next iteration reuses their memory."""
        for _ in range(count):
            ticket = self.under_way.popleft()[1]
            yield list(ticket.wait())
            ticket.done()
            self._fill()
