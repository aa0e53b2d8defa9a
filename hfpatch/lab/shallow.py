"""A model as a plan sees it: made without memory, in the few depths that are simulated, and its
sizes, counted on the model itself."""

import copy
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from hfpatch.budget.sequence import why_not_shared_out
from hfpatch.decoder.find import find_decoder, list_of_layers
from hfpatch.decoder.small_instance import kind_of
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.compat import carries_states
from hfpatch.lab.simulate.adapters import PACKED, adapted
from hfpatch.lab.simulate.implementations import build, prepare

# Words for transformers without hfpatch -> their names in lab/simulate/implementations.py.
STOCK = {"stock": "hf", "stock-checkpointing": "hf-ckpt"}


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


def _count(parameters) -> int:
    return sum(p.numel() for p in parameters)


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def trained_bytes_of(module: nn.Module) -> int:
    return _bytes(p for p in module.parameters() if p.requires_grad)


def _held(module: nn.Module) -> int:
    """Bytes of parameters, with the scales of packed weights."""
    packed = (m for m in module.modules() if isinstance(m, tuple(PACKED.values())))
    return _bytes([*module.parameters(), *(b for m in packed for b in m.buffers())])


def _frozen(module: nn.Module) -> int:
    return _held(module) - trained_bytes_of(module)


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
        self.config = config
        self.adapters = adapters
        self.wide = wide
        self.stock = self._build()
        layers = layers_of(self.stock)
        kinds = [(kind_of(m), [(n, p.shape) for n, p in m.named_parameters()]) for m in layers]
        self.layers = len(kinds)
        self.first, self.period = _pattern(kinds)
        self.cut = cache(self.cut)
        self.sizes = self._sizes()

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
        if implementation:
            return prepare(copy.deepcopy(self.cut(layers)), implementation)
        model = self._build()
        del layers_of(model)[layers:]
        return adapted(model, self.adapters) if self.adapters else model

    def _sizes(self) -> Sizes:
        fewer, period = self.depths()
        few = self.cut(fewer)
        more = self.cut(fewer + period)
        times = (self.layers - fewer) // period if period else 0

        def onward(read) -> int:
            """A number of all layers, from that of few."""
            return read(few) + times * (read(more) - read(few))

        own = layers_of(self.stock)
        linears = (m for m in own.modules() if isinstance(m, nn.Linear))
        matrices = Counter((m.in_features, m.out_features) for m in linears)
        embedding = self.stock.get_input_embeddings()
        heads = getattr(few.config, "num_attention_heads", 1)
        return Sizes(
            parameters=_count(self.stock.parameters()),
            layer_parameters=max(_count(m.parameters()) for m in own),
            body_parameters=_count(own.parameters()),
            embedding_parameters=_count(embedding.parameters()),
            num_layers=self.layers,
            adapters=self.adapters,
            trained_parameters=onward(
                lambda m: _count(p for p in m.parameters() if p.requires_grad)
            ),
            trained_bytes=onward(trained_bytes_of),
            nbytes=onward(_held),
            frozen=onward(lambda m: sum(map(_frozen, layers_of(m)))),
            frozen_layer=max(map(_frozen, layers_of(few))),
            matrices=tuple(matrices.items()),
            embedding=tuple(embedding.weight.shape),
            carries_states=carries_states(type(find_decoder(few).stack)),
            num_heads=heads,
            num_kv_heads=getattr(few.config, "num_key_value_heads", None) or heads,
        )


model_of = lru_cache(maxsize=8)(Model)


def shared(sizes: Sizes, sp_size: int, gpus: int) -> Sizes:
    """The sizes for sp_size ranks that share each row. ValueError if sp_size does not divide the
    GPUs."""
    if gpus % sp_size:
        raise ValueError(
            f"hfpatch: --sp-size must divide --gpus, got {sp_size} and {gpus}. Pass a divisor of "
            f"{gpus}, or --gpus {sp_size}."
        )
    if sizes.num_heads > 1:  # 1: it has no attention
        why = why_not_shared_out(sizes.num_heads, sizes.num_kv_heads, sp_size)
        if why:
            raise ValueError(f"hfpatch: {why}. Pass another --sp-size.")
    return replace(sizes, ranks=sp_size)
