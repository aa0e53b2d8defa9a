"""Counted: the sizes of a model that no closed form describes, counted on the model itself. A
Counted takes the place of a ModelShape."""

from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from hfpatch.budget.adapters import Adapters
from hfpatch.compat import carries_states
from hfpatch.decoder.find import find_decoder, list_of_layers
from hfpatch.lab.models import text_config_of
from hfpatch.lab.simulate.adapters import PACKED
from hfpatch.lab.simulate.implementations import build


@dataclass(frozen=True)
class Counted:
    """The sizes of a model that a placement needs, counted on the model itself.

    Attributes:
        parameters, layer_parameters, body_parameters, embedding_parameters: of the whole model, of
            the largest layer, of all layers, and of the embedding.
        adapters: the adapters in the model, or None.
        carries_states: mixers carry states over tokens, which no closed form covers.
        nbytes: bytes of all parameters, with the scales of packed weights.
        trained_bytes: bytes of the trained parameters.
        ranks: GPUs that share each row.
    """

    parameters: int
    layer_parameters: int
    body_parameters: int
    embedding_parameters: int
    num_layers: int
    adapters: Adapters | None = None
    trained_parameters: int = 0
    carries_states: bool = False
    nbytes: int = 0
    trained_bytes: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    ranks: int = 1

    @classmethod
    def of(cls, model: nn.Module, layers, adapters=None) -> "Counted":
        """adapters: those that are in the model."""
        of_layers = [*map(_count, layers)]
        sizes = (
            _count(model),
            max(of_layers),
            sum(of_layers),
            _count(model.get_input_embeddings()),
            len(layers),
        )
        held = [
            *model.parameters(),
            *(
                b
                for m in model.modules()
                if isinstance(m, tuple(PACKED.values()))
                for b in m.buffers()
            ),
        ]
        nbytes = sum(t.numel() * t.element_size() for t in held)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        states, heads = (
            carries_states(type(find_decoder(model).stack)),
            getattr(model.config, "num_attention_heads", 1),
        )
        keys = getattr(model.config, "num_key_value_heads", None) or heads
        return cls(
            *sizes,
            adapters,
            trained,
            states,
            nbytes,
            trained_bytes_of(model),
            heads,
            keys,
        )

    def parameter_bytes(self) -> int:
        """The bytes of all parameters, with the scales of packed weights."""
        return self.nbytes

    def trained_itemsize(self, itemsize: int) -> int:
        """As ModelShape.trained_itemsize."""
        return (self.adapters and self.adapters.itemsize) or itemsize


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def trained_bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers that the stack's forward runs. ValueError if there is none."""
    decoder = find_decoder(model)
    if decoder is None:
        raise ValueError(
            f"hfpatch: the model must have a list of decoder layers, got {type(model).__name__}. "
            "Pass a causal language model."
        )
    return list_of_layers(decoder.stack)


class Values(dict):
    """A config's values as a key of caches."""

    def __hash__(self):
        return hash(self.get("model_type"))


def counted(model, adapters: Adapters | None = None) -> Counted:
    """The Counted of a model that no closed form describes, with these adapters in it."""
    return _counted(Values(text_config_of(model)[1]), adapters)


@lru_cache(maxsize=8)  # each plan of a sweep calls it again
def _counted(config: Values, adapters: Adapters | None) -> Counted:
    built = build(config, adapters=adapters)
    return Counted.of(built, layers_of(built), adapters)
