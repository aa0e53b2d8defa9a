"""The backward of one layer's call, in four phases over its tiles.

    A  phase_a_after       each tile: reruns `after` under autograd; dy gives the tile's dx and
                           dout, which go into whole buffers
    B  phase_b_qkv         recomputes q, k, v tile by tile, without a graph
    C  phase_c_attention   attention backward over whole rows, per group of KV heads if memory is
                           short; dq overwrites q, dk overwrites k, dv overwrites v; with one group
                           the kernel's own results replace them, and q, k, v are freed
    D  phase_d_before      each tile: reruns `before` with its graph; dq, dk, dv give the rest of
                           dx

There are three orders, a method each. Where nothing mixes tokens, A runs alone:

    one_tile     B A C D   x stays throughout, and the graph that B builds serves D
    outs_kept    A B C D   attention's outputs are there, from the forward or a segment's rerun
    outs_again   B A C D   attention runs forward again after B

Tensors in memory, besides those that the forward kept (kept.py), under outs_kept:

          x           dx           dout      q, k, v               out          lse
    A     by tiles    written      written   -                     by tiles     in flight
    B     by tiles    whole        whole     written               (waits)      in flight
    C     -           whole        whole     become dq, dk, dv     whole        whole
    D     by tiles    added to     -         dq, dk, dv            -            -

x is fetched in A, B and D (kept.PASSES). Attention outputs in the store fill whole buffers, tile by
tile, in A. dx has memory of its own: autograd, a hook or a caller may hold dy.
Short of memory, dx waits on the host during C (Checkpointing.parks_dx).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.layer.kept import write_tile
from hfpatch.layer.random_state import replayed


@dataclass(eq=False)
class Backward:
    """One backward of a call, from its gradient dy. The phases share its attributes.

    Attributes:
        call: layer.call.LayerCall.
        need_x: whether dx is needed.
        weights: layer.weight_gradients.WeightGradients.
        recorded: gradients of the recorded tensors; left: of keys and values that later layers
            took.
        parked: dx in the store, during attention's backward.
        passes: the fetches of each pass over the tiles; lse_ticket: of the log-sum-exps, or None.
        qkv, lses, douts: of attention, until its backward.
    """

    call: object
    need_x: bool
    weights: object
    recorded: tuple = ()
    left: tuple = ()
    passes: Iterator = field(init=False)
    lse_ticket: object = None
    dx: Tensor | None = None
    parked: list = field(default_factory=list)
    qkv: list | None = None
    lses: list | None = None
    douts: list | None = None

    def run(self, dy: Tensor, below) -> Tensor | None:
        """Runs the phases. Returns dx or None. below: the call of the layer below, or None. Its
        backward is next, so its first tiles are prefetched.
        """
        call = self.call
        self.passes = iter(call.passes)
        self.lse_ticket = call.fetch_whole(call.lses)
        if below is not None and not below.segment:
            below.prefetch()  # queued behind this call's fetches
        getattr(self, call.order)(dy)
        return self.dx

    # -- the orders --------------------------------------------------------------------------------
    def one_tile(self, dy: Tensor) -> None:
        call = self.call
        traced = call.traced
        held = call.tiles(next(self.passes))
        (a, b), x, outs, gates = next(held)
        # B
        qkv, back = traced.before_with_graph(x, a, b, self.need_x, self.weights, unread=False)
        # the graph must not see its outputs overwritten by the gradients
        self.qkv = [part.detach().contiguous() for part in qkv]
        if not call.outs:
            outs, self.lses = call.attend(self.qkv, rerun=True)
            call.queue.transfers.settle()  # C fetches mixers' states that this saved
        # A
        dys = [dy, *self.recorded]
        self.dx, self.douts = traced.after_with_graph(
            x, outs, a, b, dys, gates, self.need_x, self.weights
        )
        del x, dys
        # C
        dqkv, dsinks = self.phase_c_attention(outs, [None] * len(self.qkv))
        del outs
        # D
        dx = back(dqkv, dsinks)
        if dx is not None:
            # Not in place: where the layer returns x + f(x), this is dy itself, the caller's.
            self.dx = dx if self.dx is None else self.dx + dx
        next(held, None)  # frees its slot

    def outs_kept(self, dy: Tensor) -> None:
        self.phase_a_after(dy)
        self.phase_b_qkv()
        self.phase_d_before(*self.phase_c_attention(self.call.whole_outs(), self.qkv))

    def outs_again(self, dy: Tensor) -> None:
        self.phase_b_qkv()
        outs, self.lses = self.call.attend(self.qkv, rerun=True)
        self.call.queue.transfers.settle()
        self.phase_a_after(dy, outs)
        self.phase_d_before(*self.phase_c_attention(outs, self.qkv))

    # -- A -----------------------------------------------------------------------------------------
    def phase_a_after(self, dy: Tensor, outs: list[Tensor] | None = None) -> None:
        """outs: attention's outputs, if recomputed."""
        call = self.call
        traced = call.traced
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if self.need_x else None
        dy_tiles = list(map(call.cut, (dy, *self.recorded)))
        for (a, b), x_t, out_t, gates in call.tiles(next(self.passes)):
            if outs is not None:
                out_t = [o[:, a:b] for o in outs]
            dys = list(map(next, dy_tiles))
            dx_t, douts_t = traced.after_with_graph(
                x_t, out_t, a, b, dys, gates, self.need_x, self.weights
            )
            if self.need_x:
                dx[:, a:b] = dx_t
            self.douts = write_tile(self.douts, douts_t, a, b, call.bounds[-1][1])
            x_t = out_t = dys = dx_t = douts_t = None
        if self.need_x and call.mixes and call.policy.parks_dx:
            self.parked = [call.queue.transfers.save(dx)]
            call.queue.transfers.settle()
            dx = None
        self.dx = dx
        self.weights.round()

    # -- B -----------------------------------------------------------------------------------------
    def phase_b_qkv(self) -> None:
        tiles = self.call.tiles(next(self.passes))
        self.qkv = self.call.before((bounds, x_t) for bounds, x_t, *_ in tiles)

    # -- C -----------------------------------------------------------------------------------------
    def phase_c_attention(self, outs: list[Tensor], dqkv: list) -> tuple[list, list]:
        """The gradients of q, k, v, and of the sinks.

        outs: the attention outputs. Attention takes them from the list, so that each is freed
            after its use.
        dqkv: the tensors to which the gradients are written (q, k, v themselves), or None for new
            ones.
        """
        call = self.call
        traced = call.traced
        if self.lse_ticket is not None:
            self.lses = self.lse_ticket.wait()
        lses = list(self.lses or [])
        for mixer in call.attention.mixers:
            mixer.gradients = [self.weights]
        with replayed(traced.rng, "attend", call.device):
            dsinks = call.attention.backward(self.qkv, self.douts, lambda: outs.pop(0), lses, dqkv)
        left = iter(self.left)
        for pair in traced.left.values():
            for place in pair:
                d = next(left)
                if d is not None:  # gradients of keys and values that later layers took
                    dqkv[place] = dqkv[place] + d
        self.qkv = self.douts = self.lses = None
        if len(call.bounds) > 1:
            call.out_buffers = None
        return dqkv, dsinks

    # -- D -----------------------------------------------------------------------------------------
    def phase_d_before(self, dqkv: list[Tensor], dsinks: list) -> None:
        call = self.call
        traced = call.traced
        for saved in self.parked:
            self.dx = torch.empty(saved.shape, dtype=saved.dtype, device=call.device)
            call.queue.transfers.fetch([(saved, 0, saved.shape[1], self.dx)]).wait()
        grads = list(map(call.cut, dqkv))
        for (a, b), x_t, *_ in call.tiles(next(self.passes)):
            _, back = traced.before_with_graph(x_t, a, b, self.need_x, self.weights, unread=True)
            dx_t = back(list(map(next, grads)), dsinks if a == 0 else None)
            if dx_t is not None:
                self.dx[:, a:b].add_(dx_t)
            del x_t, back, dx_t
