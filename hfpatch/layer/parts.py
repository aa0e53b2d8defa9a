"""What a decoder layer is asked: its own forward, run up to its attention and from there on, for a
tile of tokens.

Nothing here knows a family. `LayerParts` is what layer/call.py is given.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn
from transformers.cache_utils import Cache

from hfpatch.compat import autocast_dtype, collecting, modules_in, submodule
from hfpatch.context.current import Answering, Call, Noting, Stopped, asking, our_attention
from hfpatch.layer import adapted_experts
from hfpatch.layer.arguments import Arguments
from hfpatch.layer.block import Block
from hfpatch.layer.dequantized import DequantizedWeights
from hfpatch.layer.direct import Direct, direct_of
from hfpatch.layer.mixers import Mixer, standing_in
from hfpatch.layer.shared_keys import NAME as SHARED_KEYS
from hfpatch.layer.shared_keys import SharedKeys, left_by
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts import experts
from hfpatch.parts.keeping import keeping
from hfpatch.parts.parts import FusedJointMLP, FusedMLP, activation_as_found
from hfpatch.parts.unread import add_up, as_found, can_go_without, idle, without_values

_TENSOR = object()
# tensors that a block takes
_OF_A_BLOCK = ("position_embeddings", "position_ids", "attention_mask", "cache_position")


@dataclass
class LayerParts:
    """`pre` and `post` of one call of a layer, for tiles of its tokens.

    asked: what each attention call asked for, as of the last `pre`; mixers: what runs whole beside
    it; beside: what the layer returns behind its output, _TENSOR for tensors, or None where it
    returns that alone; records: what transformers records inside the layer besides (router logits),
    by key.
    """

    layer: nn.Module
    arguments: Arguments
    answers: LayerTraits
    configs: tuple
    batch: object
    forward: object = None  # the layer's own, where it is not a TiledLayer yet
    asked: list[Call] = field(default_factory=list)
    mixers: list[Mixer] = field(default_factory=list)
    beside: tuple | None = None
    # an empty one, which takes the keys and values of all tokens at once
    cache: Cache | None = None
    records: tuple[str, ...] = ()
    collected: bool = True  # whether transformers collects anything in the forward under way
    recorded: list = field(default_factory=list)  # (key, dimensions) of each of them
    # Looked up once a call: a layer has many tiles.
    # names -> those of the modules that can go without their values
    found_idle: dict = field(default_factory=dict)
    block: Block | None = None
    modules: list = field(default_factory=list)  # the layer's, found once a call
    # layer.layer.Looked: what they say of how it runs, for as long as that holds
    looked: object = None
    # whether something in the layer draws random numbers; before its call is made: adapters may
    random: bool = False
    written: DequantizedWeights | None = None  # dense weights of a phase, where the policy has them
    read: tuple = ()  # keys of what earlier layers left that the last `pre` asked for
    left: dict = field(
        default_factory=dict
    )  # what it leaves for later layers: key -> places of k and v in what `pre` gives
    # what the run under way reads of earlier layers and leaves for later ones
    shared: SharedKeys | None = None
    leaves: bool = False  # whether this layer leaves something for later ones
    # in backward over several tiles: layer.weight_gradients.WeightGradients.adding
    adding: object = None

    def __post_init__(self):
        # Values that the small instance was not given may change what the layer computes: then its
        # own forward runs. Labels, offsets and counts, which trainers hand down, are no such
        # values.
        given = (
            *self.arguments.args,
            *(x for name, x in self.arguments.kwargs.items() if name not in _OF_A_BLOCK),
        )
        values = any(isinstance(x, Tensor) and x.dim() and x.is_floating_point() for x in given)
        self.is_block = self.answers.block and not values

    @property
    def n_calls(self) -> int:
        """How many calls `pre` stops for: none where nothing in the layer mixes tokens."""
        return len(self.answers.mixing)

    def _answered(self, role):
        names = self.answers.mixers
        return (
            standing_in(self.layer, names, role.mixer, self.answers.paired)
            if names
            else nullcontext()
        )

    def _forward(self, x_BtD: Tensor, a: int, b: int):
        args, kwargs = self.arguments.tile(a, b)
        self.shared = kwargs.get(SHARED_KEYS)
        with our_attention(self.configs, self.batch):
            return (self.forward or self.layer.stock_forward)(x_BtD, *args, **kwargs)

    def pre(self, x_BtD: Tensor, a: int, b: int, dead: bool = False) -> list[Tensor]:
        """q [B, t, H, E], k [B, t, K, E], v [B, t, K, E_v] of each attention call, behind them each
        mixer's input [B, t, D].

        dead: the values of LayerTraits.dead_pre are not computed. NotStopped where the layer does
            not end at its attention.
        """
        if not self.n_calls:
            return []
        # An argument's gradient may read any value, and goes to the tile's stand-in for it.
        wanted = self.arguments.wanted()
        dead = dead and not wanted
        block = self._block(x_BtD) if self.is_block and not wanted else None
        if isinstance(block, Direct):
            return block.pre(x_BtD, a, b)
        run = partial(block.pre if block else self._pre, x_BtD, a, b)
        nobody_reads = self._idle(self.answers.dead_pre if dead else (), x_BtD.device.type, dead)
        if not nobody_reads:
            return run()
        with without_values(nobody_reads):
            return run()

    def _pre(self, x_BtD: Tensor, a: int, b: int) -> list[Tensor]:
        note = Noting(self.n_calls)
        try:
            # What is recorded before attention (JetMoE's router of heads) `post` comes by too.
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
                (self.layer.get_submodule(name), *note.mixed[name]) for name in self.answers.mixers
            ]
            mixed = [self.arguments.mixer(*call, self.configs, self.batch) for call in named]
            self.mixers = [mixer for mixer, _ in mixed]
            parts += [x for _, x in mixed]
        return parts

    def _idle(self, names: tuple[str, ...], device: str, again: bool) -> list:
        """What `without_values` takes, and other forwards for now. Looked up once a call: a layer
        has many tiles. again: gradients come next, of weights to where they add up.
        """
        adding = self.adding if again else None
        key = names, adding
        if key not in self.found_idle:
            written = self.written
            weight_of = getattr if written is None else written.weight_of
            dense = {} if written is None else {"dense_of": written.dense_of}
            dense |= {"weight_of": weight_of, "adding": adding, "filled": self.random}
            found = idle(self.layer, names, device, **dense) if names else []
            found += [] if written is None else written.forwards(found)
            found += add_up(self.layer, found, device, adding) if adding else []
            modules = self.modules or modules_in(self.layer)
            taken = {id(m) for m, _ in found}
            found += experts.pairs(modules, taken, adding=adding, weight_of=weight_of)
            self.found_idle[key] = found + adapted_experts.pairs(modules)
        return self.found_idle[key]

    def adds_up(self, adding) -> None:
        """Where weights' gradients go from now on (WeightGradients.adding), None for where autograd
        takes them.
        """
        if adding is not self.adding:
            self.adding, self.found_idle = adding, {}

    def start_anew(self) -> None:
        """Before the same forward runs once more: what it wrote to the caller's cache stays."""
        self.cache, self.found_idle = None, {}

    def phase(self, tiles):
        """The tiles of one pass, over which weights are written out once."""
        return tiles if self.written is None else self.written.phase(tiles)

    def keepable(self, names, device: str) -> tuple[str, ...]:
        """Those of memory.policy.KEEPABLE that spare this layer something: without them it would
        compute more.
        """
        return keepable(self.layer, replace(self.answers, block=self.is_block), names, device)

    def store(self, parts: list[Tensor]) -> None:
        """Keys and values of the whole rows, as `pre` gave them, into the cache, where there is
        one.
        """
        if self.cache is not None:
            for name, k, v in zip(self.answers.attention, parts[1::3], parts[2::3]):
                index = self.layer.get_submodule(name).layer_idx
                self.cache.update(k.transpose(1, 2), v.transpose(1, 2), index)

    def post(
        self,
        x_BtD: Tensor,
        outs_BtHE: list[Tensor],
        a: int,
        b: int,
        dead: bool = False,
        noted=None,
        known=None,
    ) -> list[Tensor]:
        """The layer's output for a tile of its input and of the attention outputs [B, t, H, E_v],
        one a call.

        Behind it what was recorded on the way, and the tensors that the layer returns beside, each
        as [B, t, ...]. noted, known: as parts.keeping has them, by names that `keepable` gave.
        dead: the values of LayerTraits.dead_post, and those that make what is known, are not
        computed.
        """
        block = self._block(x_BtD) if self.is_block else None
        if isinstance(block, Direct):
            return [block.post(x_BtD, *outs_BtHE, noted)]
        kept = [keeping(noted or {}, known or {})] if noted or known else []
        found = {key: [] for key in self.records}
        names = (
            self.answers.dead_post if dead and not self.arguments.wanted() else self.answers.unread
        )
        if known:
            sources = sources_of(self.layer, replace(self.answers, block=self.is_block))
            names = (*names, *(module for name in known for module in sources[name]))
        nobody_reads = self._idle(names, x_BtD.device.type, dead)
        around = [without_values(nobody_reads)] if nobody_reads else []
        around += [collecting(found), *kept] if self.collected else kept
        run = partial(block.post, x_BtD, *outs_BtHE) if block else None
        y = _within(around, run or partial(self._post, x_BtD, outs_BtHE, a, b))
        self.beside = (
            None
            if isinstance(y, Tensor)
            else tuple(_TENSOR if isinstance(x, Tensor) else x for x in y[1:])
        )
        self.recorded = [(key, x.dim()) for key, xs in found.items() for x in xs]
        extras = [self._by_rows(x, x_BtD) for xs in found.values() for x in xs]
        return (
            [y, *extras]
            if self.beside is None
            else [y[0], *extras, *(x for x in y[1:] if isinstance(x, Tensor))]
        )

    def _post(self, x_BtD: Tensor, outs_BtHE: list[Tensor], a: int, b: int):
        n = len(self.answers.attention)
        role = Answering(outs_BtHE[:n], dict(zip(self.answers.mixers, outs_BtHE[n:])))
        with asking(role), self._answered(role):
            return self._forward(x_BtD, a, b)

    @staticmethod
    def _by_rows(recorded: Tensor, x_BtD: Tensor) -> Tensor:
        """Recorded over flattened tokens [B*t, ...] or not: [B, t, ...]."""
        B, t = x_BtD.shape[:2]
        return (
            recorded.unflatten(0, (B, t))
            if recorded.shape[0] == B * t and recorded.shape[:2] != (B, t)
            else recorded
        )

    def let_go(self) -> None:
        """After the last backward of this call: the graph, and this with it, may live as long as
        the loss.
        """
        self.arguments, self.mixers, self.asked, self.block = Arguments((), {}, 0, 0), [], [], None

    def places_left(self) -> list[int]:
        """Places in what `pre` gives of all that goes to later layers."""
        return [i for places in self.left.values() for i in places]

    def hand_on(self, y: Tensor, extras: list[Tensor], into: dict, shared):
        """What the layer returns, of its hidden states and what came behind them. What was
        recorded, joined along tokens, is added to transformers' lists, in the shape it had; what
        goes to later layers, into `shared`.
        """
        extras = iter(extras)
        for key, dims in self.recorded:
            x = next(extras)
            into[key].append(x.flatten(0, 1) if x.dim() > dims else x)
        beside = self.beside and tuple(next(extras) if x is _TENSOR else x for x in self.beside)
        for key, places in self.left.items():
            shared[key] = tuple(next(extras).transpose(1, 2) for _ in places)
        return y if beside is None else (y, *beside)

    def goes_direct(self, x: Tensor) -> bool:
        """Whether this call goes by the block whose derivatives are written out: it calls no module
        of the layer.
        """
        return self.is_block and isinstance(self._block(x), Direct)

    @property
    def direct(self) -> Direct | None:
        """That block, in the backward of a call whose forward went so."""
        return self.block if isinstance(self.block, Direct) else None

    def _block(self, x: Tensor) -> Block:
        if self.block is None:
            kwargs = self.arguments.kwargs
            alone = self.written is None and not self.arguments.wanted()
            direct = direct_of(self.layer, kwargs, x, self.looked) if alone else None
            self.block = direct or Block(self.layer).of_call(kwargs)
            self.asked = [self.block.asked]
        return self.block


def _within(contexts: list, run):
    """run() within all of them. Most often there is none: what a tile does not need costs it
    nothing.
    """
    if not contexts:
        return run()
    with contexts[0]:
        return _within(contexts[1:], run)


def keepable(
    layer: nn.Module, answers: LayerTraits, names: tuple[str, ...], device: str
) -> tuple[str, ...]:
    """LayerParts.keepable before there is a call."""
    if answers.mixers or not names:
        return ()
    if autocast_dtype(device) is not None:
        return tuple(n for n in names if n == "qkv")
    sources = sources_of(layer, answers)
    spared = lambda name: can_go_without(submodule(layer, name)) and as_found(layer, name)  # noqa: E731
    return tuple(n for n in names if n == "qkv" or n in sources and all(map(spared, sources[n])))


def sources_of(layer: nn.Module, answers: LayerTraits) -> dict[str, tuple[str, ...]]:
    """The modules whose values nobody reads where a kept value is known."""
    sources = {"mid": ("self_attn.o_proj",)} if answers.block else {}
    mlp = getattr(layer, "mlp", None)
    if (
        isinstance(mlp, (FusedMLP, FusedJointMLP))
        and "forward" not in vars(mlp)
        and activation_as_found(mlp)
    ):
        sources["gate_up"] = tuple(f"mlp.{name}" for name in mlp._hfpatch_gates)
    return sources
