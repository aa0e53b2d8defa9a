"""What is lent out again and again: pieces of host memory, ring slots, bounce buffers.

A thing is free exactly while no Loan of it lives. Nothing has to be handed back, so nothing can be
lost, wherever an exception (or Ctrl-C, between any two lines) ends a step.
"""

import weakref
from bisect import bisect_left


class Loan:
    """The right to use `thing`; it ends with this object."""

    __slots__ = ("thing", "__weakref__")

    def __init__(self, thing):
        self.thing = thing


class Shelf:
    """Things of one kind. Used by one thread at a time."""

    def __init__(self, things=()):
        self.rows = [[thing, lambda: None] for thing in things]

    def __len__(self):
        return len(self.rows)

    def add(self, thing) -> None:
        self.rows.append([thing, lambda: None])

    @property
    def free(self) -> int:
        """How many may be taken."""
        return sum(lease() is None for _, lease in self.rows)

    def take(self) -> Loan | None:
        """A lease of one that is free, or None."""
        for row in self.rows:
            if row[1]() is None:
                lease = Loan(row[0])
                row[1] = weakref.ref(lease)
                return lease
        return None

    def drop_free(self) -> None:
        """Forgets those that are free."""
        self.rows = [row for row in self.rows if row[1]() is not None]


class Area:
    """Bytes of one block, lent in pieces of any size that lie behind each other. Used by one thread
    at a time.

    make(start, end): what a lease of those bytes is of. The lowest gap that is large enough is
    taken: what a forward takes and its backward gives back in reverse leaves none in between.
    """

    def __init__(self, nbytes: int, make):
        self.nbytes, self.make = nbytes, make
        self.rows: list[tuple] = []  # (start, end, weak reference to the lease), ascending
        self.low = 0  # where to begin to look: all below is taken, or too small for what came last

    @property
    def taken(self) -> int:
        """Bytes that are lent now."""
        return sum(end - start for start, end, lease in list(self.rows) if lease() is not None)

    def take(self, nbytes: int, low: int | None = None) -> Loan | None:
        """A lease of so many bytes from `low` on, or None."""
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
        lease = Loan(self.make(at, at + nbytes))
        self.rows.insert(i, (at, at + nbytes, weakref.ref(lease, lambda _: self._given_back(at))))
        if at <= max(first, self.low):
            self.low = at + nbytes
        return lease

    def _given_back(self, at: int) -> None:
        self.low = min(self.low, at)
