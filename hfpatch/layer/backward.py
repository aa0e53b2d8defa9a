"""The backward of one layer's call, in four phases over its tiles.

    A  after_backward    each tile: reruns `after` under autograd (or by hand); dy gives the tile's
                         dx and dout, which go into whole buffers
    B  before_again      recomputes q, k, v tile by tile, without a graph
    C  attend_backward   attention backward over whole rows, per group of KV heads if memory is
                         short; dq overwrites q, dk overwrites k, dv overwrites v; with one group
                         the kernel's own results replace them, and q, k, v are freed
    D  before_backward   each tile: reruns `before` with its graph; dq, dk, dv give the rest of dx

Tensors in memory, besides those that the forward kept (kept.py):

          x           dx           dout      q, k, v               out          lse
    A     by tiles    written      written   -                     by tiles     in flight
    B     by tiles    whole        whole     written               (waits)      in flight
    C     -           whole        whole     become dq, dk, dv     whole        whole
    D     by tiles    added to     -         dq, dk, dv            -            -

x is fetched in A, B and D: not in A if "mid" is kept, not in B if "qkv" is. Attention outputs in
the store fill whole buffers, tile by tile, in A. dx uses dy's memory if nothing else refers to it (privacy.py).

Kept values are not recomputed: q, k and v replace B; the residual after attention ("mid") replaces
the projection before it, and x in A. If attention's outputs were not kept, B comes first, then the
attention forward. With a single tile x stays from the first phase to the last. Unless q, k and v
were kept, B then comes before A, and the graph that B builds serves D.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(eq=False)
class Backward:
    """One backward of a call, from its gradient dy. The phases share its attributes.

    Attributes:
        call: layer.call.LayerCall.
        need_x: whether dx is needed.
        weights: layer.weight_gradients.WeightGradients.
        retain: whether another backward of the same call may come.
        stays: single tile: the item of its only pass, for all phases.
        qkv: q, k, v, later overwritten by their gradients.
        outs: attention's outputs, if recomputed.
        back: single tile: function from the gradients of q, k, v to dx.
    """

    call: object
    need_x: bool
    weights: object
    retain: bool
    stays: list | None = None
    dx: Tensor | None = None
    qkv: list | None = None
    outs: list | None = None
    lses: list | None = None
    douts: list | None = None
    dsinks: list | None = None
    back: object = None

    def run(self, dy: Tensor, private: bool, next_call) -> Tensor | None:
        """Runs the phases. Returns dx or None. next_call: the call whose backward is next; its
        first tiles are prefetched.
        """
        call = self.call
        self.single, self.passes = len(call.bounds) == 1, iter(call.passes)
        self.lse_ticket, self.qkv_ticket = call.ticket(call.lses), call.ticket(call.qkv)
        if next_call is not None and next_call.earlier is None:
            next_call.prefetch()  # queued behind this call's fetches
        if self.single:
            held = call.tiles(next(self.passes))
            self.stays = [next(held)]
        if call.mixes and (not call.outs or self.single and self.qkv_ticket is None):
            self.before_again()
        if call.mixes and not call.outs:
            self.outs, self.lses = call.attend(self.qkv, again=True)
            if not self.single:
                call.queue.transfers.settle()
        self.after_backward(dy, private)
        if call.mixes:
            if self.qkv is None:
                self.before_again()
            self.attend_backward()
            self.before_backward()
        if self.single:
            next(held, None)  # frees its slot
        return self.dx

    def _tiles(self):
        """(index, x, outs, kept values) of each tile of the next pass."""
        if self.single:
            return self.stays
        return self.call.parts.phase(self.call.tiles(next(self.passes)))

    # -- A -----------------------------------------------------------------------------------------
    def after_backward(self, dy: Tensor, private: bool) -> None:
        call, parts, need_x, dx = self.call, self.call.parts, self.need_x, None
        if need_x and not self.single:
            dx = dy if private else torch.empty_like(dy, memory_format=torch.contiguous_format)
        dy_tiles = list(map(call.cut, (dy, *call.dextras)))
        for index, x_t, out_t, known in self._tiles():
            a, b = call.bounds[index]
            x_t = known["mid"][0] if x_t is None else x_t
            if self.outs is not None:
                out_t = self.outs if self.single else [o[:, a:b] for o in self.outs]
            out_t = call.attention.join(out_t)
            dys = list(map(next, dy_tiles))
            dx_t, douts_t = parts.after_backward(x_t, out_t, a, b, dys, known, need_x, self.weights)
            if self.single:
                self.dx, self.douts = dx_t, douts_t
                return
            if need_x:
                dx[:, a:b] = dx_t
            if self.douts is None:
                self.douts = self._whole_douts(douts_t)
            for dout, dout_t in zip(self.douts, douts_t):
                dout[:, a:b] = dout_t
            x_t = out_t = dys = dx_t = douts_t = dout_t = dout = None
        self.dx = dx
        self.weights.round()

    def _whole_douts(self, douts: list[Tensor]) -> list:
        call, tokens = self.call, self.call.bounds[-1][1]
        rows = zip(douts, call.attention.counts())
        return [call.attention.room(d, tokens, n) for d, n in rows]

    # -- B -----------------------------------------------------------------------------------------
    def before_again(self) -> None:
        """q, k, v: kept, or recomputed."""
        call = self.call
        if self.qkv_ticket is not None:
            parts = list(self.qkv_ticket.wait())
            if not self.single and (self.retain or call.parts.leaves) and call.qkv[0].resident:
                parts = [p.clone() for p in parts]  # their gradients overwrite them
            self.qkv = parts
        elif not self.single:
            tiles = call.tiles(next(self.passes))
            self.qkv = call.before((i, x_t) for i, x_t, _, _ in tiles)
        else:
            x, (a, b) = self.stays[0][1], call.bounds[0]
            parts, self.back = call.parts.before_again(
                x, a, b, self.need_x, self.weights, unread=False
            )
            self.qkv = []
            for part in parts:  # the graph must not see its outputs overwritten by the gradients
                self.qkv.append(part.detach().contiguous())

    # -- C -----------------------------------------------------------------------------------------
    def attend_backward(self) -> None:
        call, qkv, parts = self.call, self.qkv, self.call.parts
        if self.lse_ticket is not None:
            self.lses = self.lse_ticket.wait()
        if self.single:
            outs = (self.stays[0][2] if self.outs is None else self.outs).__getitem__
            # Only fetched tensors may be overwritten.
            fetched = self.qkv_ticket is not None and not call.qkv[0].resident
            into = qkv if fetched else [None] * len(qkv)
        else:
            outs, into = call.whole_outs(self.outs), qkv
        lses = list(self.lses or [])
        run = partial(call.attention.backward, qkv, self.douts, outs, lses, into)
        for mixer in call.attention.mixers:
            mixer.weights = [self.weights]
        mixes = bool(parts.mixers)
        self.dsinks = parts.replayed("attend", 0, call.device, run) if mixes else run()
        for place, d in zip(parts.places, call.dleft):
            if d is not None:  # gradients of keys and values that later layers took
                into[place] = into[place] + d
        self.qkv, self.douts, self.outs, self.lses = into, None, None, None
        if not self.single:
            call.out_buffers = None

    # -- D -----------------------------------------------------------------------------------------
    def before_backward(self) -> None:
        call, parts = self.call, self.call.parts
        dx, grads = self.dx, list(map(call.cut, self.qkv))
        for index, x_t, _, _ in self._tiles():
            a, b = call.bounds[index]
            back = self.back
            if back is None:
                back = parts.before_again(x_t, a, b, self.need_x, self.weights, unread=True)[1]
            dx_t = back(list(map(next, grads)), self.dsinks if index == 0 else None)
            if self.single:
                self.dx = dx_t if dx is None else dx if dx_t is None else dx.add_(dx_t)
            elif dx_t is not None:
                dx[:, a:b].add_(dx_t)
            del x_t, back, dx_t
