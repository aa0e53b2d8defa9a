"""A mixer in tiles through time where several ranks share a row's tokens.

Each rank runs the tiles of its own chunk (time_tiles.py). A chunk's first tile begins with the last
states of the chunk before: the recurrent state and the convolution's last tokens. The rank of that
chunk sends them, and backward sends their gradients the other way. A document that does not cross
the border between two chunks sends nothing. So results equal those of one process with the same
tiles, under any rule. Traffic is a few states a layer, however long the row.

    rank 0   tiles, send    | MLP, next mixer, send ...
    rank 1   wait, receive    tiles, send    | MLP ...
    rank 2   wait ..........  receive          tiles, send

A rank waits for the ranks before it once between two layers with attention: from then on they are
one mixer ahead. A rule whose last state is an affine map of its first, M S + H, would not need the
wait. Each rank would run from no state, all would gather M and H, and each would run again from its
own first state. In tiles this costs the projections and the rule once more in forward, the whole
mixer once more in backward, and code for each rule. On four ranks this costs as much as the wait,
on more ranks less.

With zigzag chunks a rank has two chunks, and states pass each rank twice: up the ranks through the
first chunks, then down through the second chunks. There ranks wait in each mixer.
"""

from collections import deque
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hfpatch.compat import States, autocast_dtype
from hfpatch.layer.time_tiles import SHORTEST, TimeTiles, chunk_of

_left_by: WeakKeyDictionary = WeakKeyDictionary()  # mixer -> its last states' names and shapes


class RankTiles(TimeTiles):
    """TimeTiles of this rank's part of shared rows.

    Attributes:
        row_ranks: the parallel.exchange.RowRanks that share the rows.
        froms: tile index -> the rank that sends the tile's first states, for tiles that continue
            another chunk.
        tos: tile index -> the rank that receives the last states of the tile before this index.
        states: (key, shape, dtype) of each state of a tile.
        own: states that this rank passes to itself, between its two chunks.
    """

    def __init__(self, row_ranks, *args):
        super().__init__(*args)
        self.row_ranks = row_ranks
        self.froms: dict[int, int] = {}
        self.tos: dict[int, int] = {}
        self.states: list[tuple] = []
        self.own: deque[Tensor] = deque()

    def pieces(self, mixer, t: int) -> list[tuple[slice, int, int, bool]]:
        """The tiles as in TimeTiles.pieces, chunk by chunk, of this rank's t tokens."""
        found: list = []
        for chunk, first, last in self.row_ranks.chunks(t):
            begin = chunk * (last - first)
            end = begin + last - first
            for rows, start, stop in mixer.documents(t * self.row_ranks.size):
                if start >= end or stop <= begin:
                    continue
                if start < begin:
                    self.froms[len(found)] = self.row_ranks.owner(chunk - 1)
                a = max(start, begin)
                here = first - begin  # the tokens of this rank, in its own count
                cuts = self._cut(mixer, rows, a + here, min(stop, end) + here, a - start)
                found += [(rows, x, y, x - here == start) for x, y in cuts]
                if stop > end:
                    self.tos[len(found)] = self.row_ranks.owner(chunk + 1)
        return found

    def is_cut(self, mixer, t: int) -> bool:
        """Always true: documents may begin or end on other ranks."""
        return True

    def place(self, a: int) -> int:
        for chunk, first, last in self.row_ranks.chunks(self.tokens):
            if first <= a < last:
                return a - first + chunk * (last - first)

    def forward(self, mixer, x_BtD: Tensor) -> Tensor:
        self.tokens = x_BtD.shape[1]
        self.device = x_BtD.device
        rows = slice(None) if mixer.bounds is None else slice(0, 1)
        self.states = _states_of(mixer, x_BtD, rows)
        return super().forward(mixer, x_BtD)

    def _run(self, mixer, x: Tensor, piece: tuple, index: int, before: dict):
        rows, a, b = piece
        if before and b - a < SHORTEST:
            # The document ends with this token, so nothing reads what a second one changes.
            two = torch.cat([x, x.detach()], 1)
            out, _ = super()._run(mixer, two, (rows, a, b + 1), index, before)
            return out[:, :1], {}
        return super()._run(mixer, x, piece, index, before)

    # -- between ranks -----------------------------------------------------------------------------
    def _handed_on(self, states: dict, index: int, begins: bool) -> dict:
        if index in self.tos:
            self._send(states, self.tos[index])
        if index in self.froms:
            return self._received(self.froms[index])
        return super()._handed_on(states, index, begins)

    def _handed_back(self, dstates: dict, index: int) -> dict:
        if index in self.froms:
            self._send(dstates, self.froms[index])
            dstates = {}
        return self._received(self.tos[index]) if index in self.tos else dstates

    def _send(self, states: dict, rank: int) -> None:
        for key, shape, dtype in self.states:
            x = states[key]
            if x is None:
                x = torch.zeros(shape, dtype=dtype, device=self.device)
            if rank == self.row_ranks.rank:
                self.own.append(x)
            else:
                self.row_ranks.send(x, rank)

    def _received(self, rank: int) -> dict:
        found = {}
        for key, shape, dtype in self.states:
            if rank == self.row_ranks.rank:
                found[key] = self.own.popleft()
            else:
                buffer = torch.empty(shape, dtype=dtype, device=self.device)
                found[key] = self.row_ranks.receive(buffer, rank)
        return found


def _states_of(mixer, x_BtD: Tensor, rows: slice) -> list[tuple]:
    """(key, shape, dtype) of each last state of a tile of these rows. A rank must know them before
    it receives, so the first tokens run once to find them.
    """
    x = x_BtD[rows, : chunk_of(mixer.module)]
    key = len(x), x.device, x.dtype, autocast_dtype(x.device.type)
    layouts = _left_by.setdefault(mixer.module, {})
    if key not in layouts:
        left = States()
        with torch.no_grad(), torch.random.fork_rng([x.device] * x.is_cuda):
            mixer.call(x, rows, 0, x.shape[1], left)
        layouts[key] = [(name, state.shape, state.dtype) for name, state in left.after.items()]
    return layouts[key]
