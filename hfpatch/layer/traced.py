"""The two parts of a layer by its own forward on a tile of tokens: up to attention, and after it.

No family has code in this file. The common block calls its modules without the layer's own forward
(layer/block.py), with the same bits.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import backward_from, collecting, modules_in
from hfpatch.context.current import Answering, Call, Noting, Stopped, asking, our_attention
from hfpatch.layer import adapted_experts
from hfpatch.layer.arguments import Arguments, has_other_values
from hfpatch.layer.block import Block
from hfpatch.layer.dequantized import DequantizedWeights
from hfpatch.layer.mixers import Mixer, standing_in
from hfpatch.layer.parts import keepable, sources_of
from hfpatch.layer.random_state import replayed
from hfpatch.layer.shared_keys import NAME as SHARED_KEYS
from hfpatch.layer.shared_keys import SharedKeys, left_by
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts import experts
from hfpatch.parts.keeping import keeping
from hfpatch.parts.unread import add_up, idle, without_values

_TENSOR = object()


@dataclass
class Traced:
    """layer.parts.LayerParts of one call of any layer.

    asked: scale, pattern and sinks of each attention call, as of the last `pre`; mixers: modules
    that run over whole rows; beside: the layer's further return values, with _TENSOR for tensors,
    or None if it returns only its output; records: keys of what else transformers records inside
    the layer (router logits).
    """

    layer: nn.Module
    arguments: Arguments
    traits: LayerTraits
    configs: tuple
    batch: object
    forward: object = None  # the layer's own, if it is not a TiledLayer yet
    asked: list[Call] = field(default_factory=list)
    mixers: list[Mixer] = field(default_factory=list)
    beside: tuple | None = None
    records: tuple[str, ...] = ()
    collected: bool = True  # whether transformers records anything in this forward
    recorded: list = field(default_factory=list)  # (key, dimensions) of each recorded tensor
    # (names, adding) -> replaced forwards (_idle). Looked up once a call: a layer has many tiles.
    found_idle: dict = field(default_factory=dict)
    block: Block | None = None
    modules: list = field(default_factory=list)  # the layer and its submodules, found once a call
    # layer.condition.Condition, as long as it holds
    condition: object = None
    # whether something in the layer draws random numbers; before the call: whether adapters may
    random: bool = False
    rng: dict = field(default_factory=dict)  # generator states, by phase and tile
    # dense weights of a phase, if the policy has them
    dequantized: DequantizedWeights | None = None
    read: tuple = ()  # keys of earlier layers' entries that the last `pre` read
    left: dict = field(
        default_factory=dict
    )  # entries for later layers: key -> indices of k and v in the result of `pre`
    # keys and values that the current run reads, and those that it writes for later layers
    shared: SharedKeys | None = None
    leaves: bool = False  # whether this layer writes entries for later ones
    # WeightGradients.adding, in a backward over several tiles; None if autograd collects the
    # weights' gradients
    adding: object = None
    autocast: tuple = (None, True)  # its dtype in forward, and whether it cached casts

    by_hand = False

    def __post_init__(self):
        self.is_block = self.traits.block and not has_other_values(
            self.arguments.args, self.arguments.kwargs
        )

    # -- one run of a part -------------------------------------------------------------------------
    def _answered(self, role):
        names = self.traits.mixers
        return (
            standing_in(self.layer, names, role.mixer, self.traits.paired)
            if names
            else nullcontext()
        )

    def _forward(self, x_BtD: Tensor, a: int, b: int):
        args, kwargs = self.arguments.tile(a, b)
        self.shared = kwargs.get(SHARED_KEYS)
        with our_attention(self.configs, self.batch):
            return (self.forward or self.layer.stock_forward)(x_BtD, *args, **kwargs)

    def pre(self, x_BtD: Tensor, a: int, b: int, unread: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k [B, t, K, E], v [B, t, K, E_v] of each attention call, then each
        mixer's input [B, t, D].

        unread: skips the values of LayerTraits.unread_pre. NotStopped if the forward runs past its
        attention.
        """
        if not self.traits.mixing:
            return []
        # An argument's gradient may read any value. It goes to the tile's stand-in for the
        # argument.
        wanted = self.arguments.wanted()
        unread = unread and not wanted
        run = self._pre if wanted or not self.is_block else self._block().pre
        nobody_reads = self._idle(
            self.traits.unread_pre if unread else (), x_BtD.device.type, unread
        )
        if not nobody_reads:
            return run(x_BtD, a, b)
        with without_values(nobody_reads):
            return run(x_BtD, a, b)

    def _pre(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        note = Noting(len(self.traits.mixing))
        try:
            # `post` runs this code too and records there (JetMoE's router of heads).
            with (
                collecting({}) if self.collected else nullcontext(),
                asking(note),
                self._answered(note),
            ):
                self._forward(x_BtD, a, b)
        except Stopped:
            pass
        else:
            raise note.not_stopped()
        self.asked = [c.call() for c in note.calls]
        if self.shared is not None:
            self.read, self.left = tuple(self.shared.read), left_by(self.shared.written, note.calls)
        parts = [x.transpose(1, 2) for c in note.calls for x in (c.q_BHTE, c.k_BKTE, c.v_BKTE)]
        if note.mixed:
            named = [
                (self.layer.get_submodule(name), *note.mixed[name]) for name in self.traits.mixers
            ]
            mixed = [self.arguments.mixer(*call, self.configs, self.batch) for call in named]
            self.mixers = [mixer for mixer, _ in mixed]
            parts += [x for _, x in mixed]
        return parts

    def _idle(self, names: tuple[str, ...], device: str, again: bool) -> list:
        """(module, forward) pairs for `without_values`: unread Linears and other temporary
        forwards. Cached per call: a layer has many tiles. again: for a backward, with weight
        gradients going to `adding`.
        """
        adding = self.adding if again else None
        key = names, adding
        if key not in self.found_idle:
            written = self.dequantized
            weight_of = getattr if written is None else written.weight_of
            dense = {} if written is None else {"dense_of": written.dense_of}
            dense |= {"weight_of": weight_of, "adding": adding, "filled": self.random}
            found = idle(self.layer, names, device, **dense) if names else []
            found += [] if written is None else written.forwards(found)
            found += add_up(self.layer, found, device, adding) if adding else []
            known, taken = self.condition, {id(m) for m, _ in found}
            fused, wrappers = (
                known.experts if known else adapted_experts.fused_in(modules_in(self.layer))
            )
            if fused:
                mine = [m for m in fused if id(m) not in taken]
                found += experts.pairs(mine, adding=adding, weight_of=weight_of)
                found += adapted_experts.pairs(wrappers)
            self.found_idle[key] = found
        return self.found_idle[key]

    def post(
        self,
        x_BtD: Tensor,
        outs_BtHE: list[Tensor],
        a: int,
        b: int,
        unread: bool = False,
        noted=None,
        known=None,
    ) -> list[Tensor]:
        """The layer's output for a tile of its input and of the attention outputs [B, t, H, E_v],
        one per call.

        The recorded tensors follow, then other tensors that the layer returns, each as [B, t, ...].
        noted, known: as in parts.keeping, by names from `keepable`. unread: skips the values of
        LayerTraits.unread_post. Values that only lead to known ones are skipped too.
        """
        kept = [keeping(noted or {}, known or {})] if noted or known else []
        found = {key: [] for key in self.records}
        names = (
            self.traits.unread_post
            if unread and not self.arguments.wanted()
            else self.traits.unread_always
        )
        if known:
            sources = sources_of(self.layer, replace(self.traits, block=self.is_block))
            names = (*names, *(module for name in known for module in sources[name]))
        nobody_reads = self._idle(names, x_BtD.device.type, unread)
        around = [without_values(nobody_reads)] if nobody_reads else []
        around += [collecting(found), *kept] if self.collected else kept
        if self.is_block:
            run = partial(self._block().post, x_BtD, *outs_BtHE)
        else:
            run = partial(self._post, x_BtD, outs_BtHE, a, b)
        y = _within(around, run)
        self.beside = (
            None
            if isinstance(y, Tensor)
            else tuple(_TENSOR if isinstance(x, Tensor) else x for x in y[1:])
        )
        self.recorded = [(key, x.dim()) for key, xs in found.items() for x in xs]
        extras = [_by_rows(x, x_BtD) for xs in found.values() for x in xs]
        return (
            [y, *extras]
            if self.beside is None
            else [y[0], *extras, *(x for x in y[1:] if isinstance(x, Tensor))]
        )

    def _post(self, x_BtD: Tensor, outs_BtHE: list[Tensor], a: int, b: int):
        n = len(self.traits.attention)
        role = Answering(outs_BtHE[:n], dict(zip(self.traits.mixers, outs_BtHE[n:])))
        with asking(role), self._answered(role):
            return self._forward(x_BtD, a, b)

    def run(self, args: tuple, kwargs: dict, unread: bool):
        """The layer's return value for a tile, with the mixers' states among these arguments.
        unread: a backward follows, and the values are unread. What the output of `post` never
        depends on is read by the mixers here.
        """
        before = self.traits.unread_always
        names = tuple(n for n in self.traits.unread_post if unread and n not in before)
        nobody_reads = self._idle(names, args[0].device.type, True)
        with without_values(nobody_reads) if nobody_reads else nullcontext():
            y = (self.forward or self.layer.stock_forward)(*args, **kwargs)
        self.beside = None if isinstance(y, Tensor) else y[1:]
        return y

    def _block(self) -> Block:
        if self.block is None:
            known = self.condition
            found = Block(self.layer) if known is None or known.block is None else known.block
            if known is not None:
                known.block = found
            self.block = found.of_call(self.arguments.kwargs)
            self.asked = [self.block.asked]
        return self.block

    # -- LayerParts --------------------------------------------------------------------------------
    @property
    def wanted(self) -> list[Tensor]:
        """The arguments that require a gradient."""
        return self.arguments.wanted()

    def keepable(self, names, device: str) -> tuple[str, ...]:
        """The names in budget.policy.KEEPABLE that spare this layer work."""
        return keepable(self.layer, replace(self.traits, block=self.is_block), names, device)

    @property
    def places(self) -> list[int]:
        """Indices, in the result of `pre`, of all keys and values for later layers."""
        return [i for places in self.left.values() for i in places]

    def phase(self, tiles):
        """The tiles of one pass, over which weights are dequantized once."""
        return tiles if self.dequantized is None else self.dequantized.phase(tiles)

    def replayed(self, phase: str, start: int, device: torch.device, run):
        """run(), for the tile at `start`. A forward saves the generators' state, a rerun restores
        it.
        """
        if not self.random:
            return run()
        with replayed(self.rng, (phase, start), device):
            return run()

    def before(self, x_BtD: Tensor, a: int, b: int, unread: bool = False) -> list[Tensor]:
        # Detached: a view made without a graph still says requires_grad, but has no grad_fn.
        x_BtD = x_BtD if torch.is_grad_enabled() else x_BtD.detach()
        parts = self.replayed(
            "before", a, x_BtD.device, partial(self.pre, x_BtD, a, b, unread=unread)
        )
        # mixers cast their input themselves, and autocast leaves float64
        dtype = self.autocast[0]
        if dtype is None:
            return parts
        n = 3 * len(self.asked)
        return [x if x.dtype == torch.float64 else x.to(dtype) for x in parts[:n]] + parts[n:]

    def after(self, x_BtD: Tensor, outs_BtHE: list[Tensor], a: int, b: int, noted=None):
        # DTensor weights (tensor parallelism) accept no strided tile of a batch.
        outs = [out.contiguous() for out in outs_BtHE]
        run = partial(self.post, x_BtD.detach(), outs, a, b, noted=noted)
        return self.replayed("after", a, x_BtD.device, run)

    def after_backward(self, x, outs_BtHE, a: int, b: int, dys, known: dict, need_x: bool, weights):
        x = x.detach().requires_grad_(need_x)
        leaves = [out.contiguous().detach().requires_grad_(True) for out in outs_BtHE]
        with torch.enable_grad():
            run = partial(self.post, x, leaves, a, b, unread=True, known=known)
            tiles = self.replayed("after", a, x.device, run)
        known.clear()
        self._walk(tiles, dys)
        # A product without a derivative gives no gradient (torchao's of int8 activations).
        return x.grad, [torch.zeros_like(y) if y.grad is None else y.grad for y in leaves]

    def before_again(self, x, a: int, b: int, need_x: bool, weights, unread: bool):
        x = x.detach().requires_grad_(need_x)
        with torch.enable_grad():
            parts = self.before(x, a, b, unread)

        def back(grads, dsinks=None):
            """dsinks: gradients of the sinks, with the first tile only: the sinks are shared by all
            tiles.
            """
            sinks = [] if dsinks is None else [asked.sinks_H for asked in self.asked]
            self._walk([*parts, *sinks], [*grads, *(dsinks or [])])
            return x.grad

        return parts, back

    def _walk(self, outputs, grads) -> None:
        """Runs backward from the outputs that have a gradient and require one."""
        pairs = [(y, dy) for y, dy in zip(outputs, grads) if dy is not None and y.requires_grad]
        if self.condition.contiguous:  # tiles of several rows are not contiguous
            pairs = [(y, dy.contiguous()) for y, dy in pairs]
        if pairs:
            backward_from(*zip(*pairs))

    @contextmanager
    def again(self, weights, several: bool):
        if several:
            self.adding, self.found_idle = weights.adding, {}
        try:
            with self.arguments.gradients() as gradients:
                yield gradients
        # also after an out-of-memory error: the graph may live on, and would keep the sums
        finally:
            self.adding, self.found_idle = None, {}

    def start_anew(self) -> None:
        """Drops the cached forwards before a rerun of the same forward."""
        self.found_idle = {}

    def hand_on(self, y: Tensor, extras: list[Tensor], into: dict, shared):
        extras = iter(extras)
        for key, dims in self.recorded:
            x = next(extras)
            into[key].append(x.flatten(0, 1) if x.dim() > dims else x)
        beside = self.beside and tuple(next(extras) if x is _TENSOR else x for x in self.beside)
        for key, places in self.left.items():
            shared[key] = tuple(next(extras).transpose(1, 2) for _ in places)
        return y if beside is None else (y, *beside)


def _by_rows(recorded: Tensor, x_BtD: Tensor) -> Tensor:
    """A recorded tensor as [B, t, ...]; it may come as [B*t, ...]."""
    B, t = x_BtD.shape[:2]
    return (
        recorded.unflatten(0, (B, t))
        if recorded.shape[0] == B * t and recorded.shape[:2] != (B, t)
        else recorded
    )


def _within(contexts: list, run):
    """Calls run() within these contexts. Usually there are none: a tile pays only for what it
    needs.
    """
    if not contexts:
        return run()
    with contexts[0]:
        return _within(contexts[1:], run)
