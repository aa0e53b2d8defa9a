"""One forward of a decoder layer in tiles, and all that its backward needs.

Only attention runs over whole rows, and its forward runs once if its outputs are kept:

    qkv  = [traced.before(x_t) for x_t in tiles of x]           q, k, v of all tokens
    outs = attention(qkv)                                       whole rows; frees qkv
    y    = [traced.after(x_t, out_t) for tiles of x and outs]

The backward (backward.py) needs the layer's input x, the attention outputs with their log-sum-exp,
and the tensors that the policy keeps (kept.py). They wait in the store (store/transfers.py).
`before` and `after` run the layer's own forward on a tile (traced.py).

B batch, T tokens, D hidden, H query heads, K key-value heads, E head dim; t tokens of a tile.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hfpatch.attention.heads import Attention
from hfpatch.budget.cuts import tile_bounds
from hfpatch.compat import autocast, autocast_dtype
from hfpatch.layer.backward import Backward
from hfpatch.layer.forward_state import ForwardState, as_in_forward
from hfpatch.layer.kept import Kept, write_tile
from hfpatch.layer.random_state import replayed
from hfpatch.layer.time_ranks import RankTiles
from hfpatch.layer.time_tiles import TimeTiles
from hfpatch.layer.traced import Traced
from hfpatch.layer.weight_gradients import WeightGradients


@dataclass(eq=False, kw_only=True)
class LayerCall(Kept):
    """One forward of one layer, and all that its backward needs."""

    layer: nn.Module
    runtime: object  # layer.runtime.LayerRuntime
    traced: Traced | None  # None once the last backward is over
    state: ForwardState  # the tensors and switches of this forward
    attention: Attention = field(default_factory=Attention)
    # The earlier calls of its segment (every > 1), of which the first alone keeps its input.
    segment: tuple["LayerCall", ...] = ()
    step: object = None  # the meter.Step that measures this call, or None
    below: object = None  # weak reference to the call of the layer below, whose backward is next

    def release(self) -> None:
        """Drops every saved tensor; the graph cannot be walked again."""
        self.x = None
        self.outs = []
        self.lses = []
        self.gates = []
        self.traced = self.attention = None

    @property
    def mixes(self) -> bool:
        return bool(self.traced.traits.mixing)

    # -- pieces ------------------------------------------------------------------------------------
    def _autocast(self):
        """Context with the autocast state of forward."""
        dtype = self.traced.autocast
        if dtype is None and autocast_dtype(self.device.type) is None:
            return nullcontext()
        return autocast(self.device.type, dtype)

    def attend(self, qkv: list[Tensor], rerun: bool = False):
        """Attention's outputs and log-sum-exps, over whole rows. rerun: its backward comes soon."""
        traced = self.traced
        if traced.mixers:
            self._go_in_time(rerun)
        with replayed(traced.rng, "attend", self.device):
            return self.attention.forward(traced.attention_options, traced.mixers, qkv)

    def _go_in_time(self, rerun: bool) -> None:
        """Sets Mixer.time on those mixers that can run in tiles through time. rerun: as in attend."""
        traced = self.traced
        timed = dict(traced.traits.timed)
        row_ranks = traced.batch.row_ranks
        transfers = None
        # self.x is None where no backward follows
        if self.queue is not None and (rerun or self.x and self.policy.saves_attention):
            transfers = self.queue.transfers
        for name, mixer in zip(traced.traits.mixers, traced.mixers):
            if name in timed and (rerun or mixer.time is None):
                given = timed[name], self.policy.tile, transfers, traced.rng
                mixer.time = RankTiles(row_ranks, *given) if row_ranks else TimeTiles(*given)

    def before(self, tiles) -> list[Tensor]:
        """q, k, v of whole rows, from an iterable of (bounds, x tile), without a graph."""
        whole = None
        for (a, b), x_t in tiles:
            parts = self.traced.before(x_t, a, b)
            if len(self.bounds) == 1:
                return parts
            whole = write_tile(whole, parts, a, b, self.bounds[-1][1])
            parts = x_t = None
        return whole

    def after(self, x_BTD: Tensor, outs: list, noting: bool) -> list[Tensor]:
        """y [B, T, D] and the recorded tensors [B, T, ...], computed tile by tile. noting: saves
        each tile's gate and up.
        """
        x_tiles = self.cut(x_BTD)
        out_iterators = list(map(self.cut, outs))  # of each output's tiles
        whole = None
        for a, b in self.bounds:
            noted: list | None = [] if noting else None
            # DTensor weights (tensor parallelism) accept no strided tile of a batch.
            outs_t = [next(tiles).contiguous() for tiles in out_iterators]
            results = self.traced.after(next(x_tiles), outs_t, a, b, noted=noted)
            if noting:
                transfers = self.queue.transfers
                self.gates.append(list(map(transfers.save, noted)))
                transfers.settle(recent=1, room=self.runtime.copy_room)
            del noted, outs_t
            if len(self.bounds) == 1:
                return results
            whole = write_tile(whole, results, a, b, x_BTD.shape[1])
            del results
        return whole

    # -- forward -----------------------------------------------------------------------------------
    def forward(self, x_BTD: Tensor, keeping: str | None = "policy") -> list[Tensor]:
        """y [B, T, D], then the recorded tensors [B, T, ...] and keys and values for later layers.

        keeping: "policy" saves what the policy says, in its tier; "on_device" keeps the input and
            attention's outputs on the device (the rerun of a segment); None saves nothing.
        """
        try:
            # A tile of x without a graph must not say that it requires a gradient.
            results = self.run_forward(x_BTD.detach(), keeping)
        finally:
            # Also after an out-of-memory error: a caller that catches it and retries gets the
            # memory back.
            if self.queue is not None:
                self.queue.transfers.settle(
                    room=self.runtime.copy_room if keeping == "policy" else 0
                )
        if self.traced.autocast is not None:
            # Casts made here carry no graph: a later use of the same weight must not find them.
            torch.clear_autocast_cache()
        return results

    def run_forward(self, x_BTD: Tensor, keeping: str | None) -> list[Tensor]:
        self.bounds = tile_bounds(*x_BTD.shape[:2], self.policy.tile)
        # Layers of a segment run again, so of them only the first one's input is kept.
        keeps_by_policy = keeping == "policy" and self.policy.every == 1
        # [Step 1] The input. In a segment the first layer alone keeps it.
        if keeping == "on_device":
            self.x = self.x or self.on_device(x_BTD)
        elif keeping == "policy" and not self.segment:
            own = x_BTD if self.shards is None else self.shards.mine(x_BTD, self.bounds)
            self.x = self.queue.transfers.save(own)
        # [Step 2] q, k, v of all tokens, then attention over whole rows.
        qkv = self.before(zip(self.bounds, self.cut(x_BTD)))
        outs, lses = self.attend(qkv, rerun=keeping == "on_device")
        left = []  # keys and values for later layers
        for pair in self.traced.left.values():
            left += [qkv[place] for place in pair]
        del qkv
        # [Step 3] Attention's outputs.
        if keeping == "on_device" or (keeps_by_policy and self.policy.saves_attention):
            save = self.on_device if keeping == "on_device" else self.queue.transfers.save
            self.outs = list(map(save, outs))
            self.lses = list(map(save, lses))
        del lses
        # [Step 4] The rest of the layer, tile by tile.
        whole = self.after(x_BTD, outs, noting=keeps_by_policy and self.keeps_gates)
        # Detached: later layers must not hold a graph of this call.
        return [*whole, *map(Tensor.detach, left)]

    # -- backward ----------------------------------------------------------------------------------
    def _materialise(self) -> None:
        """every > 1: runs the segment's layers up to this one again, and keeps what their backward
        needs.
        """
        transfers = self.queue.transfers
        calls = [*self.segment, self]
        bottom = calls[0]
        # [Step 1] The segment's input, from the store.
        x = self.fetch_whole([bottom.x]).wait()[0]
        # [Step 2] Each layer but this one runs again. Its input and attention's outputs stay on the
        # device until its own backward.
        with torch.no_grad(), self._autocast():
            for call, above in zip(calls, calls[1:]):
                if call is not bottom:
                    call.x = None
                streamed = self.runtime.weights.backward(call.layer, above.layer)
                with streamed, as_in_forward(call.state):
                    x = call.forward(x, keeping="on_device")[0]
        # [Step 3] The last output is this layer's input.
        self.x = self.on_device(x)
        transfers.settle()

    def backward(self, dy_BTD: Tensor, dextras: tuple, need_x: bool, retain: bool):
        """The layer's backward. Only a tile has a graph.

        Args:
            dy_BTD: the gradient of y [B, T, D].
            dextras: gradients of the recorded tensors [B, T, ...], then of the keys and values
                [B, T, K, E] that later layers took; None for unused ones.
            need_x: whether dx is wanted.
            retain: the graph stays for another pass.

        Returns:
            dx [B, T, D], or None.
            A list of gradients, each with the shape of its tensor, or None: of the arguments that
            require one, then of the trained tensors.
        """
        # [Step 1] The input, and the first tiles' fetches.
        queue = self.queue
        traced = self.traced
        queue.begin()
        if self.segment and self.x is None:
            self._materialise()
        self.begin_passes()
        # [Step 2] The layer whose backward comes next: its frozen weights are fetched meanwhile.
        below = None if self.below is None else self.below()
        next_layer = None if below is None else below.layer
        if below is not None and below.segment and below.x is None:
            next_layer = below.segment[0].layer  # its segment runs again from there
        streamed = self.runtime.weights.backward(self.layer, next_layer)
        # [Step 3] The passes over the tiles, in the state of the forward.
        many_tiles = len(self.bounds) > 1
        several = many_tiles or any(
            mixer.several(dy_BTD.shape[1]) for mixer in self.attention.mixers
        )
        gradients = WeightGradients(self.state, several)
        with (
            streamed,  # the layer's frozen weights are on the device
            self._autocast(),  # the tiles run in the dtypes of the forward
            gradients,  # the modules are as in the forward; sums the weights' gradients
            traced.for_backward(gradients, many_tiles) as darguments,  # sums arguments' gradients
        ):
            dx = self.run_backward(dy_BTD, dextras, need_x, gradients, below)
            gradients.round()
        # [Step 4] What no other pass needs is released.
        if not retain:
            self.release()
        self.out_buffers = None
        self.passes = []
        if below is None and not queue.under_way:
            queue.drop_ring()
        return dx, [*darguments, *gradients.handed_over()]

    def run_backward(self, dy_BTD: Tensor, dextras: tuple, need_x: bool, gradients, below):
        """dx or None. below: the call of the layer below, or None."""
        # The last ones are keys and values that later layers took.
        n = len(dextras) - sum(map(len, self.traced.left.values()))
        return Backward(self, need_x, gradients, dextras[:n], dextras[n:]).run(dy_BTD, below)
