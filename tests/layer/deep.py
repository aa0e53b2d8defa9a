"""The tiny Llama as the layer tests take it: float64, three layers, rows of a length that no tile
divides.
"""

import tiny
import torch


def tiny_llama(dtype=torch.float64, **changes):
    return tiny.llama(dtype=dtype, **{"num_hidden_layers": 3, **changes})


def pair(dtype=torch.float64, **changes):
    """The same model twice, the first with norms that are exact in float64."""
    model = tiny_llama(dtype, **changes)
    return tiny.with_exact_norms(model), model


def tokens(batch=2, T=37, seed=0):
    return tiny.ids(batch, T, seed)
