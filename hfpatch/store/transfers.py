"""Tensors that wait for a backward: on the device, in pinned host memory, or in files on a disk.

Three streams work for a device: the compute stream, one for copies to the store and one for copies
back. Who waits for whom:

    save(x)      to_host waits for compute     x is complete, and whoever read the block before
                 copy x -> block on to_host    is done (its ticket ended with a wait, see below)
                 x stays in `unsettled`
    settle()     compute waits for the copy    then x goes, and its memory may be used again
    fetch(...)   to_device waits for compute,  what ran in that memory before is over, and what is
                 or for the slot's last use    read has been written: settle() came first
                 copy block -> slot on to_device
    ticket.wait  compute waits for to_device   the tensors may be used
    ticket.done  a mark on compute, for the    at the last use of the tensors, or when the ticket
                 slot's next fetch             goes unused

The host waits for files alone. The later settle() comes, the more work hides a copy and the longer
its source takes memory: a caller says how many bytes of sources may stay.

Nothing calls `record_stream`: with it the caching allocator holds freed blocks until the host has
seen an event, which the host, running ahead, does late. In its place each tensor goes back to the
stream whose memory it is, after that stream was made to wait for the tensor's last copy.

What is lent (pieces of host memory, slots of a ring) is free again when its Loan or Ticket goes, so
an exception, wherever it comes, leaves nothing to clear up. tests/faults/checker.py finds every wait
that is missing. Files: disk.py. Host memory: pool.py.
"""

import sys
from collections import deque
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hfpatch.compat import graph_task, version
from hfpatch.store.device import Device, device_for
from hfpatch.store.disk import DiskDirectory, File, Read
from hfpatch.store.pool import HostPool, Loan

WRITTEN_TO = (
    "hfpatch: expected a layer's input as it was in forward, found it modified in place; "
    "clone it before the in-place operation."
)


@dataclass
class Saved:
    """One tensor [B, T, ...] saved for the backward. `kept` on the device, or in a block of the
    pool, or in a file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Tensor | None = None
    version: int = 0
    block: Loan | None = None
    file: File | None = None
    row_bytes: int = 0  # of one token of one batch row, where it is not on the device
    resident: bool = True  # on the device

    def tensor(self) -> Tensor:
        """The kept tensor, checked not to have been written to since."""
        if self.kept is None:
            raise RuntimeError(
                "hfpatch: expected one backward through this graph, came to it a second time; "
                "pass retain_graph=True to the first backward."
            )
        if version(self.kept) != self.version:
            raise RuntimeError(WRITTEN_TO)
        return self.kept

    def release(self) -> None:
        self.kept = self.block = self.file = None
        self.resident = True  # where one that is asked for says that it is gone


@dataclass
class Slot:
    """A device buffer for the pieces of one tile."""

    bytes: Tensor
    after: object  # event of its last use


class Ticket:
    """A fetch under way and the memory that it fills: wait() gives the tensors, done() (or the
    ticket's end) the memory.
    """

    slot, copying, device = None, False, None  # also where Ctrl-C ends __init__

    def __init__(self, device: Device, side, tensors: list[Tensor], slot: Slot | None, free=None):
        self.device, self.side, self.tensors = device, side, tensors
        self.owner = device.current()  # the stream from whose memory the tensors come
        self.user = self.ready = None
        self.reads: list[tuple[Tensor, Read]] = []
        self.slot, self.free = slot, free

    def wait(self) -> list[Tensor]:
        """The tensors, safe to use on the current stream."""
        if self.reads:
            self.copying = True
            with self.device.on(self.side), torch.no_grad():
                while self.reads:
                    destination, read = self.reads[0]
                    read.land(destination, self.side)
                    del self.reads[0]
            self.ready = self.device.mark(self.side)
        if self.copying:
            self.user = self.device.current()
            self.device.wait(self.ready, self.user)
        return self.tensors

    def done(self) -> None:
        """The last use of the tensors is launched, or nobody wants them."""
        device = self.device
        if device is None:
            return
        if self.copying:
            # nobody waited; where the copies were cut short there is no event either
            if self.user is None:
                device.wait(self.ready or device.mark(self.side), self.owner)
            elif self.user != self.owner:
                device.wait(device.mark(self.user), self.owner)
            self.copying = False
        if self.slot is not None:
            self.slot.after = device.mark(self.user or self.owner)
            self.free.append(self.slot)
            self.slot = None
        self.tensors, self.reads = [], []

    def __del__(self, finalizing=sys.is_finalizing):
        if not finalizing():
            self.done()


class Transfers:
    """Copies of one device to and from a tier ("gpu", "host" or "disk" with a directory), on two
    streams of their own.
    """

    def __init__(self, device: torch.device, tier: str, directory: str | None = None):
        self.device, self.tier = device_for(device), tier
        self.on_device = device
        self.pool = HostPool(self.device)
        self.disk = DiskDirectory(directory, self.pool) if tier == "disk" else None
        self.to_host, self.to_device = self.device.stream(), self.device.stream()
        # (source, its version, its stream) of the copies since the last settle(), and their bytes
        self.unsettled: list[tuple[Tensor, int, object]] = []
        self.unsettled_bytes = 0
        # (sources, their bytes, event of their copies), the oldest first
        self.copied: deque = deque()

    # -- to the tier -------------------------------------------------------------------------------
    def save(self, x: Tensor) -> Saved:
        """Starts the copy of x [B, T, ...]; x itself stays alive until settle()."""
        if self.tier == "gpu":
            return Saved(tuple(x.shape), x.dtype, kept=x, version=version(x))
        saved = self.room(x.shape, x.dtype)
        self.put(saved, 0, x)
        return saved

    def room(self, shape, dtype: torch.dtype) -> Saved:
        """Room in the tier, not on the device, for a tensor [B, T, ...] that is `put` there piece
        by piece.
        """
        row_bytes = prod(shape[2:]) * dtype.itemsize
        saved = Saved(tuple(shape), dtype, row_bytes=row_bytes, resident=False)
        if self.disk is not None:
            saved.file = self.disk.file()
        else:
            saved.block = self.pool.take(shape[0] * shape[1] * saved.row_bytes)
        return saved

    def put(self, saved: Saved, a: int, x: Tensor) -> None:
        """Starts the copy of x [B, t, ...] to the rows of `saved` from a on; x stays alive until
        settle().
        """
        # Detached: a source that outlives its layer must not hold a graph.
        device, x = self.device, x.detach().contiguous()
        self.unsettled.append((x, version(x), device.current()))
        self.unsettled_bytes += x.untyped_storage().nbytes()
        # Also for whoever read the block before: a ticket ends with its stream waiting for it.
        device.wait(device.mark(), self.to_host)
        b = a + x.shape[1]
        with device.on(self.to_host), torch.no_grad():
            T = saved.shape[1]
            for first, piece in (
                [(0, x)] if (a, b) == (0, T) else [(i * T + a, row) for i, row in enumerate(x)]
            ):
                flat, at = piece.view(-1).view(torch.uint8), first * saved.row_bytes
                if self.disk is not None:
                    self.disk.write(flat, self.to_host, saved.file, at)
                else:
                    saved.block.thing.bytes[at : at + flat.numel()].copy_(
                        flat, non_blocking=device.pins
                    )

    def settle(self, under_way: int = 0, room: int = 0) -> None:
        """Releases the sources of copies, the oldest first; their streams wait for the copies
        before that.

        under_way: how many of the latest calls' sources stay in any case. room: sources stay as
        long as all of them take no more than these bytes. Raises RuntimeError where a source was
        written to while it stayed.
        """
        if self.unsettled:
            copied = self.device.mark(self.to_host)
            self.copied.append((self.unsettled, self.unsettled_bytes, copied))
            self.unsettled, self.unsettled_bytes = [], 0
        held, streams, written_to = 0, set(), False
        for _, nbytes, _ in self.copied:
            held += nbytes
        while len(self.copied) > under_way and held > room:
            sources, nbytes, copied = self.copied[0]
            streams.clear()
            for x, before, stream in sources:
                streams.add(stream)
                written_to = written_to or version(x) != before
            x = None
            for stream in streams:
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
        """Starts copying rows [a, b) of each piece to its destination, or into the slot or a new
        buffer where that is None. free: where the slot goes once the ticket is done.
        """
        device, tensors, copies, offset = self.device, [], [], 0
        for saved, a, b, destination in pieces:
            if saved.resident:
                whole = saved.tensor()
                tensors.append(whole if (a, b) == (0, saved.shape[1]) else whole[:, a:b])
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
        ticket = Ticket(device, self.to_device, tensors, slot, free)
        if not copies:
            return ticket
        # Memory comes from the compute stream's allocator: what ran there before owns it until now.
        # Among that is the wait of settle(), so that what is read here has been written.
        device.wait(device.mark() if slot is None else slot.after, self.to_device)
        if self.disk is not None:
            ticket.reads = [(d, self.disk.read(s.file, s, a, b)) for s, a, b, d in copies]
            return ticket
        ticket.copying = True
        with device.on(self.to_device), torch.no_grad():
            for saved, a, b, destination in copies:
                nbytes = saved.shape[0] * saved.shape[1] * saved.row_bytes
                source = saved.block.thing.bytes[:nbytes].view(saved.dtype).view(saved.shape)
                # One contiguous copy a batch row: a strided copy between host and device would go
                #     through a temporary.
                for row in range(saved.shape[0]):
                    destination[row].copy_(source[row, a:b], non_blocking=device.pins)
        ticket.ready = device.mark(self.to_device)
        return ticket

    def close(self) -> None:
        """Frees every host block that no graph holds; each waits for its copies (device.py)."""
        self.settle()
        if self.disk is not None:
            self.disk.close()
        self.pool.give_back()


class Ring:
    """Device buffers for fetches under way, taken in turn.

    A slot is free again as soon as its ticket is done, or goes: wherever an exception ends a step,
    nothing has to be handed back.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.drop_ring()

    def drop_ring(self) -> None:
        """Frees the slots, each when its last ticket goes."""
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()
        self.stream = None

    def serves(self, count: int, nbytes: int) -> bool:
        """Whether there are so many slots of that size, of the current stream's memory."""
        slots = self.slots
        large = len(slots) >= count and slots[0].bytes.numel() >= nbytes
        return large and self.stream == self.transfers.device.current()

    def make_ring(self, count: int, nbytes: int) -> None:
        """`count` buffers of nbytes, kept while they serve."""
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
    """The tiles that one backward pass will want, in order: as many under way as its ring has
    slots, across layers.

    What is left in it when another pass (or a forward) begins belongs to a pass that was cut short:
    begin() drops it.
    """

    def __init__(self, transfers: Transfers):
        super().__init__(transfers)
        self.task = -1
        self.pending: deque = deque()
        self.under_way: deque = deque()

    def begin(self) -> None:
        """Called where a pass may begin: starts clean where it is not the pass that filled the
        queue.
        """
        task = graph_task()
        if task != self.task:
            self.transfers.settle()  # what this pass reads has been written
            self.reset()
            self.drop_ring()
            self.task = task

    def push(self, owner, tiles: list) -> None:
        """Queues the pieces of each tile; owner.destinations(pieces) gives those for Transfers.fetch
        when a tile's turn has come.
        """
        for pieces in tiles:
            self.pending.append((owner, pieces))
        self._fill()

    def _fill(self) -> None:
        while self.pending and self.free:
            owner, pieces = self.pending[0]
            pieces = owner.destinations(pieces)
            ticket = self.transfers.fetch(pieces, self.free.popleft(), self.free)
            self.under_way.append((owner, ticket))
            self.pending.popleft()

    def is_for(self, owner) -> bool:
        """Whether the owner, whose turn it is, has something here. What others have goes: one who
        was promised the next turn, where graphs that two threads made take turns in one pass.
        """
        for one, _ in (*self.under_way, *self.pending):
            if one is not owner:
                self.under_way, self.pending = (
                    deque(item for item in queue if item[0] is owner)
                    for queue in (self.under_way, self.pending)
                )
                self._fill()
                break
        return bool(self.under_way or self.pending)

    def reset(self) -> None:
        """Forgets everything: the backward took another order than the forward promised, or ended
        early.
        """
        self.pending.clear()
        self.under_way.clear()

    def turns(self, count: int):
        """Yields the tensors of each of the next `count` tiles; their memory is re-used once the
        next is asked for.
        """
        for _ in range(count):
            ticket = self.under_way.popleft()[1]
            yield list(ticket.wait())
            ticket.done()
            self._fill()
