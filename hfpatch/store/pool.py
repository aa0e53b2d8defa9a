"""Reusable host memory: pieces of large blocks.

A piece is free exactly when no Loan of it is alive. No code hands anything back, so an
exception (or Ctrl-C, between any two lines) loses nothing.

Pinned memory is anonymous memory registered with CUDA. PyTorch's caching host allocator rounds each
tensor to a power of two: 131,073 tokens would cost twice as much as 131,072.
"""

import warnings
import weakref
from dataclasses import dataclass

from torch import Tensor

from hfpatch.budget.free import rank_host_free
from hfpatch.budget.limits import gib
from hfpatch.budget.measured import HOST_SHARE
from hfpatch.store.device import Block, Device

# The largest block, unless one tensor needs more. Drivers from r580 on refuse to register 512 GiB at once
# (github.com/LMCache/LMCache/issues/5177).
PINNED_AT_ONCE = 64 << 30


@dataclass(eq=False)
class Loan:
    """The right to use these bytes of a host block, until this object is freed. The reference to
    the block keeps it pinned.
    """

    block: Block
    bytes: Tensor


class Area:
    """A block of host memory, lent in consecutive pieces of any size. Used by one thread at a time.

    A loan takes the lowest gap that is large enough. A backward frees pieces in the reverse order
    of its forward, so no gaps remain.
    """

    def __init__(self, block, nbytes: int):
        self.block = block
        self.nbytes = nbytes
        self.rows: list[tuple] = []  # (start, end, weak reference to the loan), ascending

    @property
    def taken(self) -> int:
        """Bytes on loan."""
        return sum(end - start for start, end, loan in list(self.rows) if loan() is not None)

    def take(self, nbytes: int) -> Loan | None:
        """A loan of nbytes, or None."""
        rows = [row for row in self.rows if row[2]() is not None]
        start = 0  # of the gap before a row
        for i, (stop, after, _) in enumerate([*rows, (self.nbytes, None, None)]):
            if stop - start >= nbytes:
                end = start + nbytes
                loan = Loan(self.block, self.block.bytes[start:end])
                rows.insert(i, (start, end, weakref.ref(loan)))
                self.rows = rows
                return loan
            start = after
        return None


ALIGNED = 64  # bytes; piece sizes are multiples of it


class HostPool:
    """Host memory in pieces of exact sizes, kept for the next step. Not shared between threads.

    Registering memory with CUDA takes long. A piece for which no block has room gets a new block,
    and later pieces are cut from it: a shorter batch fits into the blocks of a longer one. For a
    longer batch blocks of twice the bytes replace the unused ones, as far as the host has memory:
    lengths that grow little by little then register only when they double. If registering fails,
    memory is pageable from then on.
    """

    def __init__(self, device: Device):
        self.device = device
        self.pinned = device.pins
        self.areas: list[Area] = []

    @property
    def bytes_held(self) -> int:
        return sum(area.nbytes for area in self.areas)

    @property
    def bytes_free(self) -> int:
        """Bytes not on loan."""
        return self.bytes_held - sum(area.taken for area in self.areas)

    def _make(self, nbytes: int) -> Area:
        block = Block(self.device, nbytes, self.pinned and nbytes <= PINNED_AT_ONCE)
        if block.status:
            self.pinned = False
            warnings.warn(
                f"hfpatch: CUDA could not pin {gib(nbytes, 2)} of host memory "
                f"({block.status}); copies run from pageable memory, more slowly. Give the "
                "container more memory (or locked memory, ulimit -l), or use "
                "Checkpointing(every=2) or Checkpointing(offload='/a/directory').",
                stacklevel=2,
            )
        area = Area(block, nbytes)
        self.areas.append(area)
        return area

    def take(self, nbytes: int) -> Loan:
        """A loan of at least nbytes, from a new block of that size if no block has room."""
        nbytes = max(ALIGNED, nbytes + -nbytes % ALIGNED)
        for area in self.areas:
            loan = area.take(nbytes)
            if loan is not None:
                return loan
        held = self.bytes_held
        self.give_back()
        more = 2 * (held - self.bytes_held)
        free = rank_host_free()
        if free is not None:
            more = min(more, int(HOST_SHARE * free))
        more = max(nbytes, more - more % ALIGNED)
        largest = max(nbytes, PINNED_AT_ONCE)
        made = [self._make(min(largest, more - at)) for at in range(0, more, largest)]
        return made[0].take(nbytes)

    def give_back(self) -> None:
        """Frees the blocks without loans. Freeing a pinned block waits for the device."""
        self.areas = [area for area in self.areas if area.taken]
