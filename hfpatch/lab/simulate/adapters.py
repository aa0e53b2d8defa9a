"""LoRA and QLoRA for simulations: PEFT's adapters, over quantised Linears without values.

A packed Linear allocates what bitsandbytes' does on CUDA. With 4 bits: a dense copy of the weight
for the duration of each product, forward and backward. With 8 bits: integers of input and product
in the forward, a dense copy in the backward.
"""

import re

import torch
from torch import Tensor, nn

from hfpatch.lab.adapters import ALL_LINEAR, BLOCK, NESTED, Adapters
from hfpatch.lab.compat import int8_product
from hfpatch.lab.simulate.follow import current


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if isinstance(layer, Packed4bit):
            return nn.functional.linear(x, layer.dense(x.dtype))
        codes = x.flatten(0, -2).to(torch.float16).to(torch.int8)
        return int8_product(codes, layer.weight.t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.layer.dense(dy.dtype), None


class _Packed(nn.Linear):
    """Sizes and allocations of a quantised Linear; it has no values."""

    def __init__(self, linear: nn.Linear, shape: tuple, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        weight = torch.empty(shape, dtype=dtype, device=linear.weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def _buffer(self, name: str, count: int, dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.empty(count, dtype=dtype, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self)
        return y if self.bias is None else y + self.bias


class Packed4bit(_Packed):
    """bitsandbytes' Linear4bit: NF4 with nested scales."""

    def __init__(self, linear: nn.Linear):
        count = linear.weight.numel()
        super().__init__(linear, (count // 2, 1), torch.uint8)
        self._buffer("scales", count // BLOCK, torch.uint8)
        self._buffer("nested", -(-count // (BLOCK * NESTED)), torch.float32)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """A dense copy of the weight. It lives as long as the caller holds it."""
        scales = self.scales.float()  # alive while the copy is written
        made = scales.new_empty(self.out_features, self.in_features, dtype=dtype)
        if (follower := current()) is not None:
            follower.moves([self.weight, self.scales, self.nested, made])
        return made


class Packed8bit(_Packed):
    """bitsandbytes' Linear8bitLt: a scale a row."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear, linear.weight.shape, torch.int8)
        self._buffer("scales", self.out_features, torch.float32)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """A dense copy of the weight."""
        return self.weight.to(dtype)


PACKED = {"4bit": Packed4bit, "8bit": Packed8bit}


def adapted(model: nn.Module, adapters: Adapters) -> nn.Module:
    """PEFT's model with LoRA over this one. Adapters have the model's dtype, or float32 with an
    itemsize of 4. The base is frozen, and packed with a base of 4 or 8 bits.

    Raises ValueError where PEFT finds no layer of a target's name.
    """
    import peft

    dtype = model.dtype
    if adapters.base in PACKED:
        head = model.get_output_embeddings()
        linears = [n for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
        for name in linears:
            model.set_submodule(name, PACKED[adapters.base](model.get_submodule(name)))
    of_experts = [n for n in adapters.targets if n.startswith("experts.")]
    targets = [n for n in adapters.targets if n not in of_experts] or ALL_LINEAR
    settings = peft.LoraConfig(
        r=adapters.rank, target_modules=targets, target_parameters=of_experts or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    try:
        made = peft.get_peft_model(model, settings)
    except ValueError as error:  # no layer has the name, or a kernel reads its weight itself
        why = re.split(r"[.;] ", str(error))[0]
        raise ValueError(
            f"hfpatch: LoRA's targets must be Linear layers that PEFT adapts ({why}), got "
            f"{', '.join(adapters.targets) or ALL_LINEAR}. Name others with --lora-target."
        ) from error
    if adapters.itemsize == 4:
        dtype = torch.float32
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return made
