"""What is lent out again and again: pieces of host memory, bounce buffers.

A thing is free exactly while no Loan of it lives. Nothing has to be handed back, so nothing can be
lost, wherever an exception (or Ctrl-C, between any two lines) ends a step.

Pinned memory is plain anonymous memory registered with CUDA: PyTorch's caching host allocator
rounds each tensor to a power of two, which makes 131,073 tokens cost twice what 131,072 do.
"""

import warnings
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hfpatch.store.device import Block, Device


@dataclass(eq=False)
class Loan:
    """The right to use `thing`; it ends with this object."""

    thing: object


class Shelf:
    """Things of one kind (bounce buffers). Used by one thread at a time."""

    def __init__(self, things=()):
        self.rows = [[thing, lambda: None] for thing in things]

    def __len__(self):
        return len(self.rows)

    def add(self, thing) -> None:
        self.rows.append([thing, lambda: None])

    @property
    def free(self) -> int:
        """How many may be taken."""
        return sum(loan() is None for _, loan in self.rows)

    def take(self) -> Loan | None:
        """A loan of one that is free, or None."""
        for row in self.rows:
            if row[1]() is None:
                loan = Loan(row[0])
                row[1] = weakref.ref(loan)
                return loan
        return None

    def drop_free(self) -> None:
        """Forgets those that are free."""
        self.rows = [row for row in self.rows if row[1]() is not None]


@dataclass
class Piece:
    """Bytes of a host block, which they keep registered."""

    block: Block
    bytes: Tensor


class Area:
    """A block of host memory, lent in pieces of any size that lie behind each other. Used by one
    thread at a time.

    block: device.Block. The lowest gap that is large enough is taken: what a forward takes and its
    backward gives back in reverse leaves none in between.
    """

    def __init__(self, block, nbytes: int):
        self.block, self.nbytes = block, nbytes
        self.rows: list[tuple] = []  # (start, end, weak reference to the loan), ascending
        self.low = 0  # where to begin to look: all below is taken, or too small for what came last

    @property
    def taken(self) -> int:
        """Bytes that are lent now."""
        return sum(end - start for start, end, loan in list(self.rows) if loan() is not None)

    def take(self, nbytes: int, low: int | None = None) -> Loan | None:
        """A loan of a Piece of so many bytes from `low` on, or None."""
        at = self.low if low is None else low
        first, i = at, bisect_left(self.rows, (at,))
        while True:
            while i < len(self.rows) and self.rows[i][2]() is None:
                del self.rows[i]
            if (self.rows[i][0] if i < len(self.rows) else self.nbytes) - at >= nbytes:
                break
            if i == len(self.rows):
                return None
            at, i = self.rows[i][1], i + 1
        loan = Loan(Piece(self.block, self.block.bytes[at : at + nbytes]))
        self.rows.insert(i, (at, at + nbytes, weakref.ref(loan, partial(self._given_back, at))))
        if at <= max(first, self.low):
            self.low = at + nbytes
        return loan

    def _given_back(self, at: int, _loan) -> None:
        self.low = min(self.low, at)


ALIGNED = 64  # bytes; a piece of host memory has a multiple of it


class HostPool:
    """Host memory in pieces of exact sizes, kept for the next step. Not shared between threads.

    Registering memory with CUDA takes long, so every request is cut from few large blocks: a batch
    of any shorter length, under any policy, runs in what a longer one took. Where a step needs more
    than there is, one block replaces those before. It is twice as large as they were if the caller
    allows it, so that lengths which grow little by little register seldom: as often as the length
    doubles. Where registering fails, memory is pageable from then on.
    """

    def __init__(self, device: Device):
        self.device, self.pinned = device, device.pins
        self.areas: list[Area] = []

    @property
    def bytes_held(self) -> int:
        return sum(area.nbytes for area in self.areas)

    @property
    def bytes_free(self) -> int:
        """Bytes that wait for use."""
        return self.bytes_held - sum(area.taken for area in self.areas)

    def _make(self, nbytes: int) -> Area:
        block = Block(self.device, nbytes, self.pinned)
        if block.status:
            self.pinned = False
            warnings.warn(
                f"hfpatch: expected to pin {nbytes / 2**30:.2f} GiB of host memory, CUDA answered "
                f"{block.status}; copies run "
                "from pageable memory, more slowly: give the container more memory (or locked "
                "memory, ulimit -l), or use "
                "Checkpointing(every=2) or Checkpointing(offload='/a/directory').",
                stacklevel=2,
            )
        area = Area(block, nbytes)
        self.areas.append(area)
        return area

    def take(self, nbytes: int) -> Loan:
        """A loan of a Piece of at least nbytes, out of a new block of that size where there is no
        room.
        """
        nbytes += -nbytes % ALIGNED
        for low in (None, 0):  # then between what is taken
            for area in self.areas:
                loan = area.take(nbytes, low)
                if loan is not None:
                    return loan
        return self._make(nbytes).take(nbytes)

    def reserve(self, sizes: dict[int, int], most: int | None = None) -> None:
        """Makes sure that `sizes[nbytes]` requests of each size can be served, in any order.

        most: bytes up to which more than that may be held, for lengths to come.
        """
        aligned = [(nbytes + -nbytes % ALIGNED, count) for nbytes, count in sizes.items()]
        wanted = sum(nbytes * count for nbytes, count in aligned)
        # No piece lies in two blocks, so the end of each but the last may stay empty.
        lost = max(0, len(self.areas) - 1) * max(aligned, default=(0,))[0]
        if wanted <= self.bytes_free - lost:
            return
        more = 2 * self.bytes_held
        self.give_back()
        self._make(max(wanted, more if most is None else min(more, most) // ALIGNED * ALIGNED))

    def give_back(self) -> None:
        """Frees the blocks of which nothing is lent; a pinned one waits for the device as it
        goes.
        """
        self.areas = [area for area in self.areas if area.taken]
