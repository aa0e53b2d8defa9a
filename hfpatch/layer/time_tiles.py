"""A mixer (delta net, Mamba 2, short convolution) in tiles through time.

Forward runs tile by tile. Each tile passes its last states to the next tile, and each tile's first
states are saved. Backward runs the tiles again in reverse order under autograd, and passes the
gradients of a tile's first states to the tile before. A document begins without states. Gradients
are those of whole rows; memory is that of one tile.

decoder/time_probe.py finds the mixers that can run this way.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfpatch.compat import States
from hfpatch.layer.graph_bytes import tile_graph
from hfpatch.layer.random_state import replayed
from hfpatch.layer.weight_gradients import walk
from hfpatch.store.transfers import Saved, Transfers

# The delta rule's chunk in transformers and in fla. Tiles that are not multiples of the chunk are
# exact too, but round differently from whole rows: float32 differs by 2e-3 where 2e-6 is usual.
CHUNK = 64
SHORTEST = 2  # tokens: a single token with states takes the kernels of generation
# How many tiles' first states may be on their way to the offload tier at once. The copy of the
# layer's input began before them, and this many tiles hide it.
UNDER_WAY = 4


def chunk_of(module: nn.Module) -> int:
    """The number of tokens of which this mixer's tiles are multiples."""
    own = (getattr(inner, "chunk_size", None) for inner in module.modules())
    return math.lcm(CHUNK, *(size for size in own if isinstance(size, int) and size > 0))


def cut_document(start: int, end: int, tile: int, past: int = 0) -> list[tuple[int, int]]:
    """(first, last) of each tile of the document from start to end. A tile that would be too short
    joins its neighbour. past: tokens of the first chunk that another rank has.
    """
    cuts = range(start + tile - past, end, tile)
    starts = [start, *(a for a in cuts if min(a - start, end - a) >= SHORTEST)]
    return list(zip(starts, [*starts[1:], end]))


@dataclass(eq=False)
class TimeTiles:
    """The tiles of one call of a mixer.

    Attributes:
        argument: the mixer's argument that takes states, "" if it has none.
        tile: tokens a tile, summed over rows.
        transfers: saves the first states of tiles for backward; None if no backward follows.
        rng: the generators' states of each tile; None if the mixer draws no random numbers.
        entries: the saved first states of each tile.
    """

    argument: str
    tile: int
    transfers: Transfers | None = None
    rng: dict | None = None
    entries: list[dict[tuple, tuple[Saved, int, torch.Size]]] = field(default_factory=list)

    def pieces(self, mixer, T: int) -> list[tuple[slice, int, int, bool]]:
        """(rows, first, last, whether a document begins) of each tile."""
        found = []
        for rows, start, end in mixer.documents(T):
            found += [(rows, a, b, a == start) for a, b in self._cut(mixer, rows, start, end)]
        return found

    def _cut(self, mixer, rows: slice, start: int, end: int, past: int = 0) -> list:
        chunk = chunk_of(mixer.module)
        tile = self.tile // (mixer.B if rows == slice(None) else 1)
        return cut_document(start, end, max(chunk, tile // chunk * chunk), past % chunk)

    def place(self, a: int) -> int:
        """The index, in the batch's rows, of token `a` of x."""
        return a

    def is_cut(self, mixer, T: int) -> bool:
        """Whether some document is longer than a tile."""
        return not all(first for *_, first in self.pieces(mixer, T))

    def forward(self, mixer, x_BTD: Tensor) -> Tensor:
        pieces = self.pieces(mixer, x_BTD.shape[1])
        self.entries = []
        buffers: dict = {}
        states: dict = {}
        out = None
        for index, (rows, a, b, begins) in enumerate(pieces):
            states = self._handed_on(states, index, begins)
            if self.transfers is not None:
                self._keep(states, len(pieces), buffers)
                self.transfers.settle(recent=UNDER_WAY)
            y, states = self._run(mixer, x_BTD[rows, a:b], (rows, a, b), index, states)
            if out is None:
                out = y.new_empty(*x_BTD.shape[:2], *y.shape[2:])
            out[rows, a:b] = y
            del y
        self._handed_on(states, len(pieces), True)
        return out

    def backward(self, mixer, x_BTD: Tensor, dout_BTD: Tensor, into_BTD: Tensor) -> None:
        """Writes the input's gradient to into_BTD, which may be x_BTD or dout_BTD, or None if
        nothing wants it. The weights' gradients are added to those in `mixer.gradients`.
        """
        pieces = self.pieces(mixer, dout_BTD.shape[1])
        dafter = self._handed_back({}, len(pieces))
        ahead = self._fetch(len(pieces) - 1, pieces, x_BTD)
        for index in range(len(pieces) - 1, -1, -1):
            rows, a, b, _ = pieces[index]
            x, before = ahead()
            ahead = self._fetch(index - 1, pieces, x_BTD)
            # The gradients of other tiles may be written into x_BTD, so the tile is copied.
            x = x.detach().clone().requires_grad_(into_BTD is not None)
            leaves = {key: state.detach().requires_grad_() for key, state in before.items()}
            built = tile_graph("time", x)
            with torch.enable_grad():
                out, after = self._run(mixer, x, (rows, a, b), index, leaves)
            ys = [out, *(after[key] for key in dafter)]
            built(ys)
            dys = [dout_BTD[rows, a:b].contiguous(), *dafter.values()]
            *dbefore, dx = walk(mixer.gradients, ys, dys, [*leaves.values(), x])
            if into_BTD is not None:
                into_BTD[rows, a:b] = dx
            dafter = self._handed_back(dict(zip(leaves, dbefore)), index)
            del x, leaves, out, after, ys, dys, before, dbefore, dx

    def _run(self, mixer, x: Tensor, piece: tuple, index: int, before: dict):
        """(output, last states) of one tile."""
        states = States(before)
        with replayed(self.rng, (mixer.module, index), x.device):
            return mixer.call(x, *piece, states), states.after

    def _handed_on(self, states: dict, index: int, begins: bool) -> dict:
        """The first states of tile `index`, given the last states of the tile before."""
        return {} if begins else states

    def _handed_back(self, dstates: dict, index: int) -> dict:
        """The gradients of the last states of the tile before `index`, given those of the first
        states of `index`.
        """
        return dstates

    # -- the first states of tiles -----------------------------------------------------------------
    def _keep(self, states: dict, tiles: int, buffers: dict) -> None:
        """Saves a tile's first states. All tiles share one buffer of the offload tier for each kind
        of state, and tile n uses row n: each buffer has to be registered with CUDA.
        """
        kept = {}
        index = len(self.entries)
        for key, state in states.items():
            flat = state.detach().reshape(1, 1, -1)
            if self.transfers.tier == "gpu":
                kept[key] = (self.transfers.save(flat), 0, state.shape)
                continue
            if key not in buffers:
                buffers[key] = self.transfers.reserve((1, tiles, flat.shape[2]), flat.dtype)
            self.transfers.put(buffers[key], index, flat)
            kept[key] = (buffers[key], index, state.shape)
        self.entries.append(kept)

    def _fetch(self, index: int, pieces: list, x_BTD: Tensor):
        """Prefetches tile `index`. Returns a function that waits and returns the tile of x and its
        first states, or None for a negative index."""
        if index < 0:
            return None
        rows, a, b, _ = pieces[index]
        tile = self.tile_of(x_BTD, rows, a, b)
        entry = self.entries[index]
        ticket = self.transfers.fetch([(s, n, n + 1, None) for s, n, _ in entry.values()])

        def fetched() -> tuple[Tensor, dict]:
            states = zip(entry.items(), ticket.wait())
            return tile(), {key: flat.view(shape) for (key, (*_, shape)), flat in states}

        return fetched

    def tile_of(self, x_BTD: Tensor, rows: slice, a: int, b: int):
        """A function that returns a tile of x."""
        return lambda: x_BTD[rows, a:b]
