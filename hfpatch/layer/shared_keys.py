"""Keys and values that a layer computes for later ones (Gemma 3n, Gemma 4), in the dict that
transformers passes from layer to layer.

A tile gets a dict of its own. Its entries (Gemma 4 has two) are cut along tokens like the layer's
other arguments, and get their gradient. Entries that it writes are keys and values of its own attention;
a tiled layer returns them whole, as outputs.
"""

import inspect
from collections import UserDict

from torch import Tensor, nn

from hfpatch.compat import MADE_FROM, pytree

NAME = "shared_kv_states"  # transformers' name of the argument


class SharedKeys(UserDict):
    """The dict of one run of a layer: key -> (k, v), [B, K, T, E]. written: entries that it wrote."""

    def __init__(self, entries=()):
        self.written = {}
        super().__init__(entries)
        self.written.clear()

    def __setitem__(self, key, value):
        self.written[key] = value
        super().__setitem__(key, value)


def _turned(x):
    # Tokens on axis 1 of a leaf, where arguments.py looks first.
    return x.transpose(1, 2) if isinstance(x, Tensor) else x


def _flatten(shared: SharedKeys):
    return [_turned(x) for pair in shared.values() for x in pair], list(shared)


def _unflatten(leaves, keys) -> SharedKeys:
    leaves = map(_turned, leaves)
    return SharedKeys(zip(keys, zip(leaves, leaves)))


pytree.register_pytree_node(SharedKeys, _flatten, _unflatten)


def hands_on_keys(layer: nn.Module) -> bool:
    """Whether the model passes such a dict from layer to layer. Other models keep the keys in the
    KV cache (Gemma 3n at first).
    """
    return NAME in inspect.signature(MADE_FROM[type(layer)].forward).parameters


def of_its_own(kwargs: dict) -> dict:
    """Keyword arguments with a copy of the model's dict for this call."""
    given = kwargs.get(NAME)
    return kwargs if given is None else kwargs | {NAME: SharedKeys(given)}


def left_by(written: dict, calls: list) -> dict:
    """key -> (indices of k and v in the result of `before`) for each entry that a layer wrote.
    ValueError if an entry is not the keys and values of one of these attention calls.
    """
    made = [x for c in calls for x in (c.q_BHTE, c.k_BKTE, c.v_BKTE)]
    places = {id(x): i for i, x in enumerate(made)}
    found = {key: tuple(places.get(id(x)) for x in pair) for key, pair in written.items()}
    if any(None in places for places in found.values()):
        raise ValueError(
            "what it leaves for later layers is something else than its attention's keys and values"
        )
    return found
