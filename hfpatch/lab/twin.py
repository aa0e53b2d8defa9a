"""A float64 twin of a model. transformers' norm and loss cast to float32, the twin's do not."""

import copy

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hfpatch.layer.strangers import token_wise


@token_wise
class ExactNorm(LlamaRMSNorm):
    """transformers' norm, without its cast of float64 inputs to float32."""

    def forward(self, x):
        if x.dtype != torch.float64:
            return super().forward(x)
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )


def exact_loss(
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    **kwargs,
):
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1)
    total = nn.functional.cross_entropy(
        logits.reshape(target.numel(), -1), target, ignore_index=ignore_index, reduction="sum"
    )
    if num_items_in_batch is None:
        num_items_in_batch = (target != ignore_index).sum()
    return total / num_items_in_batch


def with_exact_norms(model: nn.Module) -> nn.Module:
    """A copy of a stock model in the same dtype, with ExactNorm as its norms."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) in (LlamaRMSNorm, Qwen3RMSNorm):
            module.__class__ = ExactNorm
    return twin


def exact(model: nn.Module) -> nn.Module:
    """A float64 twin of a stock model, with norms and a loss that do not cast to float32."""
    twin = with_exact_norms(model).double()
    for module in twin.modules():
        if hasattr(module, "lm_head") and hasattr(module, "loss_function"):
            module.loss_function = exact_loss
    return twin
