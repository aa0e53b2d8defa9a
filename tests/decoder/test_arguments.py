"""Arguments of a layer beside its hidden states, and what the small instance never ran."""

import copy
import random

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
    """A user's layer of classes in one file. Of its MLP's output no gradient is read, unless it has
    a factor.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.film = nn.Linear(8, config.hidden_size)
        self.place = layer_idx
        self.drop_path = 0.5 * layer_idx
        self.norm_mix = 0.0

    def forward(self, hidden_states, condition=None, memory=None, **kwargs):
        return self.changed(super().forward(hidden_states, **kwargs), condition, memory)


class OwnModel(modeling_llama.LlamaModel):
    """Hands its layers a memory as long as the rows are."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, memory=torch.eye(24, 64, dtype=torch.float64)[None], **kwargs)


class Balanced(torch.autograd.Function):
    """DeepSeek-V2's AddAuxiliaryLoss on the hub: adds a loss's gradient and not its value."""

    @staticmethod
    def forward(ctx, h, loss):
        return h

    @staticmethod
    def backward(ctx, dh):
        return dh, torch.full((), 1e-3, dtype=torch.float64)


def noted(layer, h, condition, memory):
    layer.seen = h.detach().norm()
    return h


def dropped(layer, h, condition, memory):
    return h * (torch.rand(len(h), 1, 1) > layer.drop_path) if layer.drop_path else h


# What a layer does, by (layer, its output, the arguments).
CASES = {
    "condition": lambda layer, h, c, m: h if c is None else h * (1 + layer.film(c)[:, None]),
    "mix": lambda layer, h, c, m: h * (1 + layer.film.bias) if layer.norm_mix else h,
    "eval": lambda layer, h, c, m: h if layer.training else h * (1 + layer.film.bias),
    "place": lambda layer, h, c, m: h + layer.place * nn.functional.pad(h[:, :-1], (0, 0, 1, 0)),
    "memory": lambda layer, h, c, m: h + (h @ m.to(h).mT).softmax(-1) @ m.to(h),
    "balance": lambda layer, h, c, m: Balanced.apply(h, layer.mlp.gate_proj(h).square().mean()),
    "noted": noted,
    "rows dropped": dropped,
    "python's random": lambda layer, h, c, m: (
        h + layer.film(h[..., :8] * (1 + 1e-4 * random.random()))
    ),
}


def seeded(model, batch) -> dict:
    """The gradients of a step, and what its layers have noted."""
    torch.manual_seed(0)
    random.seed(0)
    found = tiny.step(model, batch)
    return found | {i: x.seen for i, x in enumerate(model.model.layers) if hasattr(x, "seen")}


@pytest.mark.parametrize(
    "case", [pytest.param("mix", marks=pytest.mark.long), *sorted(CASES.keys() - {"mix"})]
)
def test_what_the_small_instance_of_an_own_layer_never_ran(case, monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Own)
    monkeypatch.setattr(modeling_llama, "LlamaModel", OwnModel)
    monkeypatch.setattr(Own, "changed", CASES[case], raising=False)
    verdict._verdicts.clear()
    stock = tiny.llama(dtype=torch.float64).train(case != "eval")
    for layer in stock.model.layers:
        layer.norm_mix = 0.5 * (case == "mix")
    batch = tiny.labelled() | {"use_cache": False}
    if case == "condition":
        batch["condition"] = torch.randn(2, 8, dtype=torch.float64)
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(tile=8, plain=0))
    for _ in range(2):
        got, wanted = seeded(ours, batch), seeded(stock, batch)
        assert got.keys() == wanted.keys()
        for name, want in wanted.items():
            assert (got[name] - want).norm() <= 1e-5 * want.norm(), name
