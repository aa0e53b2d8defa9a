"""Tiny models for tests: the same weights twice, one to stay as transformers made it."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCAB = 331


def tiny_config(**changes) -> LlamaConfig:
    """Three layers, grouped heads, an odd vocabulary."""
    sizes = dict(
        hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def tiny_llama(dtype=torch.float64, **changes) -> LlamaForCausalLM:
    """Weights of ordinary size: with the default 0.02 initial scale attention is uniform and hides mistakes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.1 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    return model.to(dtype).train()


class ExactRMSNorm(LlamaRMSNorm):
    """transformers' norm without its rounding to float32, which a float64 oracle must not have."""

    def forward(self, hidden_states):
        if hidden_states.dtype != torch.float64:
            return super().forward(hidden_states)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def pair(dtype=torch.float64, **changes):
    """The same model twice, the first with norms that are exact in float64."""
    model = tiny_llama(dtype, **changes)
    stock = copy.deepcopy(model)
    for module in stock.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = ExactRMSNorm
    return stock, model


def stock_loss(model, labels, num_items_in_batch=None, **inputs):
    """The model's causal loss; in float64 without transformers' rounding of the logits to float32."""
    if next(model.parameters()).dtype != torch.float64:
        return model(labels=labels, num_items_in_batch=num_items_in_batch, use_cache=False, **inputs).loss
    logits = model(use_cache=False, **inputs).logits[:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def tokens(B=2, T=37, seed=0, vocab=VOCAB):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters()}


def largest_difference(a: dict, b: dict) -> float:
    """The largest absolute difference of two dicts of gradients, which must have the same None entries."""
    assert {n for n, g in a.items() if g is None} == {n for n, g in b.items() if g is None}
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a if a[n] is not None)
