"""Arguments of a layer beside its hidden states, and what the small instance never ran."""

import copy

import pytest
import tiny
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.decoder import verdict


class Gained(LlamaDecoderLayer):
    """Its MLP's output, which no gradient reads in Llama, is multiplied by an argument."""

    def forward(self, hidden_states, position_embeddings=None, gain=1.0, **kwargs):
        normed = self.input_layernorm(hidden_states)
        h = (
            hidden_states
            + self.self_attn(normed, position_embeddings=position_embeddings, **kwargs)[0]
        )
        return h + self.mlp(self.post_attention_layernorm(h)) * gain


Gained.__module__ = LlamaDecoderLayer.__module__


def gradients(model, trained) -> list:
    model.zero_grad()
    gain = (
        torch.linspace(0.5, 2, 24 * 64, dtype=torch.float64)
        .view(1, 24, 64)
        .repeat(2, 1, 1)
        .requires_grad_()
    )
    model.model(input_ids=tiny.ids(), gain=gain, use_cache=False).last_hidden_state.pow(
        2
    ).sum().backward()
    return [gain.grad, *(p.grad.clone() for p in trained(model))]


@pytest.mark.parametrize("tile", [16, 4096])
def test_an_argument_reads_values_that_nobody_else_does(tile, monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Gained)
    verdict._verdicts.clear()
    stock = tiny.llama(dtype=torch.float64)
    ours = copy.deepcopy(stock)
    settings = hfpatch.Checkpointing(offload="gpu", tile=tile, plain=0)
    hfpatch.apply(ours, checkpointing=settings, rms_norm=False, rope=False, mlp=False, loss=False)
    trained = lambda m: [  # noqa: E731
        m.model.layers[0].mlp.up_proj.weight,
        m.model.layers[1].self_attn.q_proj.weight,
    ]
    gradients(ours, trained)
    assert ours.model.layers[0]._hfpatch.traits.unread_after, (
        "no value is left out: the test tests nothing"
    )
    for got, want in zip(gradients(ours, trained), gradients(stock, trained)):
        assert (got - want).norm() < 1e-5 * want.norm()


class Attention(modeling_llama.LlamaAttention):
    pass


class MLP(modeling_llama.LlamaMLP):
    pass


class Own(LlamaDecoderLayer):
    """A user's layer of classes in one file, whose output has a factor in some cases only."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.film = nn.Linear(8, config.hidden_size)
        self.norm_mix = 0.0

    def forward(self, hidden_states, condition=None, **kwargs):
        h = super().forward(hidden_states, **kwargs)
        if condition is not None:
            return h * (1 + self.film(condition)[:, None])
        return h * (1 + self.film.bias) if self.norm_mix or not self.training else h


@pytest.mark.parametrize("case", ["condition", "mix", "eval"])
def test_what_the_small_instance_of_an_own_layer_never_ran(case, monkeypatch):
    """The MLP's output, of which no gradient is read without the factor."""
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Own)
    verdict._verdicts.clear()
    stock = tiny.llama().train(case != "eval")
    for layer in stock.model.layers:
        layer.norm_mix = 0.5 * (case == "mix")
    batch = tiny.labelled() | {"use_cache": False}
    if case == "condition":
        batch["condition"] = torch.randn(2, 8)
    tiny.assert_as_good(tiny.patched(stock), stock, batch)
