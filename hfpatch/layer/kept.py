"""The tensors that one call of a layer keeps for its backward, and their return, tile by tile.

x is kept, in a segment by its first layer alone; attention's outputs with their log-sum-exp if the
policy says so, and gate and up, which wait and return tile by tile. The policy chooses the tier
(store/transfers.py).
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from hfpatch.budget.policy import RING_SLOTS, Checkpointing
from hfpatch.compat import version
from hfpatch.store.transfers import FetchQueue, Saved

# Each order of a backward (its method in backward.py, which has the phases A, B, D), and what its
# passes fetch of each tile. "out" are the kept attention outputs, "gates" gate and up.
PASSES = {
    "one_tile": (("x", "out", "gates"),),  # which stays for all phases
    "phase_a_after": (("x", "gates"),),  # alone: nothing mixes tokens
    "outs_kept": (("x", "out", "gates"), ("x",), ("x",)),  # A B D
    "outs_again": (("x",), ("x",), ("x",)),  # B A D
}


class TileFetch(NamedTuple):
    """Tokens [a, b) of a saved tensor. output: the index of the attention output whose buffer takes
    them, None if they go to a slot of the ring.
    """

    saved: Saved
    a: int
    b: int
    output: int | None


Pass = list[list[TileFetch]]  # one pass over the tiles of a backward: the fetches of each tile


def write_tile(
    whole: list[Tensor] | None, tiles: list[Tensor], a: int, b: int, tokens: int
) -> list:
    """Writes tiles [B, b - a, ...] into whole tensors [B, tokens, ...], made with the first tile."""
    if whole is None:
        whole = [t.new_empty(t.shape[0], tokens, *t.shape[2:]) for t in tiles]
    for into, tile in zip(whole, tiles):
        into[:, a:b] = tile
    return whole


@dataclass(eq=False, kw_only=True)
class Kept:
    """The saved tensors of a call. bounds: of its tiles; queue: of its device and tier, None if
    nothing is kept.
    """

    policy: Checkpointing
    device: torch.device
    # parallel.shards.Shards: x is kept in parts, one per tensor-parallel rank
    shards: "object | None" = None
    keeps_gates: bool = False
    bounds: tuple[tuple[int, int], ...] = ()
    queue: FetchQueue | None = None
    x: Saved | None = None
    outs: list[Saved] = field(default_factory=list)
    lses: list[Saved] = field(default_factory=list)
    gates: list[list[Saved]] = field(default_factory=list)  # gate and up of each tile
    out_buffers: list | None = None
    passes: list[Pass] = field(default_factory=list)  # of the current or next backward

    @staticmethod
    def on_device(x: Tensor) -> Saved:
        return Saved(tuple(x.shape), x.dtype, kept=x, version=version(x))

    # -- passes over the tiles ---------------------------------------------------------------------
    def cut(self, x: Tensor | None):
        """x[:, a:b] of each tile, in order, of x [B, T, ...]; None for each tile if x is None.

        In one call: a view costs the host as much as an op.
        """
        if x is None:
            return repeat(None)
        if len(self.bounds) == 1:
            return iter((x,))
        return iter(x.split([b - a for a, b in self.bounds], 1))

    @property
    def order(self) -> str:
        """The order of the backward: a key of PASSES, and the method of Backward that runs it."""
        if not self.mixes:
            return "phase_a_after"
        if len(self.bounds) == 1:
            return "one_tile"
        return "outs_kept" if self.outs else "outs_again"

    def _planned(self) -> list[Pass]:
        """The passes of a backward, in order."""
        return list(map(self._pass, PASSES[self.order]))

    def _pass(self, names: tuple[str, ...]) -> Pass:
        """The pass that fetches the tensors with these names."""
        of_x = self.bounds if self.shards is None else self.shards.bounds(self.bounds)
        found: Pass = []
        for index, (a, b) in enumerate(self.bounds):
            tile: list[TileFetch] = []
            if "x" in names:
                tile.append(TileFetch(self.x, *of_x[index], None))
            if "out" in names:
                for output, saved in enumerate(self.outs):
                    tile.append(TileFetch(saved, a, b, None if saved.resident else output))
            if "gates" in names and self.keeps_gates:
                for saved in self.gates[index]:
                    tile.append(TileFetch(saved, 0, saved.shape[1], None))
            found.append(tile)
        return found

    def destinations(self, tile: list[TileFetch]) -> list[tuple]:
        """A tile's pieces (saved, a, b, destination) for Transfers.fetch, just before the fetch.
        Buffers for whole attention outputs are allocated only then.
        """
        found = []
        for saved, a, b, output in tile:
            into = None
            if output is not None:
                if self.out_buffers is None:
                    empty = partial(torch.empty, device=self.device)
                    made = [empty(o.shape, dtype=o.dtype) for o in self.outs]
                    transfers = self.queue.transfers
                    # Earlier kernels may still use this memory: the copies wait for them.
                    transfers.device.wait(transfers.device.mark(), transfers.to_device)
                    self.out_buffers = made
                into = self.out_buffers[output][:, a:b]
            found.append((saved, a, b, into))
        return found

    def begin_passes(self) -> None:
        """Plans this backward's passes. Queues their fetches unless x is on the device; the first
        may be queued already.
        """
        if self.x.resident:
            self.passes = self._planned()
            return
        if not self.queue.drop_if_mixed(self):
            self.prefetch()
        for one in self.passes[1:]:
            self.queue.push(self, one)

    def prefetch(self) -> None:
        """Queues this call's first pass, so that its first tiles are in flight before its backward
        starts.
        """
        if self.x is None or self.x.resident:
            return
        self.passes = self._planned()
        nbytes = 0
        for one in self.passes:  # a slot takes the first tile of any pass, the largest
            taken = 0
            for saved, a, b, output in one[0]:
                if output is None:
                    taken += saved.shape[0] * (b - a) * saved.row_bytes + 256
            nbytes = max(nbytes, taken)
        # With one tile a layer, one slot is in use and one takes the tile of the layer below.
        self.queue.make_ring(RING_SLOTS if len(self.bounds) > 1 else 2, nbytes)
        self.out_buffers = None  # an interrupted backward may still read the old ones
        self.queue.push(self, self.passes[0])

    def tiles(self, one: Pass):
        """Yields (bounds, x tile, out tiles, gate and up or nothing) of each tile of a pass. The next
        iteration reuses a tile's memory.
        """
        outs = len(self.outs)  # a pass without them has nothing behind x, or they were not kept
        if self.x.resident:
            transfers = self.queue.transfers
            found = (transfers.fetch(tile).tensors for tile in one)
        else:
            found = self.queue.turns(len(self.bounds))
        for tensors, (a, b) in zip(found, self.bounds):  # found first: its end frees the last slot
            x = tensors.pop(0)
            if self.shards is not None:  # from all ranks' parts
                x = self.shards.whole(x, b - a)
            yield (a, b), x, tensors[:outs], tensors[outs:]
            del x, tensors

    # -- whole tensors -----------------------------------------------------------------------------
    def fetch_whole(self, saved: list[Saved]):
        """The Ticket of a fetch of these tensors, whole; None for an empty list."""
        pieces = [(one, 0, one.shape[1], None) for one in saved]
        return self.queue.transfers.fetch(pieces) if pieces else None

    def whole_outs(self) -> list[Tensor]:
        """The kept attention outputs, in buffers that a pass has filled or where they never left the
        device."""
        if self.out_buffers is not None:
            return self.out_buffers
        return [saved.tensor() for saved in self.outs]
