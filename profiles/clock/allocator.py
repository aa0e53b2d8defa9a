"""PyTorch's caching allocator as a model: what a run's storages take of a device in segments.

    allocator = Allocator(limit=16 << 30)
    simulate(model, 1, 8192, follower=partial(PlacedFollower, allocator))
    print(allocator.peak, allocator.most_reserved)

As c10/cuda/CUDACachingAllocator.cpp of torch 2.9 to 2.13: requests up to 1 MiB are cut out of
segments of 2 MiB, those below 10 MiB out of segments of 20 MiB, larger ones get a segment of their
own, rounded up to 2 MiB. A pool a stream; best fit; a block is split where enough is left of it and
merged with its free neighbours. With `expandable` a pool is one segment that grows at its end.
"""

import bisect
from collections import defaultdict
from itertools import count

import torch

from hfpatch.lab.clock import ClockDevice, ClockFollower
from hfpatch.lab.simulate.follow import Follower
from hfpatch.lab.simulate.ledger import ROUNDING, round_up

MiB, GiB = 1 << 20, 1 << 30
SMALL, SMALL_SEGMENT, SEGMENT, LARGE, LARGE_ROUNDING = MiB, 2 * MiB, 20 * MiB, 10 * MiB, 2 * MiB


class Piece:
    """Bytes of a segment, next to `before` and `after` in it. pool: (whether small, stream)."""

    __slots__ = ("nbytes", "pool", "used", "before", "after", "order")
    _orders = count()

    def __init__(self, nbytes: int, pool: tuple, before=None, after=None):
        self.nbytes, self.pool, self.used, self.order = nbytes, pool, False, next(self._orders)
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self


class Allocator:
    """limit: bytes of the device that segments may take, None for any.

    Results in bytes: allocated, reserved and their peaks; `fragments`, the most that was reserved
    and not allocated while a new peak of `reserved` was reached; ooms: a count.
    """

    def __init__(self, limit: int | None = None, expandable: bool = False):
        self.limit, self.expandable = limit, expandable
        self.allocated = self.reserved = self.peak = self.most_reserved = self.ooms = 0
        self.fragments = 0
        self.free_pieces: dict[tuple, list] = defaultdict(list)  # pool -> sorted (bytes, order, p)
        self.ends: dict[tuple, Piece] = {}  # of pools that grow

    def malloc(self, nbytes: int, stream=0) -> Piece:
        """A piece of at least so many bytes. Raises torch.OutOfMemoryError."""
        nbytes = max(ROUNDING, round_up(nbytes))
        pool = nbytes <= SMALL, stream
        piece = self._best(nbytes, pool) or self._new(nbytes, pool)
        rest = piece.nbytes - nbytes
        if rest >= ROUNDING if pool[0] else rest > SMALL:
            piece.nbytes = nbytes
            after = Piece(rest, pool, piece, piece.after)
            if self.ends.get(pool) is piece:
                self.ends[pool] = after
            self._keep(after)
        piece.used = True
        self.allocated += piece.nbytes
        self.peak = max(self.peak, self.allocated)
        return piece

    def free(self, piece: Piece) -> None:
        self.allocated -= piece.nbytes
        piece.used = False
        for other in (piece.before, piece.after):
            if other is not None and not other.used:
                self._drop(other)
                piece = self._joined(piece, other)
        self._keep(piece)

    def release(self) -> None:
        """Gives cached memory back to the device: whole segments, or whole pages of one that
        grows.
        """
        for pool, kept in self.free_pieces.items():
            page = SMALL_SEGMENT if pool[0] else SEGMENT
            for row in list(kept):
                piece = row[2]
                whole = piece.before is piece.after is None
                given = piece.nbytes // page * page if self.expandable else whole * piece.nbytes
                if given:
                    self._drop(piece)
                    self.reserved -= given
                    piece.nbytes -= given
                    self._keep(piece) if piece.nbytes else self._cut_out(piece)

    # -- inside ------------------------------------------------------------------------------------
    def _best(self, nbytes: int, pool: tuple) -> Piece | None:
        kept = self.free_pieces[pool]
        at = bisect.bisect_left(kept, (nbytes,))
        return kept.pop(at)[2] if at < len(kept) else None

    def _keep(self, piece: Piece) -> None:
        bisect.insort(self.free_pieces[piece.pool], (piece.nbytes, piece.order, piece))

    def _drop(self, piece: Piece) -> None:
        kept = self.free_pieces[piece.pool]
        kept.pop(bisect.bisect_left(kept, (piece.nbytes, piece.order)))

    def _joined(self, piece: Piece, other: Piece) -> Piece:
        first, second = (other, piece) if piece.before is other else (piece, other)
        first.nbytes, first.after = first.nbytes + second.nbytes, second.after
        if second.after is not None:
            second.after.before = first
        if self.ends.get(first.pool) is second:
            self.ends[first.pool] = first
        return first

    def _cut_out(self, piece: Piece) -> None:
        """An end or a hole of a segment that grows; its addresses are not used again."""
        before, after = piece.before, piece.after
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        if self.ends.get(piece.pool) is piece:
            self.ends[piece.pool] = before

    def _new(self, nbytes: int, pool: tuple) -> Piece:
        """A free piece of a new segment, or of one that has grown; in no list."""
        end = self.ends.get(pool)
        has = end.nbytes if end is not None and not end.used else 0
        page = SMALL_SEGMENT if pool[0] else SEGMENT
        fresh = nbytes >= LARGE and not self.expandable
        size = round_up(nbytes, LARGE_ROUNDING) if fresh else round_up(nbytes - has, page)
        if self.limit is not None and self.reserved + size > self.limit:
            self.release()
            end = self.ends.get(pool)
            has = end.nbytes if end is not None and not end.used else 0
            size = size if fresh else round_up(nbytes - has, page)
            if self.reserved + size > self.limit:
                self._out_of_memory(nbytes)
        self.reserved += size
        if self.reserved > self.most_reserved:
            self.most_reserved = self.reserved
            self.fragments = self.reserved - self.allocated - nbytes
        if not self.expandable:
            return Piece(size, pool)
        if has:
            self._drop(end)
            end.nbytes += size
            return end
        self.ends[pool] = Piece(size, pool, end)
        return self.ends[pool]

    def _out_of_memory(self, nbytes: int) -> None:
        self.ooms += 1
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {nbytes / GiB:.2f} GiB. GPU 0 has a total "
            f"capacity of {self.limit / GiB:.2f} GiB of which "
            f"{(self.limit - self.reserved) / GiB:.2f} GiB is free. Of the allocated memory "
            f"{self.allocated / GiB:.2f} GiB is allocated by PyTorch, and "
            f"{(self.reserved - self.allocated) / GiB:.2f} GiB is reserved by PyTorch but "
            "unallocated (simulated)."
        )


class Placed:
    """Before a Follower among a class's bases: its device storages take pieces of `allocator`."""

    def __init__(self, allocator: Allocator, *args, **settings):
        super().__init__(*args, **settings)
        self.allocator, self.pieces = allocator, {}  # by the id of a Block
        self.stream = lambda: 0  # whose pool the next storage is of

    def _birth(self, nbytes: int, op: str, category: str = "activations") -> int:
        placed = not (self._host or self._calibrating)
        piece = self.allocator.malloc(nbytes, self.stream()) if placed else None
        index = super()._birth(nbytes, op, category)
        if piece is not None:
            self.pieces[id(self.ledger.blocks[index])] = piece
        return index

    def _death(self, index: int) -> None:
        super()._death(index)
        piece = self.pieces.pop(id(self.ledger.blocks[index]), None)
        if piece is not None:
            self.allocator.free(piece)

    def track(self, tensor, *args, **kwargs):
        block = super().track(tensor, *args, **kwargs)
        piece = self.pieces.get(id(block))
        if piece is not None and not block.nbytes <= piece.nbytes <= block.nbytes + SMALL:
            self.allocator.free(self.pieces.pop(id(block)))
            self.pieces[id(block)] = self.allocator.malloc(block.nbytes, self.stream())
        return block


class PlacedFollower(Placed, Follower):
    """Follows storages, and places them."""


class PlacedClockFollower(Placed, ClockFollower):
    """Also places storages, each in the pool of the stream that makes it."""

    def __init__(self, allocator, clock: ClockDevice, **settings):
        super().__init__(allocator, clock, **settings)
        self.stream = lambda: id(clock.current())
