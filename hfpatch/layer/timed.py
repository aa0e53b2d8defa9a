"""A layer without attention, tile by tile through time. Also a layer that mixes no tokens at all.

Such a layer is itself a mixer (mixers.py): a tile needs only its own tokens and the last states of
the tile before, if there are states. So only its input and output have whole rows. The store keeps
its input and the first states of its tiles. Backward runs the tiles in reverse. Where `in_time`
declines a call, the layer runs as others do (call.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpatch.budget.policy import Checkpointing
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.call import LayerCall
from hfpatch.layer.mixers import Mixer
from hfpatch.layer.time_tiles import TimeTiles, chunk_of
from hfpatch.layer.traced import Traced
from hfpatch.store.transfers import Saved

MOST_PIECES = 2  # packed documents may have at most this many times the tiles of whole rows


@dataclass
class LayerAsMixer(Mixer):
    """One call of a layer, as a Mixer. traced: the layer.traced.Traced of the call. unread: nothing
    reads the values of its output.
    """

    traced: Traced | None = None
    unread: bool = False

    @classmethod
    def of(cls, traced: Traced) -> "LayerAsMixer":
        own = traced.arguments
        batch = traced.batch
        given = Arguments((None, *own.args), own.kwargs, own.B, own.T)
        return cls(
            traced.layer, given.leaves, given.spec, 0, given.axes, own.B, traced.configs, batch,
            batch.document_bounds, traced=traced,
        )  # fmt: skip

    def _run(self, args, kwargs):
        return self.traced.run(args, kwargs, self.unread)


@dataclass(eq=False)
class SavedTiles(TimeTiles):
    """TimeTiles of a layer whose input waits in the store. saved: the input."""

    saved: Saved | None = None

    def tile_of(self, x_BTD: None, rows: slice, a: int, b: int):
        ticket = self.transfers.fetch([(self.saved, a, b, None)])
        return lambda: ticket.wait()[0][rows]


@dataclass(eq=False, kw_only=True)
class TimedCall(LayerCall):
    """One call of a layer without attention. mixer: the layer as a mixer; time: its tiles."""

    mixer: LayerAsMixer
    time: SavedTiles

    def release(self) -> None:
        super().release()
        self.mixer = self.time = None

    def run_forward(self, x_BTD: Tensor, keeping: str | None) -> list[Tensor]:
        if keeping is not None:
            self.time.transfers = self.queue.transfers
            self.x = self.time.saved = self.queue.transfers.save(x_BTD)
        pieces = self.time.pieces(self.mixer, x_BTD.shape[1])
        self.bounds = tuple((a, b) for _, a, b, _ in pieces)
        return [self.time.forward(self.mixer, x_BTD)]

    def prefetch(self) -> None:
        """Does nothing: backward prefetches its tiles itself."""

    begin_passes = prefetch

    def run_backward(self, dy_BTD: Tensor, dextras: tuple, need_x: bool, gradients, below):
        self.mixer.gradients = [gradients]
        self.mixer.unread = True
        dx = torch.empty_like(dy_BTD, memory_format=torch.contiguous_format) if need_x else None
        self.time.backward(self.mixer, None, dy_BTD, dx)
        if below is not None:
            below.prefetch()
        return dx


def in_time(traced, policy: Checkpointing, runtime, x: Tensor) -> dict:
    """The fields of a TimedCall if this call of a layer may be one, else an empty dict."""
    layer = traced.layer
    if policy.every > 1 or traced.records is not None or traced.arguments.wanted or runtime.shards:
        return {}
    if layer._hfpatch.streams is not None or traced.batch.row_ranks is not None:
        return {}
    mixer = LayerAsMixer.of(traced)
    time = mixer.time = SavedTiles(traced.traits.carries, policy.tile, rng=traced.rng)
    B, T = x.shape[:2]
    most = MOST_PIECES * -(-B * T // policy.tile) + B
    if len(time.pieces(mixer, T)) > most or policy.tile < chunk_of(layer):
        return {}  # documents make too many tiles, or a tile is shorter than the mixers' chunk
    return {"mixer": mixer, "time": time}
