"""The Linear under an adapter, the dense weight of a quantised Linear, and the sizes of both.

Classes are recognised by name: neither PEFT nor bitsandbytes is imported for a model without them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.shape import ModelShape
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
    lora = "peft.LoraLayer" in kinds_of(type(module)) and type(module).__module__.startswith(
        "peft.tuners.lora"
    )
    plain = lora and not getattr(module, "lora_variant", None)
    return base_of(base) if plain else None


def _four_bits(module, dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(module.weight.data, module.weight.quant_state).to(
        module.compute_dtype or dtype
    )


def _eight_bits(module, dtype) -> Tensor:
    codes, scales = module.state.CB, module.state.SCB
    return codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


# Class of a quantised Linear -> (its base in budget/adapters.py, its dense weight, as its own
# backward computes it).
_QUANTISED = {
    "bitsandbytes.Linear4bit": ("4bit", _four_bits), "bitsandbytes.Linear8bitLt": ("8bit",
                                                                                   _eight_bits),
    "hfpatch.Packed4bit": ("4bit", lambda module, dtype: module.dense(dtype)),
    "hfpatch.Packed8bit": ("8bit", lambda module, dtype: module.dense(dtype)),
}  # fmt: skip


_PACKED = "bitsandbytes.Bnb4bitParametrization"


def _quantised(module: nn.Module) -> tuple:
    return next(
        (row for kind, row in _QUANTISED.items() if kind in kinds_of(type(module))), (None, None)
    )


def dense_of(module: nn.Module) -> Callable[[torch.dtype], Tensor] | None:
    """A function dtype -> dense weight [out, in] of a quantised Linear; None for other modules."""
    make = _quantised(module)[1]
    return None if make is None else partial(make, module)


def holds_packed(module: nn.Module) -> bool:
    """Whether these are fused experts whose parametrizations are bitsandbytes' of 4 bits alone."""
    made = modules_of(module).get("parametrizations")
    steps = [] if made is None else [list(one.children()) for one in made.children()]
    return bool(steps) and all(
        len(step) == 1 and _PACKED in kinds_of(type(step[0])) for step in steps
    )


def class_of(module: nn.Module) -> type:
    """The module's class; for packed experts, the class beneath bitsandbytes' parametrization."""
    return type(module).__mro__[1] if holds_packed(module) else type(module)


def as_trained(shape: ModelShape | None, layer: nn.Module | None) -> ModelShape | None:
    """The shape with the LoRA adapters of this layer or model, if it trains nothing else."""
    trained = (
        {} if layer is None else {n: p for n, p in layer.named_parameters() if p.requires_grad}
    )
    inside = () if layer is None else layer.modules()
    wrappers = [m for m in inside if "peft.ParamWrapper" in kinds_of(type(m))]
    counts = {id(a.weight): m.num_experts for m in wrappers for a in m.lora_A.values()}
    # ZeRO-3 holds shards
    sizes = [
        (getattr(p, "ds_shape", p.shape), counts.get(id(p), 1))
        for n, p in trained.items()
        if ".lora_A." in n
    ]
    # FSDP1's are flat. "all-linear" doubles the rank over gate and up of experts.
    ranks = [size[0] // experts for size, experts in sizes if len(size) == 2]
    ranks = [r for r, (_, experts) in zip(ranks, sizes) if experts == 1] or ranks
    if shape is None or not ranks or not all(".lora_" in name for name in trained):
        return shape
    known = {n for i in shape.kinds for n in shape.adaptable(i)}
    named = {part for name in trained for part in name.split(".lora_")[0].split(".")}
    named |= {f"experts.{m.parameter_name}" for m in wrappers if m.num_experts > 1}
    targets = named & known
    if not targets:
        return shape
    bases = {_quantised(m)[0] for m in layer.modules()} - {None}
    widest = max(p.element_size() for p in trained.values())
    return replace(
        shape,
        adapters=Adapters(max(ranks), min(bases, default="bf16"), tuple(sorted(targets)), widest),
    )


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a known quantised Linear."""
    return _quantised(module)[0] is not None


# --- torchao's projections that train -------------------------------------------------------------

_SAME_SCALE = "it rounds several tokens by one scale, and a tile's is not a row's"
# The casts of torchao.Float8Linear whose tensor has tokens. A weight is whole in every tile.
_FLOAT8_CASTS = ("input", "grad_output", "input_for_grad_weight", "grad_output_for_grad_weight")


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
        return _SAME_SCALE if _float8_over_tokens(module.config) else None
    weight = module.weight
    trained = type(weight) if weight.requires_grad else nn.Parameter
    for kind in (type(module), trained):
        if kind.__module__.startswith("torchao."):
            return f"torchao's {kind.__name__} may round several tokens by one scale"
    granularity = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
    return _SAME_SCALE if type(granularity).__name__ == "PerTensor" else None


def _float8_over_tokens(config) -> bool:
    """Whether a Float8LinearConfig has a cast with one scale for all tokens, or with one scale per
    channel in the weight gradient's matmul.

    A per-channel scale that is a power of two changes only the exponent, so it is allowed.
    """
    for name in _FLOAT8_CASTS:
        cast = getattr(config, f"cast_config_{name}")
        if cast.scaling_type.name != "DYNAMIC":
            continue
        by_channel = name.endswith("grad_weight") and not config.round_scales_to_power_of_2
        if cast.scaling_granularity.name == "TENSORWISE" or by_channel:
            return True
    return False
