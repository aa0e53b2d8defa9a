"""What is lent out again and again: pieces of host memory, bounce buffers.

A thing is free exactly while no Loan of it lives. Nothing has to be handed back, so nothing can be
lost, wherever an exception (or Ctrl-C, between any two lines) ends a step.
"""

import weakref
from bisect import bisect_left
from dataclasses import dataclass

from torch import Tensor


class Loan:
    """The right to use `thing`; it ends with this object."""

    __slots__ = ("thing", "__weakref__")

    def __init__(self, thing):
        self.thing = thing


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

    block: object  # device.Block
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
        self.rows.insert(i, (at, at + nbytes, weakref.ref(loan, lambda _: self._given_back(at))))
        if at <= max(first, self.low):
            self.low = at + nbytes
        return loan

    def _given_back(self, at: int) -> None:
        self.low = min(self.low, at)
