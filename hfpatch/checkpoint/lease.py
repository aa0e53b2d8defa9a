"""What is lent out again and again: host blocks, ring slots, bounce buffers.

A thing is free exactly while no Lease of it lives. Nothing has to be handed back, so nothing can be lost, wherever an exception
(or Ctrl-C, between any two lines) ends a step.
"""

import weakref


class Lease:
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

    def take(self) -> Lease | None:
        """A lease of one that is free, or None."""
        for row in self.rows:
            if row[1]() is None:
                lease = Lease(row[0])
                row[1] = weakref.ref(lease)
                return lease
        return None

    def drop_free(self) -> None:
        """Forgets those that are free."""
        self.rows = [row for row in self.rows if row[1]() is not None]
