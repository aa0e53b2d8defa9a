"""`hfpatch train --fp8`: the layers' products in torchao's float8.

Weights, gradients and optimizer stay in the dtype that they have; checkpoints are as without it.
"""

from dataclasses import replace

import torch
from torch import nn

from hfpatch.decoder.find import find_decoder

_MULTIPLE = 16  # of a product's width, in hardware


def convert(model: nn.Module, recipe: str) -> nn.Module:
    """Replaces the decoder layers' Linears by torchao's. Returns the same model.

    recipe: one that scales each token by itself (flags.py), so layers
    stay in tiles. A CPU, or a GPU before compute capability 8.9, emulates the products: the same
    numbers, slower. Raises ValueError if no layer has a Linear of a width that float8 takes.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    fast = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not fast)
    layers = find_decoder(model).layers
    if not any(_fits(module, "") for layer in layers for module in layer.modules()):
        raise ValueError(
            f"hfpatch: --fp8 {recipe} needs Linear layers whose widths are multiples of "
            f"{_MULTIPLE}, and {type(model).__name__} has none. Leave it out."
        )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)
    return model


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )
