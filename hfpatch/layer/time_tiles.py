"""A mixer (delta net, Mamba 2, short convolution) in tiles through time.

Forward runs tile by tile: each hands its last states to the next, and the states that a tile began
with are kept. Backward runs the tiles in reverse, each once more under autograd, and hands the
gradients of those states to the tile before. A document begins without states. Gradients are those
of whole rows; memory is that of one tile.

Which mixers can, decoder/time_probe.py finds out.
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hfpatch.compat import States, version
from hfpatch.layer.random_state import replayed
from hfpatch.store.transfers import Saved, Transfers

# The delta rule's chunk in transformers and in fla. Tiles that are no multiples of the chunk are
# exact too, but round otherwise than whole rows do: float32 2e-3 apart where 2e-6 is usual.
CHUNK = 64
SHORTEST = 2  # tokens: a single one with a past takes the kernels of generation
# Tiles whose first states may be on their way to the tier: enough for the copy of the layer's
# input, which began before them, to hide.
UNDER_WAY = 4


def chunk_of(module: nn.Module) -> int:
    """Tiles of this mixer are multiples of this many tokens."""
    own = (getattr(inner, "chunk_size", None) for inner in module.modules())
    return math.lcm(CHUNK, *(size for size in own if isinstance(size, int) and size > 0))


def cut_document(start: int, end: int, tile: int, past: int = 0) -> list[tuple[int, int]]:
    """(first, last) of a document's tiles, counted from its start; a neighbour takes what would be
    too short. past: so many tokens of a chunk came before, on another rank.
    """
    cuts = range(start + tile - past, end, tile)
    starts = [start, *(a for a in cuts if min(a - start, end - a) >= SHORTEST)]
    return list(zip(starts, [*starts[1:], end]))


class TimeTiles:
    """How one call of a mixer goes through time.

    Attributes:
        argument: the mixer's argument that takes its states, "" where it has none.
        tile: tokens a tile over all rows.
        transfers: where first states wait for backward; None where nobody will ask for them.
        here: they stay on the device, for backward comes next.
        rng: states of generators, by tile; None where nothing draws.
    """

    def __init__(
        self,
        argument: str,
        tile: int,
        transfers: Transfers | None = None,
        here: bool = False,
        rng: dict | None = None,
    ):
        self.argument, self.tile = argument, tile
        self.transfers, self.here, self.rng = transfers, here, rng
        self.entries: list[dict[tuple, tuple[Saved, int, torch.Size]]] = []

    def pieces(self, mixer, T: int) -> list[tuple[slice, int, int, bool]]:
        """(rows, first, last, whether a document begins) of each tile."""
        found = []
        for rows, start, end in mixer.documents(T):
            found += [(rows, a, b, a == start) for a, b in self._cut(mixer, rows, start, end)]
        return found

    def _cut(self, mixer, rows: slice, start: int, end: int, past: int = 0) -> list:
        chunk = chunk_of(mixer.module)
        tile = self.tile // (mixer.B if rows == slice(None) else 1) // chunk * chunk
        return cut_document(start, end, max(tile, chunk), past % chunk)

    def place(self, a: int) -> int:
        """Where a token of x stands in the rows that the batch describes."""
        return a

    def cuts(self, mixer, T: int) -> bool:
        """Whether some document is longer than a tile."""
        return not all(first for *_, first in self.pieces(mixer, T))

    def forward(self, mixer, x_BTD: Tensor) -> Tensor:
        pieces, out, states = self.pieces(mixer, x_BTD.shape[1]), None, {}
        self.entries = []
        rooms: dict = {}
        for index, (rows, a, b, begins) in enumerate(pieces):
            states = self._handed_on(states, index, begins)
            if self.transfers is not None:
                self._keep(states, len(pieces), rooms)
                self.transfers.settle(under_way=UNDER_WAY)
            y, states = self._run(mixer, x_BTD[rows, a:b], (rows, a, b), index, states)
            if out is None:
                out = y.new_empty(*x_BTD.shape[:2], *y.shape[2:])
            out[rows, a:b] = y
            del y
        self._handed_on(states, len(pieces), True)
        return out

    def backward(self, mixer, x_BTD: Tensor, dout_BTD: Tensor, into_BTD: Tensor) -> None:
        """The input's gradient into `into`, which may be x or dout, None where nobody wants it;
        weights get theirs by autograd.
        """
        pieces = self.pieces(mixer, dout_BTD.shape[1])
        dafter = self._handed_back({}, len(pieces))
        ahead = self._fetch(len(pieces) - 1, pieces, x_BTD)
        for index in range(len(pieces) - 1, -1, -1):
            rows, a, b, _ = pieces[index]
            (x, before), ahead = ahead(), self._fetch(index - 1, pieces, x_BTD)
            # other tiles are written beside it
            x = x.detach().clone().requires_grad_(into_BTD is not None)
            leaves = {key: state.detach().requires_grad_() for key, state in before.items()}
            with torch.enable_grad():
                out, after = self._run(mixer, x, (rows, a, b), index, leaves)
            ends = [(out, dout_BTD[rows, a:b].contiguous())]
            ends += [
                (after[key], d)
                for key, d in dafter.items()
                if d is not None and after[key].requires_grad
            ]
            torch.autograd.backward(*map(list, zip(*ends)))
            if into_BTD is not None:
                into_BTD[rows, a:b] = x.grad
            dafter = self._handed_back({key: leaf.grad for key, leaf in leaves.items()}, index)
            del x, leaves, out, after, ends, before

    def _run(self, mixer, x: Tensor, piece: tuple, index: int, before: dict):
        """(output, last states) of one tile."""
        states = States(before)
        drawing = nullcontext()
        if self.rng is not None:
            drawing = replayed(self.rng, (mixer.module, index), x.device)
        with drawing:
            return mixer.call(x, *piece, states), states.after

    def _handed_on(self, states: dict, index: int, begins: bool) -> dict:
        """What tile `index` begins with, where the tile before it left these states."""
        return {} if begins else states

    def _handed_back(self, dstates: dict, index: int) -> dict:
        """The gradients of what the tile before `index` left, where these are of what `index`
        began with.
        """
        return dstates

    # -- the states that tiles begin with ----------------------------------------------------------
    def _keep(self, states: dict, tiles: int, rooms: dict) -> None:
        """Keeps a tile's first states: the n-th of each kind in row n of one piece of the tier,
        for every piece of its own would be registered with CUDA.
        """
        kept, tier = {}, self.transfers
        for key, state in states.items():
            flat = state.detach().reshape(1, 1, -1)
            if self.here or tier.tier == "gpu":
                # what stays on the device must not hold more than itself
                larger = flat.untyped_storage().nbytes() > flat.numel() * flat.element_size()
                flat = flat.clone() if larger else flat
                saved = Saved(flat.shape, flat.dtype, kept=flat, version=version(flat))
                kept[key] = saved, 0, state.shape
                continue
            if key not in rooms:
                rooms[key] = tier.room((1, tiles, flat.shape[2]), flat.dtype)
            tier.put(rooms[key], len(self.entries), flat)
            kept[key] = rooms[key], len(self.entries), state.shape
        self.entries.append(kept)

    def _fetch(self, index: int, pieces: list, x_BTD: Tensor):
        """A function giving tile `index` of x, and the states that it begins with; None of none."""
        if index < 0:
            return None
        (rows, a, b, _), states = pieces[index], self.first_states(index)
        return lambda: (x_BTD[rows, a:b], states())

    def first_states(self, index: int):
        """A function giving the states of tile `index`, which are under way meanwhile."""
        entry = self.entries[index]
        if not entry:
            return dict
        ticket = self.transfers.fetch([(s, n, n + 1, None) for s, n, _ in entry.values()])

        def states() -> dict:
            shapes = (shape for *_, shape in entry.values())
            return {key: x.view(n) for key, x, n in zip(entry, ticket.wait(), shapes)}

        return states
