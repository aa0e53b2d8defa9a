"""A frozen Linear in 4 bits, for measurements on a machine without bitsandbytes.

NF4 with double quantisation as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314): 16 quantiles of a
normal distribution, blocks of 64 weights, their scales in 8 bits in blocks of 256: 0.516 bytes a
weight. Plain torch: the weight is written out in bf16 at each use, which bitsandbytes' fused
kernels do faster.
"""

import torch
from torch import Tensor, nn

import hfpatch

BLOCK, SUPER = 64, 256


def levels() -> Tensor:
    """The 16 values, float32, from -1 to 1: evenly spaced quantiles on either side of an exact zero
    (their appendix E).
    """
    last = 0.9677083
    quantile = torch.distributions.Normal(0.0, 1.0).icdf
    above = quantile(torch.linspace(last, 0.5, 9, dtype=torch.float64)[:-1])
    below = -quantile(torch.linspace(last, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (values / values.max()).float()


@hfpatch.token_wise
class Nf4Linear(nn.Linear):
    """A frozen Linear whose weight is kept as uint8 [out * in / 2]; x [..., in] to [..., out] in
    x's dtype.

    Raises ValueError where the weight does not fill whole blocks of 64.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        if weight.numel() % BLOCK:
            raise ValueError(
                f"hfpatch: a weight must hold whole blocks of {BLOCK}, got {tuple(weight.shape)}. "
                "Keep it in bf16."
            )
        blocks = weight.reshape(-1, BLOCK).float()
        scale = blocks.abs().amax(1).clamp_min(1e-12)
        # The nearest of 16 sorted levels, by the midpoints between them.
        table = levels().to(weight.device)
        code = torch.bucketize(
            blocks / scale[:, None], (table[1:] + table[:-1]) / 2, out_int32=True
        ).to(torch.uint8)
        code = code.reshape(-1, 2)
        packed = code[:, 0] << 4 | code[:, 1]
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        pad = -len(scale) % SUPER
        mean = scale.mean()
        groups = torch.cat([scale - mean, scale.new_zeros(pad)]).view(-1, SUPER)
        step = groups.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        self.register_buffer("scale", (groups / step).round().to(torch.int8))
        self.register_buffer("step", step)
        self.register_buffer("mean", mean)
        # Both nibbles of a byte at once.
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)
        self.register_buffer("pairs", pairs.to(weight.dtype), persistent=False)

    def dequantised(self) -> Tensor:
        """[out, in] in the dtype that the weight had."""
        scale = (self.scale * self.step + self.mean).view(-1)[: self.weight.numel() * 2 // BLOCK]
        values = nn.functional.embedding(self.weight.int(), self.pairs).view(-1, BLOCK)
        values *= scale.to(values.dtype)[:, None]
        return values.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return _Frozen.apply(x, self)


class _Frozen(torch.autograd.Function):
    """The weight is written out again in backward: nothing of its full size is kept between."""

    @staticmethod
    def forward(ctx, x, linear):
        ctx.linear = linear
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return nn.functional.linear(x, linear.dequantised().to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.linear.dequantised().to(dy.dtype), None


def quantise(model: nn.Module, skip: tuple = ("lm_head",)) -> None:
    """Every Linear of the model in 4 bits, in place, but for those whose name is in skip."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in skip:
                setattr(module, name, Nf4Linear(child))
                del child
