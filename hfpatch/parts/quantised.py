"""The Linear under an adapter, and the dense weight of a quantised Linear.

Classes are recognised by name: neither PEFT nor bitsandbytes is imported for a model without them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import modules_of

# The attributes under which PEFT's wrappers hold the module that they wrap.
WRAPPED = ("base_layer", "original_module")


def kinds_of(kind: type) -> set[str]:
    """package.Class of a class and of its bases."""
    return {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in kind.__mro__}


def base_of(module: nn.Module) -> nn.Module | None:
    """The Linear under LoRA, or the module itself. None under an adapter that reads the Linear's
    output (DoRA, IA3) or writes to it (AdaLoRA)."""
    base = modules_of(module).get("base_layer")
    if base is None:
        return module
    kind = type(module)
    lora = "peft.LoraLayer" in kinds_of(kind) and kind.__module__.startswith("peft.tuners.lora")
    return base_of(base) if lora and not getattr(module, "lora_variant", None) else None


def _four_bits(module, dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    dense = dequantize_4bit(module.weight.data, module.weight.quant_state)
    return dense.to(module.compute_dtype or dtype)


# Class of a quantised Linear -> its dense weight, as its own backward computes it.
_QUANTISED = {
    "bitsandbytes.Linear4bit": _four_bits,
    "bitsandbytes.Linear8bitLt": lambda module, dtype: module.state.CB.to(dtype, copy=True).mul_(
        module.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
    ),
    "hfpatch.Packed4bit": lambda module, dtype: module.dense(dtype),
    "hfpatch.Packed8bit": lambda module, dtype: module.dense(dtype),
}


_PACKED = "bitsandbytes.Bnb4bitParametrization"


def dense_of(module: nn.Module) -> Callable[[torch.dtype], Tensor] | None:
    """A function dtype -> dense weight [out, in] of a quantised Linear; None for other modules."""
    kinds = kinds_of(type(module))
    return next((partial(_QUANTISED[k], module) for k in _QUANTISED if k in kinds), None)


def class_of(module: nn.Module) -> type:
    """The module's class; for fused experts whose parametrizations are bitsandbytes' of 4 bits alone,
    the class beneath the parametrization."""
    made = modules_of(module).get("parametrizations")
    if made is None:
        return type(module)
    steps = [step for weight in made.children() for step in weight.children()]
    packed = steps and all(_PACKED in kinds_of(type(step)) for step in steps)
    return type(module).__mro__[1] if packed else type(module)


# --- torchao's projections that train -------------------------------------------------------------

_SAME_SCALE = "it rounds several tokens by one scale, and a tile's is not a row's"


def is_fake_quantised(module: nn.Module) -> bool:
    """Whether this is torchao's Linear of quantisation-aware training, with its quantisers."""
    return "torchao.FakeQuantizedLinear" in kinds_of(type(module))


def scales_over_tokens(module: nn.Module) -> str | None:
    """Why tiles may change the result of a projection: it may round several tokens by one scale.

    Of what torchao trains, only float8 by rows (`hfpatch train --fp8`) is known to give each token
    its own scale.
    """
    if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return _SAME_SCALE  # of each input's range
    if not isinstance(module, nn.Linear):
        return None
    if "torchao.Float8Linear" in kinds_of(type(module)):
        return None if _float8_by_rows(module.config) else _SAME_SCALE
    weight = module.weight
    trained = type(weight) if weight.requires_grad else nn.Parameter
    for kind in (type(module), trained):
        if kind.__module__.startswith("torchao."):
            return f"torchao's {kind.__name__} may round several tokens by one scale"
    granularity = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
    return _SAME_SCALE if type(granularity).__name__ == "PerTensor" else None


def _float8_by_rows(config) -> bool:
    """Whether a Float8LinearConfig is one of torchao's recipes with a scale for each token.

    Their scales per channel are powers of two, which change only the exponent.
    """
    recipes = (config.from_recipe_name(name) for name in ("rowwise", "rowwise_with_gw_hp"))
    return config in [replace(recipe, emulate=config.emulate) for recipe in recipes]
