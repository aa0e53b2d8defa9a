"""Where a layer's inputs wait for its backward: on the device, in pinned host memory, or in files on a disk.

Nothing here waits on the compute stream except for the event it needs, and nothing calls `record_stream`: with it the
caching allocator holds freed blocks until the host has seen an event, which the host, running ahead, does late. A copy's
source is kept alive until the compute stream has been made to wait for the copy (`settle`), and its destination comes from
buffers allocated on the compute stream and re-used after the event of their last reader.

Pinned memory is plain anonymous memory registered with CUDA, block by block, each of the exact size: PyTorch's caching host
allocator rounds to powers of two, which makes 131,073 tokens cost twice what 131,072 do.
"""

import mmap
import sys
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.checkpoint.disk import DiskDirectory


def host_empty(nbytes: int, pinned: bool) -> tuple[Tensor, object]:
    """A host buffer of nbytes (uint8) and what keeps it alive. Every host buffer of the session is made here."""
    if not pinned:
        return torch.empty(nbytes, dtype=torch.uint8), None
    memory = mmap.mmap(-1, nbytes)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)
    if int(status) != 0:
        raise MemoryError(
            f"hfpatch: expected to pin {nbytes / 2**30:.2f} GiB of host memory, CUDA answered {int(status)}; "
            "give the container more memory, or use Checkpointing(every=2) or Checkpointing(offload='/a/directory')."
        )
    return buffer, memory


class HostPool:
    """Host blocks of exact sizes, kept for the next step. Not shared between threads.

    A request takes the smallest free block that holds it and is less than twice as large: batches shorter than the longest
    one re-use its blocks, since pinning takes seconds a GiB.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.free: dict[int, list[Tensor]] = {}
        # By storage, not by address: a simulated block has no address.
        self.blocks: dict[int, tuple[Tensor, object]] = {}
        self.bytes_held = 0

    @property
    def bytes_free(self) -> int:
        """Bytes of blocks that wait for use."""
        return sum(size * len(blocks) for size, blocks in self.free.items())

    @staticmethod
    def _serves(size: int, nbytes: int) -> bool:
        return nbytes <= size < 2 * nbytes or size == nbytes

    def _make(self, nbytes: int) -> Tensor:
        buffer, memory = host_empty(nbytes, self.pinned)
        self.bytes_held += nbytes
        self.blocks[buffer.untyped_storage()._cdata] = (buffer, memory)
        return buffer

    def take(self, nbytes: int) -> Tensor:
        """nbytes of a block from the pool, or of a new one of exactly that size."""
        sizes = [size for size, blocks in self.free.items() if blocks and self._serves(size, nbytes)]
        block = self.free[min(sizes)].pop() if sizes else self._make(nbytes)
        return block[:nbytes]

    def give(self, part: Tensor) -> None:
        """Takes back what take() gave."""
        block = self.blocks[part.untyped_storage()._cdata][0]
        self.free.setdefault(block.numel(), []).append(block)

    def reserve(self, sizes: dict[int, int]) -> None:
        """Makes sure that `sizes[nbytes]` requests of each size can be served; says how far it is where that takes long."""
        missing = {
            n: count - sum(len(b) for s, b in self.free.items() if self._serves(s, n)) for n, count in sizes.items()
        }
        total = sum(nbytes * count for nbytes, count in missing.items() if count > 0)
        told = self.pinned and total >= 4 << 30
        done = 0
        for nbytes, count in missing.items():
            for _ in range(count):
                self.free.setdefault(nbytes, []).append(self._make(nbytes))
                done += nbytes
                if told and (done >> 30) != ((done - nbytes) >> 30):
                    progress = f"\rhfpatch: pinning host memory {done / 2**30:.0f}/{total / 2**30:.0f} GiB"
                    print(progress, end="", file=sys.stderr, flush=True)
        if told:
            print(file=sys.stderr, flush=True)

    def keep_only(self, sizes) -> None:
        """Frees the waiting blocks that serve none of these sizes."""
        for size in list(self.free):
            if not any(self._serves(size, n) for n in sizes):
                for block in self.free.pop(size):
                    self._drop(block)

    def _drop(self, block: Tensor) -> None:
        self.bytes_held -= block.numel()
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        del self.blocks[block.untyped_storage()._cdata]

    def close(self) -> None:
        """Frees what is not in use; pinned blocks are unregistered before their memory goes."""
        self.keep_only(())

    def __del__(self):
        if not self.blocks or sys.is_finalizing():
            return
        if self.pinned:
            torch.cuda.synchronize()
        # Nothing may stay registered whose memory goes with the pool: a later mapping could get the same addresses.
        for block, _ in list(self.blocks.values()):
            self._drop(block)


class _NoStream:
    """Stands for a CUDA stream or event where copies are synchronous."""

    def wait_event(self, event):
        pass

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


@dataclass
class Saved:
    """One tensor [B, T, ...] saved for the backward. `kept` on the device, or `block` in the pool, or `file` on the disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Tensor | None = None
    version: int = 0
    block: Tensor | None = None
    file: object | None = None
    written: object | None = None  # event after which block or file holds the bytes
    pool: HostPool | None = field(default=None, repr=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one batch row."""
        width = 1
        for n in self.shape[2:]:
            width *= n
        return width * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """The kept tensor, checked not to have been written to since."""
        if self.kept is None:
            raise RuntimeError(
                "hfpatch: expected one backward through this graph, came to it a second time; "
                "pass retain_graph=True to the first backward."
            )
        if self.kept._version != self.version:
            raise RuntimeError(
                "hfpatch: expected a layer's input as it was in forward, found it modified in place; "
                "clone it before the in-place operation."
            )
        return self.kept

    def release(self) -> None:
        if self.block is not None:
            self.pool.give(self.block)
        if self.file is not None:
            self.file.remove()
        self.kept = self.block = self.file = None

    @property
    def resident(self) -> bool:
        return self.block is None and self.file is None


@dataclass
class Ticket:
    """A fetch under way: wait() makes the compute stream wait for it and returns the tensors."""

    tensors: list[Tensor]
    ready: object
    finish: object = None
    slot: int | None = None


class Transfers:
    """Copies of one device to and from a tier ("gpu", "host" or a directory), on two streams of their own."""

    def __init__(self, device: torch.device, tier: str, directory: str | None = None):
        self.device, self.tier = device, tier
        self.cuda = device.type == "cuda"
        self.pool = HostPool(pinned=self.cuda)
        self.disk = DiskDirectory(directory, self.pool) if tier == "disk" else None
        make = (lambda: torch.cuda.Stream(device)) if self.cuda else _NoStream
        self.to_host, self.to_device = make(), make()
        self.unsettled: list[tuple[Tensor, object]] = []
        self.slots: list[Tensor] = []
        self.slot_free: list[object] = []
        self.free_slots: deque[int] = deque()

    # -- events ------------------------------------------------------------------------------------------------------
    def _mark(self, stream=None):
        """An event recorded now on `stream` (the compute stream by default)."""
        if not self.cuda:
            return _NoStream()
        event = torch.cuda.Event()
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def _compute_waits(self, event) -> None:
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _on(self, stream):
        return torch.cuda.stream(stream) if self.cuda else torch.no_grad()

    # -- to the tier -------------------------------------------------------------------------------------------------
    def save(self, x: Tensor) -> Saved:
        """Starts the copy of x [B, T, ...]; x itself stays alive until settle()."""
        saved = Saved(tuple(x.shape), x.dtype, pool=self.pool)
        if self.tier == "gpu":
            saved.kept, saved.version = x, x._version
            return saved
        x = x.contiguous()
        nbytes = x.numel() * x.element_size()
        written = self._mark()
        self.to_host.wait_event(written)
        with self._on(self.to_host), torch.no_grad():
            if self.disk is not None:
                saved.file = self.disk.write(x.view(-1).view(torch.uint8), lambda: self._mark(self.to_host))
            else:
                saved.block = self.pool.take(nbytes)
                saved.block.view(x.dtype).view(x.shape).copy_(x, non_blocking=True)
        saved.written = self._mark(self.to_host)
        self.unsettled.append((x, saved.written))
        return saved

    def settle(self) -> None:
        """Lets go of the sources of all copies, the compute stream waiting for each copy first."""
        for _, event in self.unsettled:
            self._compute_waits(event)
        self.unsettled.clear()

    # -- from the tier -----------------------------------------------------------------------------------------------
    def make_ring(self, slots: int, nbytes: int) -> None:
        """`slots` device buffers of nbytes for tiles under way; kept while the size stays."""
        if self.slots and self.slots[0].numel() >= nbytes and len(self.slots) >= slots:
            return
        assert len(self.free_slots) == len(self.slots), "a ring is replaced while tiles are under way"
        self.drop_ring()
        self.slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self.slot_free = [self._mark() for _ in self.slots]
        self.free_slots = deque(range(slots))

    def drop_ring(self) -> None:
        self.slots, self.slot_free = [], []
        self.free_slots.clear()

    def fetch(self, pieces: list[tuple[Saved, int, int, Tensor | None]], slot: bool = False) -> Ticket:
        """Starts copying rows [a, b) of each piece to its destination, or into a ring slot or a new buffer where that is None."""
        tensors, copies, offset, index = [], [], 0, None
        if slot:
            index = self.free_slots.popleft()
            self.to_device.wait_event(self.slot_free[index])
        for saved, a, b, destination in pieces:
            if saved.resident:
                whole = saved.tensor()
                tensors.append(whole if (a, b) == (0, saved.shape[1]) else whole[:, a:b])
                continue
            if destination is None:
                shape = (saved.shape[0], b - a, *saved.shape[2:])
                nbytes = shape[0] * shape[1] * saved.row_bytes
                if slot:
                    flat = self.slots[index][offset : offset + nbytes]
                    offset += -(-nbytes // 256) * 256
                else:
                    flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                destination = flat.view(saved.dtype).view(shape)
            tensors.append(destination)
            copies.append((saved, a, b, destination))
        # Buffers come from the compute stream's allocator: what ran there before owns their memory until now.
        if copies and not slot:
            self.to_device.wait_event(self._mark())
        for saved, *_ in copies:
            if saved.written is not None:
                self.to_device.wait_event(saved.written)
        finish = None
        if self.disk is not None:
            jobs = [(d, self.disk.read(s.file, s, a, b)) for s, a, b, d in copies]
            if jobs:
                finish = lambda: self._land(jobs)  # noqa: E731
        else:
            with self._on(self.to_device), torch.no_grad():
                for saved, a, b, destination in copies:
                    if saved.block is None:
                        saved.tensor()
                    source = saved.block.view(saved.dtype).view(saved.shape)
                    # One contiguous copy a batch row: a strided copy between host and device would go through a temporary.
                    for row in range(saved.shape[0]):
                        destination[row].copy_(source[row, a:b], non_blocking=True)
        ready = self._mark(self.to_device) if copies and finish is None else None
        return Ticket(tensors, ready, finish, index)

    def _land(self, jobs):
        with self._on(self.to_device), torch.no_grad():
            for destination, job in jobs:
                self.disk.land(job, destination, lambda: self._mark(self.to_device))
        return self._mark(self.to_device)

    def wait(self, ticket: Ticket) -> list[Tensor]:
        """The ticket's tensors, safe to use on the compute stream."""
        if ticket.finish is not None:
            ticket.ready, ticket.finish = ticket.finish(), None
        if ticket.ready is not None:
            self._compute_waits(ticket.ready)
            ticket.ready = None
        return ticket.tensors

    def done(self, ticket: Ticket) -> None:
        """The compute stream has its last use of the ticket's slot behind it."""
        self.wait(ticket)
        if ticket.slot is not None:
            self.slot_free[ticket.slot] = self._mark()
            self.free_slots.append(ticket.slot)
            ticket.slot = None
        ticket.tensors = []

    def finish(self) -> None:
        """Waits on the host until no copy is under way."""
        self.settle()
        self.to_host.synchronize()
        self.to_device.synchronize()

    def close(self) -> None:
        """Frees the ring and every host block that no graph holds."""
        self.finish()
        self.drop_ring()
        self.pool.close()
        if self.disk is not None:
            self.disk.close()


class FetchQueue:
    """The tiles that backward will want, in order: as many under way as the ring has slots, across phases and layers."""

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.pending: deque = deque()
        self.under_way: deque = deque()

    def push(self, owner, requests) -> None:
        """requests: one function a tile, returning the pieces for Transfers.fetch when its turn has come."""
        self.pending.extend((owner, request) for request in requests)
        self._fill()

    def _fill(self) -> None:
        while self.pending and self.transfers.free_slots:
            owner, request = self.pending.popleft()
            self.under_way.append((owner, self.transfers.fetch(request(), slot=True)))

    def starts_with(self, owner) -> bool:
        head = self.under_way[0] if self.under_way else self.pending[0] if self.pending else (None,)
        return head[0] is owner

    def reset(self) -> None:
        """Forgets everything: the backward took another order than the forward promised."""
        self.pending.clear()
        while self.under_way:
            self.transfers.done(self.under_way.popleft()[1])

    def next(self):
        """Yields-like: the tensors of the next tile; call release() with the ticket when its last use is launched."""
        _, ticket = self.under_way.popleft()
        return ticket, self.transfers.wait(ticket)

    def release(self, ticket: Ticket) -> None:
        self.transfers.done(ticket)
        self._fill()
