"""A model as a plan sees it: made without memory, in the few depths that are simulated, and its
sizes, counted on the model itself."""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import nn

from hfpatch.budget.sequence import why_not_shared_out
from hfpatch.decoder.find import find_decoder, list_of_layers
from hfpatch.decoder.small_instance import kind_of
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.compat import carries_states
from hfpatch.lab.simulate.adapters import PACKED, adapted
from hfpatch.lab.simulate.implementations import build, prepare

STOCK, STOCK_CHECKPOINTING, UNTILED = "stock", "stock-checkpointing", "off"
IMPLEMENTATIONS = {STOCK: "hf", STOCK_CHECKPOINTING: "hf-ckpt", UNTILED: "hfpatch-off"}


class Values(dict):
    """A config's values as a key of caches."""

    def __hash__(self):
        return hash(self.get("model_type"))


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers that the stack's forward runs. ValueError if there is none."""
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(
            f"hfpatch: the model must be a decoder with a list of layers, got "
            f"{type(model).__name__}. Pass a causal language model."
        )
    return list_of_layers(decoder.stack)


def trained_bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _count(parameters) -> int:
    return sum(p.numel() for p in parameters)


def _held(module: nn.Module, trained=False) -> int:
    """Bytes of parameters, with the scales of packed weights."""
    packed = (m for m in module.modules() if isinstance(m, tuple(PACKED.values())))
    tensors = [*module.parameters(), *(b for m in packed for b in m.buffers())]
    return sum(t.numel() * t.element_size() for t in tensors if trained or not t.requires_grad)


@dataclass(frozen=True)
class Sizes:
    """What a placement and a plan need of a model.

    Attributes:
        parameters, layer_parameters, body_parameters, embedding_parameters: of the whole model, of
            the largest layer, of all layers, and of the embedding, without adapters.
        adapters: over a frozen base, or None.
        nbytes: of all parameters, with the scales of packed weights.
        frozen, frozen_layer: bytes of all layers' frozen weights, and of the largest layer's.
        matrices: ((columns in, columns out), number) of the layers' Linear layers; embedding: its
            shape.
        carries_states: some layers mix tokens by states that they carry on.
        ranks: GPUs that share each row.
    """

    parameters: int
    layer_parameters: int
    body_parameters: int
    embedding_parameters: int
    num_layers: int
    adapters: Adapters | None
    trained_parameters: int
    trained_bytes: int
    nbytes: int
    frozen: int
    frozen_layer: int
    matrices: tuple
    embedding: tuple
    carries_states: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ranks: int = 1


def _pattern(kinds: list) -> tuple[int, int]:
    """(first, period): from layer `first` on, layers repeat with this period."""
    n = len(kinds)
    ways = (
        (first, period)
        for period in range(1, n + 1)
        for first in range(n)
        if kinds[first : n - period] == kinds[first + period :]
    )
    return min(ways, key=lambda way: way[0] + 2 * way[1])


class Model:
    """A model of a config, with these adapters, in few depths.

    Layers of a repeating pattern take the same bytes and seconds. So a step of all layers takes
    step(more) + times * (step(more) - step(fewer)), as do sizes.
    """

    def __init__(self, config: Values, adapters: Adapters | None = None, wide: bool = False):
        self.config, self.adapters, self.wide = config, adapters, wide
        self.stock = self._build()
        layers = layers_of(self.stock)
        kinds = [(kind_of(m), [(n, p.shape) for n, p in m.named_parameters()]) for m in layers]
        self.layers, (self.first, self.period) = len(kinds), _pattern(kinds)
        self.cut, self.sizes = cache(self.cut), self._sizes()

    def _build(self) -> nn.Module:
        return build(self.config, torch.float32 if self.wide else torch.bfloat16)

    def depths(self, every: int = 1, least: int = 2) -> tuple[int, int]:
        """(fewer, period): the least number of layers to simulate that has `least` and one period
        of the pattern, and the layers to add. All layers and 0 if too few repeat."""
        period = math.lcm(self.period, every)
        fewer = self.first + (self.layers - self.first) % period
        fewer += period * max(1, -(-(least - fewer) // period))
        return (fewer, period) if fewer + period < self.layers else (self.layers, 0)

    def cut(self, layers: int, implementation: str = "") -> nn.Module:
        """The model with its first layers alone, turned into one of IMPLEMENTATIONS."""
        model = self._counted.pop(layers, None) if implementation else None
        if model is None:
            model = self._build()
            del layers_of(model)[layers:]
            model = adapted(model, self.adapters) if self.adapters else model
        return prepare(model, implementation) if implementation else model

    def _sizes(self) -> Sizes:
        fewer, period = self.depths()
        self._counted = {fewer: self.cut(fewer)}  # the first implementation takes them over
        small = self._counted[fewer]
        one, own = layers_of(small), layers_of(self.stock)
        more = self._counted[fewer + period] = self.cut(fewer + period) if period else small
        times = (self.layers - fewer) // period if period else 0
        onward = lambda read: read(small) + times * (read(more) - read(small))  # noqa: E731
        base, head = self.stock, getattr(small.config, "num_attention_heads", 1)
        linears: dict = {}
        for m in own.modules():
            if isinstance(m, nn.Linear):
                key = m.in_features, m.out_features
                linears[key] = linears.get(key, 0) + 1
        read = partial(getattr, small.config)
        states = carries_states(type(find_decoder(small).stack))
        return Sizes(
            _count(base.parameters()), max(_count(m.parameters()) for m in own),
            _count(own.parameters()), _count(base.get_input_embeddings().parameters()),
            self.layers, self.adapters,
            onward(lambda m: _count(p for p in m.parameters() if p.requires_grad)),
            onward(trained_bytes_of), onward(lambda m: _held(m, trained=True)),
            onward(lambda m: sum(map(_held, layers_of(m)))), max(map(_held, one)),
            tuple(linears.items()), tuple(base.get_input_embeddings().weight.shape), states, head,
            read("num_key_value_heads", None) or head,
            max((getattr(m, "head_dim", None) or 1 for m in small.modules()), default=1),
        )  # fmt: skip


@lru_cache(maxsize=8)
def model_of(config: Values, adapters: Adapters | None = None, wide: bool = False) -> Model:
    return Model(config, adapters, wide)


def shared(sizes: Sizes, sp_size: int, gpus: int) -> Sizes:
    """The sizes for sp_size ranks that share each row. ValueError if sp_size does not divide the
    GPUs."""
    if gpus % sp_size:
        raise ValueError(
            f"hfpatch: --sp-size must divide --gpus, got {sp_size} and {gpus}. Pass a divisor of "
            f"{gpus}."
        )
    heads = sizes.num_heads, sizes.num_kv_heads
    if heads[0] > 1 and (why := why_not_shared_out(*heads, sp_size)):  # 1: it has no attention
        raise ValueError(f"hfpatch: {why}. Pass another --sp-size.")
    return replace(sizes, ranks=sp_size)
