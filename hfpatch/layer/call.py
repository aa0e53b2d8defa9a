"""A decoder layer as one autograd function (tiled.py): tile by tile everywhere but in attention,
whose forward never runs twice.

Forward keeps the layer's input x, the attention outputs and their log-sum-exp (and what else the
policy says: kept.py), and hands them to `offload.py`. Backward:

    A  for each tile: post(x, out) again under autograd; dx over the incoming gradient, dout into
    one buffer B  q, k, v again, tile by tile C  attention backward, per group of KV heads where
    memory is short; dq over q, dk over k, dv over v D  for each tile: pre(x) again under autograd
    with dq, dk, dv; dx finished

x is fetched once a phase and is not resident in C. With a single tile x stays, and the graph that B
builds serves D. What is kept is not computed: q, k and v make B needless, the sum after attention
the projection before it, and x in A. Where the device is short, what has heads lies in the tier
instead, and B to D see a group of it or a tile (groups.py). `pre` and `post` are asked of the
layer's own forward (layer/parts.py, `LayerParts`); it may call attention more than once.

B batch, T tokens, D hidden, H query heads, K key-value heads, E head dim; t tokens of a tile.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.attention.head_groups import Grouped
from hfpatch.attention.heads import Attention, groups_of
from hfpatch.budget.cuts import tile_bounds
from hfpatch.compat import autocast, autocast_dtype, backward_from
from hfpatch.layer.kept import Kept
from hfpatch.layer.random_state import replayed
from hfpatch.layer.time_tiles import go_in_time
from hfpatch.layer.weight_gradients import AsInForward, AsThen, WeightGradients
from hfpatch.store.transfers import Saved


@dataclass(eq=False, kw_only=True)
class LayerCall(Kept):
    """One forward of one layer, and all that its backward needs."""

    layer: nn.Module
    session: "object"
    ask: "object"  # layer.parts.LayerParts: pre and post of a tile
    then: AsThen  # what it computes with
    random: bool  # whether something in the layer draws random numbers
    private: tuple = ()
    attention: Attention = field(default_factory=Attention)
    dextras: tuple = ()  # gradients of what was recorded
    dleft: tuple = ()  # and of what went to later layers
    shape: tuple = ()
    dtype: torch.dtype | None = None
    rng: dict = field(default_factory=dict)
    # The call before in the same segment, of which only the first keeps its input (every > 1).
    earlier: "LayerCall | None" = None
    position: int = 0  # in its segment
    # as the policy says, where that can be: q, k, v, out and their gradients wait in the tier
    by_group: bool = False
    previous: object = lambda: None  # weak reference to the call before, whose backward comes next

    def __post_init__(self):
        self.autocast = autocast_dtype(self.device.type), torch.is_autocast_cache_enabled()

    def release(self) -> None:
        super().release()
        self.ask.let_go()
        self.attention = Attention()

    # -- pieces ------------------------------------------------------------------------------------
    def _autocast(self):
        dtype, cache = self.autocast
        if dtype is None and autocast_dtype(self.device.type) is None:
            return nullcontext()
        return autocast(
            self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=cache
        )

    def _random(self, phase: str, index: int, run):
        """run(). Records the generators' state before a tile in forward; brings it back when the
        tile is run again.
        """
        if not self.random:
            return run()
        with replayed(self.rng, (phase, index), self.device):
            return run()

    def _pre(self, x_BtD: Tensor, index: int, dead: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k and v [B, t, K, E] of every attention call, then the mixers' inputs [B,
        t, D].

        dead: nobody reads their values, only their graph.
        """
        if self.ask.direct is not None:
            return self.ask.direct.pre(x_BtD, *self.bounds[index])
        # Detached: a view taken without a graph says that it wants a gradient, and has none.
        x_BtD = x_BtD if torch.is_grad_enabled() else x_BtD.detach()
        parts = self._random(
            "pre", index, partial(self.ask.pre, x_BtD, *self.bounds[index], dead=dead)
        )
        # a mixer casts its input itself, autocast leaves float64
        dtype, n = self.autocast[0], 3 * len(self.ask.asked)
        cast = lambda x: x if dtype is None or x.dtype == torch.float64 else x.to(dtype)  # noqa: E731
        return [*map(cast, parts[:n]), *parts[n:]]

    def _attend(self, parts: list[Tensor], again: bool = False):
        if self.ask.mixers:
            go_in_time(self, again)
        forward = partial(
            self.attention.forward, self.ask.asked, self.ask.mixers, parts, keep=again
        )
        return self._random("attend", 0, forward)

    def _attend_backward(self, parts, douts, outs, lses, into) -> list:
        return self._random(
            "attend", 0, partial(self.attention.backward, parts, douts, outs, lses, into)
        )

    def _post(self, x_BtD: Tensor, outs_BtGE: list[Tensor], index: int, grad: bool, **kept):
        """post() over the tile's attention outputs, as attention gave them: [y, what was
        recorded...] and the joined outs.

        kept: what is `known` inside the tile, or to be `noted`.
        """
        if self.ask.direct is not None:
            return [self.ask.direct.post(x_BtD, *self.attention.join(outs_BtGE), **kept)], []
        # DTensor weights (tensor parallelism) take no strided tile of a batch.
        joined = [out.contiguous() for out in self.attention.join(outs_BtGE)]
        if grad:
            joined = [out.detach().requires_grad_(True) for out in joined]
        post = partial(
            self.ask.post,
            x_BtD if grad else x_BtD.detach(),
            joined,
            *self.bounds[index],
            dead=grad,
            **kept,
        )
        return self._random("post", index, post), joined

    def _qkv(self, tiles):
        """q, k, v whole, from an iterable of (index, x tile), without a graph."""
        whole = None
        for index, x_t in self.ask.phase(tiles):
            parts = self._pre(x_t, index)
            if len(self.bounds) == 1:
                return parts
            if whole is None:
                whole = self._whole_parts(parts)
            a, b = self.bounds[index]
            for buffer, part in zip(whole, parts):
                buffer[:, a:b] = part
            parts = part = x_t = None
        if self.by_group:
            self.transfers.settle()
        return whole

    def _whole_parts(self, parts: list[Tensor]) -> list:
        """Room for what these are tiles of: on the device or, by groups of heads, in the tier."""
        tokens = self.bounds[-1][1]
        if not self.by_group:
            return [p.new_empty(p.shape[0], tokens, *p.shape[2:]) for p in parts]
        found = []
        for q, k, v in zip(parts[::3], parts[1::3], parts[2::3]):
            n = len(groups_of(q.shape[0], tokens, q.shape[2], k.shape[2]))
            found += [Grouped(self.transfers, p, tokens, n) for p in (q, k, v)]
        return found

    def _whole_douts(self, douts: list[Tensor]) -> list:
        tokens = self.bounds[-1][1]
        if not self.by_group:
            return [
                self.attention.room(d, tokens, n) for d, n in zip(douts, self.attention.counts())
            ]
        return [
            Grouped(self.transfers, d, tokens, n) for d, n in zip(douts, self.attention.counts())
        ]

    # -- forward -----------------------------------------------------------------------------------
    def forward(self, x_BTD: Tensor, where: str | None = "tier") -> list[Tensor]:
        """y [B, T, D] and, behind it, what was recorded on the way [B, T, ...].

        where: "tier" saves by the policy, "again" keeps inputs and attention outputs for now (a
        segment run again), None nothing.
        """
        B, T, _ = x_BTD.shape
        self.bounds = tile_bounds(B, T, self.policy.tile)
        plain = (
            type(self.attention) is Attention
            and not self.ask.answers.mixers
            and self.ask.cache is None
        )
        plain = plain and not self.ask.leaves
        self.by_group = (
            self.policy.by_group and self.queue is not None and len(self.bounds) > 1 and plain
        )
        if where == "again":
            self.x = self.x or self._for_now(x_BTD)
        elif where == "tier" and self.earlier is None:
            whole = self.shards is None
            self.x = self.transfers.save(x_BTD if whole else self.shards.mine(x_BTD, self.bounds))
        alone = where == "tier" and self.policy.every == 1
        inside, room = self.keep_inside if alone else (), 0
        try:
            parts = self._qkv(enumerate(self.cut(x_BTD)))
            self.ask.store(parts)
            if alone and "qkv" in self.keep:
                self.qkv = [self.save(p) for p in parts]  # attention hides these copies
            outs, lses = self._attend(parts)
            # its own graph's outputs are not what is kept
            left = [parts[i].detach() for i in self.ask.places_left()]
            del parts
            if where == "again" or (alone and self.policy.save_attention):
                save = self.transfers.save if where == "tier" else self._for_now
                self.outs, self.lses = (
                    [o.saved if self.by_group else save(o) for o in outs],
                    [save(s) for s in lses],
                )
            del lses
            if self.by_group:
                self.transfers.settle()
            # The layer's own x, q, k, v, out and lse live until its end anyway.
            within = self.session.spare + self.transfers.unsettled_bytes if inside else 0
            whole, x_tiles, out_tiles = None, self.cut(x_BTD), [self.cut(o) for o in outs]
            for index, (a, b) in self.ask.phase(enumerate(self.bounds)):
                noted = dict.fromkeys(inside)
                tiles = self._post(
                    next(x_tiles), [next(o) for o in out_tiles], index, grad=False, noted=noted
                )[0]
                if inside:
                    self.save_inside(noted, within)
                del noted
                if len(self.bounds) == 1:
                    whole = tiles
                    break
                if whole is None:
                    whole = [t.new_empty(B, T, *t.shape[2:]) for t in tiles]
                for out, tile in zip(whole, tiles):
                    out[:, a:b] = tile
                del tiles, tile
            # the next layer hides what is left of the copies
            room = self.session.spare if alone else 0
        finally:
            # Also where memory ran out: a caller who catches that and tries again gets it back.
            if self.queue is not None:
                self.transfers.settle(room=room)
        if self.autocast[0] is not None:
            # Casts made here carry no graph: a later use of the same weight must not find them.
            torch.clear_autocast_cache()
        return [*whole, *left]

    # -- backward ----------------------------------------------------------------------------------
    def _materialise(self) -> None:
        """every > 1: runs the segment's layers again up to this one, keeping what their backward
        will want.
        """
        calls, call = [], self.earlier
        while call is not None:
            calls.append(call)
            call = call.earlier
        base = calls[-1]
        x = self.transfers.fetch([(base.x, 0, base.x.shape[1], None)]).wait()[0]
        with torch.no_grad(), self._autocast():
            for call, then in zip(reversed(calls), [*reversed(calls[:-1]), self]):
                if call is not base:
                    call.x = None
                with self.session.weights.again(call.layer, then.layer), AsInForward(call.then):
                    x = call.forward(x, where="again")[0]
        self.x = self._for_now(x)
        self.transfers.settle()
        if not self.x.resident:
            # Ring slots, last used before x went to the tier, would be filled while it is on its
            # way there.
            self.transfers.device.wait(self.transfers.device.mark(), self.transfers.to_device)

    def _for_now(self, x: Tensor) -> Saved:
        """x of a segment that runs again: on the device where that has room."""
        return self.transfers.save(x) if self.by_group else self.on_device(x)

    @property
    def first_again(self) -> "LayerCall":
        """Which call runs first when this one's backward begins: the first of its segment, where
        that is to run again.
        """
        call = self
        while self.x is None and call.earlier is not None:
            call = call.earlier
        return call

    def backward(self, dy_BTD: Tensor, private: bool, need_x: bool, retain: bool):
        """(dx or None, gradients of the arguments that want one and of what is trained). Without a
        graph, but for a tile's own.

        private: dy may be overwritten; retain: the graph stays for another pass.
        """
        if self.gone:
            raise RuntimeError(
                "hfpatch: expected one backward through this graph, came to it a second time; "
                "pass retain_graph=True to the first backward."
            )
        queue = self.queue
        queue.begin()
        if self.earlier is not None and self.x is None:
            self._materialise()
        self.begin_passes()
        before = self.previous()
        streamed = self.session.weights.again(
            self.layer, None if before is None else before.first_again.layer
        )
        several = len(self.bounds) > 1 or any(
            mixer.several(self.shape[1]) for mixer in self.attention.mixers
        )
        weights = WeightGradients(self.then, several=several, by_hand=self.ask.direct is not None)
        self.ask.adds_up(weights.adding if len(self.bounds) > 1 else None)
        try:
            with streamed, self._autocast(), weights, self.ask.arguments.gradients() as darguments:
                run = self._backward_tiles if len(self.bounds) > 1 else self._backward_one
                dx = run(dy_BTD, private, need_x, weights, retain, before)
                weights.round()
        finally:  # also where memory ran out: the graph may outlive that, and would keep the sums
            self.ask.adds_up(None)
        if not retain:
            self.release()
        self.out_buffers, self.passes = None, []
        if before is None and not queue.under_way:
            queue.drop_ring()
        return dx, [*darguments, *weights.handed_over()]

    def _tickets(self, before: "LayerCall | None") -> tuple:
        """This layer's lse and its q, k, v on their way, and behind them the first tiles of the
        layer whose turn is next.
        """
        tickets = self.ticket(self.lses), self.ticket(self.qkv)
        if before is not None and before.earlier is None:
            before.prefetch()
        return tickets

    def _post_back(
        self, x, outs, index: int, dys: list, need_x: bool, known: dict, weights
    ) -> tuple:
        """(dx of a tile or None, the gradients of its attention outputs), from those of what `post`
        gives.
        """
        if self.ask.direct is not None:
            dx, dout = self.ask.direct.post_back(
                x, *self.attention.join(outs), dys[0], known, weights
            )
            return dx if need_x else None, [dout]
        x = x.detach().requires_grad_(need_x)
        with torch.enable_grad():
            tiles, leaves = self._post(x, outs, index, grad=True, known=known)
        known.clear()
        self._walk(tiles, dys)
        # Nothing comes back through a product without a derivative (torchao's of int8 activations).
        return x.grad, [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
        ]

    def _pre_again(self, x, index: int, need_x: bool, weights, dead: bool) -> tuple:
        """(q, k, v of a tile, a function that gives dx of it or None from their gradients). dead:
        nobody reads q, k, v.
        """
        direct = self.ask.direct
        if direct is not None:
            kept: list = []
            parts = direct.pre(x, *self.bounds[index], kept, dead)
            return parts, lambda grads, dsinks: direct.pre_back(
                x, *self.bounds[index], kept, grads, need_x, weights
            )
        x = x.detach().requires_grad_(need_x)
        with torch.enable_grad():
            parts = self._pre(x, index, dead)

        def back(grads, dsinks):
            """dsinks: with the first tile, of the sinks, which are there once."""
            sinks = [] if dsinks is None else [asked.sinks_H for asked in self.ask.asked]
            self._walk([*parts, *sinks], [*grads, *(dsinks or [])])
            return x.grad

        return parts, back

    def _walk(self, outputs, grads) -> None:
        """Backward from those outputs that have a gradient and want one."""
        pairs = [(y, dy) for y, dy in zip(outputs, grads) if dy is not None and y.requires_grad]
        if self.ask.looked.contiguous:  # a tile of several rows is not
            pairs = [(y, dy.contiguous()) for y, dy in pairs]
        if pairs:
            backward_from(*zip(*pairs))

    def _backward_one(self, dy, private, need_x, weights, retain, before):
        """All four phases on one tile: x is fetched once and, where q, k, v are not kept, one graph
        of `pre` serves B and D.
        """
        lse_ticket, qkv_ticket = self._tickets(before)
        for _, x, outs, known in self.tiles(self.passes[0]):
            parts, back, values, lses = [], None, None, None
            if not qkv_ticket:
                parts, back = self._pre_again(x, 0, need_x, weights, dead=False)
                # The graph must not see its outputs overwritten by the gradients.
                values = [p.detach().contiguous() for p in parts]
            del parts
            if not outs:
                values = list(qkv_ticket.wait()) if values is None else values
                outs, lses = self._attend(values, again=True)
            dx, douts = self._post_back(x, outs, 0, [dy, *self.dextras], need_x, known, weights)
            # `post` hides these copies.
            values = list(qkv_ticket.wait()) if values is None else values
            lses = lse_ticket.wait() if lse_ticket else lses
            fresh = values if qkv_ticket and not self.qkv[0].resident else [None] * len(values)
            dsinks = self._attend_backward(values, douts, outs.__getitem__, list(lses or []), fresh)
            self._add_of_later_layers(fresh)
            del douts, outs, values
            back = back or self._pre_again(x, 0, need_x, weights, dead=True)[1]
            part = back(fresh, dsinks)
        return part if dx is None else dx if part is None else dx.add_(part)

    def _backward_tiles(self, dy, private, need_x, weights, retain, before):
        lse_ticket, qkv_ticket = self._tickets(before)
        parts, outs, lses, passes = None, None, None, iter(self.passes)
        if self.mixes and not self.outs:
            # The attention outputs were not saved: B first, then attention again.
            parts = self._kept_qkv(qkv_ticket, retain) or self._again(next(passes))
            outs, lses = self._attend(parts, again=True)
            self.transfers.settle()

        # A
        dx = None
        if need_x:
            dx = dy if private else torch.empty_like(dy, memory_format=torch.contiguous_format)
        douts, dy_tiles = (
            None,
            [None if d is None else self.cut(d) for d in (dy, *self.dextras)],
        )
        for index, x_t, out_t, known in self.ask.phase(self.tiles(next(passes))):
            a, b = self.bounds[index]
            x_t, out_t = (
                known["mid"][0] if x_t is None else x_t,
                out_t if outs is None else [o[:, a:b] for o in outs],
            )
            dys = [None if d is None else next(d) for d in dy_tiles]
            dx_t, douts_t = self._post_back(x_t, out_t, index, dys, need_x, known, weights)
            if need_x:
                dx[:, a:b] = dx_t
            if douts is None:
                douts = self._whole_douts(douts_t)
            for dout, dout_t in zip(douts, douts_t):
                dout[:, a:b] = dout_t
            x_t = out_t = dys = dx_t = douts_t = dout_t = dout = None
        dy_tiles = None
        parked = None
        if self.policy.park and need_x and self.mixes:
            parked, dx = self._park(dx), None
        elif not need_x and private:
            # A layer without dx (the first of a frozen embedding) would hold dy where others have
            # parked dx: 4.61 GiB without this, 4.58 GiB with it (as in `_park`, mostly frozen).
            dy.data = dy.new_empty(0)
        weights.round()
        if not self.mixes:
            return dx

        if self.by_group:
            self.transfers.settle()
        if parts is None:
            parts = self._kept_qkv(qkv_ticket, retain) or self._again(next(passes))
        if lses is None:
            lses = list(lse_ticket.wait()) if lse_ticket else []
        dsinks = self._attend_backward(parts, douts, self.whole_outs(outs), lses, parts)
        self._add_of_later_layers(parts)
        del douts, outs
        self.out_buffers = None
        if self.by_group:
            self.transfers.settle()

        # D
        if parked is not None:
            dx = torch.empty(parked.shape, dtype=parked.dtype, device=self.device)
            tile_of_dx = _one_ahead(
                lambda i: self.transfers.fetch([(parked, *self.bounds[i], None)]), len(self.bounds)
            )
        grads = [self.cut(g) for g in parts]
        for index, x_t, _, _ in self.ask.phase(self.tiles(next(passes))):
            a, b = self.bounds[index]
            if parked is not None:
                dx[:, a:b] = tile_of_dx(index)
            back = self._pre_again(x_t, index, need_x, weights, dead=True)[1]
            dx_t = back([next(g) for g in grads], dsinks if index == 0 else None)
            if dx_t is not None:
                dx[:, a:b].add_(dx_t)
            del x_t, back, dx_t
        return dx

    def _add_of_later_layers(self, dparts: list[Tensor]) -> None:
        """Gradients of keys and values that later layers took, onto those of q, k, v."""
        for place, d in zip(self.ask.places_left(), self.dleft):
            if d is not None:
                dparts[place] = dparts[place] + d

    def _again(self, names) -> list[Tensor]:
        """q, k, v computed once more."""
        return self._qkv((i, x_t) for i, x_t, _, _ in self.tiles(names))

    def _kept_qkv(self, ticket, retain: bool) -> list[Tensor] | None:
        """q, k, v as they were kept, to be overwritten by their gradients; None where they were
        not.
        """
        if ticket is None:
            return None
        parts = list(ticket.wait())
        return (
            [p.clone() for p in parts]
            if (retain or self.ask.leaves) and self.qkv[0].resident
            else parts
        )

    def _park(self, dx: Tensor) -> Saved:
        """dx in the tier while attention runs backward."""
        parked = self.transfers.save(dx)
        self.transfers.settle()
        # dx may be dy, which autograd's and the callers' frames still hold: this frees its memory.
        # Llama-3.1-8B in bf16 at 131,072 tokens, tiles of 2,048, dx parked, attention outputs
        # streamed: 3.61 GiB beyond parameters and gradients at the highest total, 4.61 GiB without
        # (simulated).
        dx.data = dx.new_empty(0)
        return parked


def _one_ahead(fetch, count: int):
    """A function giving what the i-th ticket brings, i going up from 0, while the next is under
    way.
    """
    tickets = {0: fetch(0)}

    def take(i):
        if i + 1 < count:
            tickets[i + 1] = fetch(i + 1)
        return tickets.pop(i).wait()[0]

    return take
