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


# Quantised Linears: their base in budget/adapters.py, and the dense weight that their own backward
# computes.
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


def is_written_out(module: nn.Module) -> bool:
    """Whether this is a 4-bit Linear whose forward multiplies by the dense weight in its compute
    dtype."""
    if _quantised(module)[0] != "4bit" or (module.bias is not None and module.bias.requires_grad):
        return False
    # bitsandbytes' own; its packed format for CPUs has kernels of its own
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return not hasattr(module, "compute_dtype")
    settled = module.compute_type_is_set and state.dtype in (module.compute_dtype, torch.float32)
    return settled and not getattr(state, "packing_format_for_cpu", False)


def is_packed(experts: nn.Module, name: str) -> bool:
    """Whether this weight of fused experts is what bitsandbytes made of 4 bits, and no more."""
    made = modules_of(experts).get("parametrizations")
    steps = modules_of(made[name]).values() if made is not None and name in made else ()
    return [kinds_of(type(s)) & {_PACKED} for s in steps] == [{_PACKED}]


def holds_packed(module: nn.Module) -> bool:
    """Whether these are fused experts with such weights, and nothing else was put over them."""
    made = modules_of(module).get("parametrizations")
    return made is not None and all(is_packed(module, name) for name in modules_of(made))


def class_of(module: nn.Module) -> type:
    """The module's class, of fused experts the one under what bitsandbytes put over it."""
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
    # FSDP1's are flat; "all-linear" doubles the rank over gate and up of experts
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
