"""Consecutive layers without attention run tile by tile through time, as a chain with one saved
input.

Such a layer is itself a mixer (mixers.py): a tile needs only its own tokens and the last states of
the tile before. So only the layer's input and output have whole rows.

    forward    layer by layer, each in tiles (time_tiles.py). Between layers there are hidden states
               of whole rows, which hooks and other code may read. The first layer of a chain saves
               its input. Every layer saves the first states of its tiles.
    backward   in the turn of the chain's last layer, tile by tile in reverse. A tile of the saved
               input runs through all layers of the chain under autograd, and its gradient
               overwrites dy.

The earlier layers of the chain then find their weights' gradients computed. They pass dy on
unchanged, because it is the gradient of the chain's input already. If such a layer's output has
another reader, that reader's gradient would be lost, so backward raises RuntimeError.
"""

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hfpatch.budget.policy import Policy
from hfpatch.compat import pytree, version
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.call import LayerCall
from hfpatch.layer.forward_state import ForwardState
from hfpatch.layer.mixers import Mixer
from hfpatch.layer.time_tiles import TimeTiles, chunk_of
from hfpatch.layer.time_trial import tokens_tried, why_not_here
from hfpatch.layer.traced import Traced
from hfpatch.layer.weight_gradients import WeightGradients
from hfpatch.layer.why_whole import has_hooks
from hfpatch.store.transfers import Saved

MOST_PIECES = 2  # packed documents may have at most this many times the tiles of whole rows


@dataclass
class LayerAsMixer(Mixer):
    """One call of a layer, as a Mixer. parts: the layer.traced.Traced of the call. unread: nothing
    reads the values of its output.
    """

    parts: Traced | None = None
    unread: bool = False

    @classmethod
    def of(cls, parts: Traced) -> "LayerAsMixer":
        given, batch = parts.arguments, parts.batch
        leaves, spec = pytree.tree_flatten(((None, *given.args), given.kwargs))
        axes = Arguments((None, *given.args), given.kwargs, given.B, given.T).axes
        return cls(
            parts.layer, leaves, spec, 0, axes, given.B, parts.configs, batch, batch.apart,
            parts=parts,
        )  # fmt: skip

    def _run(self, args, kwargs):
        return self.parts.run(args, kwargs, self.unread)


class ChainTiles(TimeTiles):
    """The tiles of a chain's backward. members: (TimeTiles, LayerAsMixer) of each layer, first to
    last. saved: the first layer's input.
    """

    def __init__(self, members: list[tuple[TimeTiles, LayerAsMixer]], saved: Saved):
        first, _ = members[0]
        super().__init__(first.argument, first.tile, first.transfers)
        self.members, self.saved, self.layers = members, saved, len(members)

    def _run(self, mixer, x: Tensor, piece: tuple, index: int, before: dict):
        after = {}
        for n, (time, member) in enumerate(self.members):
            own = {key: state for (of, key), state in before.items() if of == n}
            x, left = time._run(member, x, piece, index, own)
            after |= {(n, key): state for key, state in left.items()}
        return x, after

    def _fetch(self, index: int, pieces: list, _):
        """Prefetches tile `index`. Returns a function that waits and returns the tile of the saved
        input and the first states of all layers, or None for a negative index."""
        if index < 0:
            return None
        rows, a, b, _ = pieces[index]
        ticket = self.transfers.fetch([(self.saved, a, b, None)])
        states = [time.first_states(index) for time, _ in self.members]

        def found() -> tuple[Tensor, dict]:
            known = {
                (n, key): state for n, get in enumerate(states) for key, state in get().items()
            }
            return ticket.wait()[0][rows], known

        return found


@dataclass(eq=False, kw_only=True)
class TimedCall(LayerCall):
    """One call of a layer without attention, in tiles through time.

    Attributes:
        mixer: the layer as a mixer.
        time: the tiles of the layer.
        need_x: the layer's input needs a gradient.
        alone: the layer is a chain of its own.
        handed: (gradients of the layer's weights, a weak reference to the dy that must come, dy's
            version), set by the backward of the chain's last layer; else None.
    """

    mixer: LayerAsMixer
    time: TimeTiles
    need_x: bool = True
    alone: bool = False
    handed: tuple | None = field(default=None, repr=False)

    def joins(self, before: LayerCall) -> bool:
        """Whether this call continues the chain of the call before, so that its input need not be
        saved."""
        return (
            isinstance(before, TimedCall)
            and not (before.alone or self.alone)
            and before.policy == self.policy
            and before.position + 1 < self.policy.chain
            and before.parts.autocast == self.parts.autocast
            and before.time.pieces(before.mixer, self.shape[1])
            == self.time.pieces(self.mixer, self.shape[1])
        )

    def release(self) -> None:
        super().release()
        self.time.entries, self.mixer = [], None

    def forward(self, x_BTD: Tensor, where: str | None = "tier") -> list[Tensor]:
        saves = where is not None
        if saves and self.earlier is None:
            self.x = self.queue.transfers.save(x_BTD)
        self.time.transfers = self.queue.transfers if saves else None
        try:
            y = self.time.forward(self.mixer, x_BTD.detach())
        finally:
            if self.queue is not None:
                self.queue.transfers.settle(room=self.runtime.spare if saves else 0)
        if self.parts.autocast[0] is not None:
            torch.clear_autocast_cache()
        return [y]

    # -- backward ----------------------------------------------------------------------------------
    def prefetch(self) -> None:
        """Does nothing: backward prefetches its tiles itself."""

    def backward(self, dy_BTD: Tensor, private: bool, need_x: bool, retain: bool):
        if self.handed is not None:
            return self._hand_on(dy_BTD, retain)
        members, call = [self], self
        while call.earlier is not None:
            call = call.earlier
            members.insert(0, call)
        before = None if call.previous is None else call.previous()
        self.queue.begin()
        several = self.mixer.several(self.shape[1])
        dx = dy_BTD if private else dy_BTD.contiguous().clone()
        with ExitStack() as around:
            following = None if before is None else before.layer
            around.enter_context(self.runtime.weights.again(self.layer, following))
            around.enter_context(self._autocast())
            sums = [WeightGradients(member.then, several) for member in members]
            for member, weights in zip(members, sums):
                around.enter_context(weights)
                around.enter_context(member.parts.again(weights, several))
                member.mixer.unread = member is self
            tiles = ChainTiles([(m.time, m.mixer) for m in members], call.x)
            self.mixer.weights = sums
            tiles.backward(self.mixer, None, dx, dx if call.need_x else None)
            for weights in sums:
                weights.round()
        gradients = [weights.handed_over() for weights in sums]
        for member, grads in zip(members[:-1], gradients):
            member.handed = grads, weakref.ref(dx), version(dx)
        if before is not None and before.earlier is None:
            before.prefetch()
        if before is None and not self.queue.under_way:
            self.queue.drop_ring()
        if not retain:
            call.x.release()
            self.release()
        return dx, gradients[-1]

    def _hand_on(self, dy: Tensor, retain: bool) -> tuple:
        """dy, which is already the gradient of the chain's input, and this layer's gradients of
        weights."""
        (grads, expected, count), self.handed = self.handed, None
        if expected() is not dy or version(dy) != count:
            raise RuntimeError(
                f"hfpatch: the output of a {type(self.layer).__name__} must go to the next layer "
                "alone, and something else sends it a gradient. Pass "
                "checkpointing=hfpatch.Checkpointing(every=1), which keeps every layer's input."
            )
        if not retain:
            self.release()
        return dy, grads


def _why_not_here(parts: Traced, x_BTD: Tensor, runtime) -> str | None:
    """time_trial.why_not_here of the layer's mixer, with the mixer's input for the first tokens."""
    ((name, argument),) = parts.traits.timed
    module = parts.layer.get_submodule(name)

    def call():
        end, devices = min(x_BTD.shape[1], tokens_tried(module)), [x_BTD.device] * x_BTD.is_cuda
        with torch.no_grad(), torch.random.fork_rng(devices):
            given = parts.pre(x_BTD[:, :end].detach(), 0, end)
        return parts.mixers[0], given[-1]

    return why_not_here(module, argument, x_BTD, runtime, call)


def in_time(parts, policy: Policy, runtime, x: Tensor, then: ForwardState) -> dict | None:
    """The fields of a TimedCall if this call of a layer may be one, else None."""
    layer, carries = parts.layer, parts.traits.carries
    chosen = carries is not None and policy.chain > 0 and policy.every == 1
    if not chosen or parts.collected or parts.wanted or runtime.shards:
        return None
    if layer._hfpatch_streams is not None or parts.batch.sequence is not None:
        return None
    mixer = LayerAsMixer.of(parts)
    tile = policy.time_tile or policy.tile
    time = mixer.time = TimeTiles(carries, tile, rng=parts.rng if parts.random else None)
    B, T = x.shape[:2]
    short = len(time.pieces(mixer, T)) > MOST_PIECES * -(-B * T // tile) + B
    if short or tile < chunk_of(layer):
        return None  # documents make too many tiles, or a tile is shorter than the mixers' chunk
    if carries and time.cuts(mixer, T) and _why_not_here(parts, x, runtime) is not None:
        return None
    # An engine gathers one layer's weights at a time. A hook may add a reader of the output.
    alone = runtime.weights.on or then.gathered or has_hooks(layer)
    return {"mixer": mixer, "time": time, "need_x": x.requires_grad, "alone": alone}
