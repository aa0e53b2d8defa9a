"""Code of one's own on transformers' classes: what it adds, reads and switches stays."""

import pytest
import tiny
import torch
from families import small_model
from torch.nn.functional import pad
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama as hf

LAYER, MODEL, MLP = hf.LlamaDecoderLayer.forward, hf.LlamaModel.forward, hf.LlamaMLP.forward
ADDED: list = []  # terms of a loss, three a forward at most
ADD = ADDED.append


def shifts_in_one_layer(self, x, *args, **kwargs):
    if self.self_attn.layer_idx == 2:
        x = x + 0.5 * pad(x, (0, 0, 1, 0))[:, :-1]
    return LAYER(self, x, *args, **kwargs)


def adds_to_the_loss(self, x, *args, **kwargs):
    y = LAYER(self, x, *args, **kwargs)
    ADD(y.square().mean())
    return y


def rotates_and_adds(q, k, cos, sin, rotate=hf.apply_rotary_pos_emb):
    q, k = rotate(q, k, cos, sin)
    ADDED.append(q.square().mean())
    return q, k


def doubles_rows(self, x):
    return MLP(self, x) * (x.dim() - 1)


# transformers wraps the forward of each class derived from its layers.
Derived = type("Derived", (hf.LlamaDecoderLayer,), {"forward": adds_to_the_loss})


class AddingMLP(hf.LlamaMLP):
    def forward(self, x):
        if x.requires_grad:
            ADDED.append(self.gate_proj(x).square().mean())
        return super().forward(x)


def reads_padding(self, *args, **kwargs):
    out = MODEL(self, *args, **kwargs)
    ADDED.append(out.last_hidden_state.square().mean())
    return out


@pytest.mark.parametrize(
    "owner, name, own, terms",
    [
        (hf.LlamaDecoderLayer, "forward", shifts_in_one_layer, 0),
        (hf.LlamaDecoderLayer, "forward", adds_to_the_loss, 3),
        (hf.LlamaDecoderLayer, "forward", torch.enable_grad()(adds_to_the_loss), 3),
        (hf.LlamaDecoderLayer, "forward", Derived.forward, 3),
        (hf.LlamaMLP, "forward", torch.compiler.disable(doubles_rows), 0),
        (hf, "apply_rotary_pos_emb", rotates_and_adds, 3),
        (hf, "LlamaMLP", AddingMLP, 3),
        (hf.LlamaModel, "forward", reads_padding, 1),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_code_that_is_put_in_before_apply(owner, name, own, terms, monkeypatch):
    monkeypatch.setattr(owner, name, own)
    stock = tiny.llama(num_hidden_layers=3)
    given = tiny.labelled()
    given["attention_mask"] = (torch.arange(tiny.TOKENS) < torch.tensor([[24], [17]])).long()
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    # A layer that runs again in backward adds its term again, then too late to count.
    tiny.assert_as_good(
        tiny.patched(stock), stock, given, lambda out: out.loss + sum(ADDED[len(ADDED) - terms :])
    )


class HandsOn(LlamaForCausalLM):
    def forward(self, input_ids, *args, **kwargs):
        return super().forward(input_ids, *args, **kwargs)


class HandsOnInAnotherOrder(LlamaForCausalLM):
    def forward(self, attention_mask, input_ids, *args, **kwargs):
        return super().forward(input_ids, attention_mask, *args, **kwargs)


@pytest.mark.parametrize("kind", [HandsOn, HandsOnInAnotherOrder])
def test_arguments_by_position_reach_a_forward_that_hands_them_on(kind):
    stock = tiny.llama(kind)
    given = tiny.labelled()
    mask = (torch.arange(tiny.TOKENS) >= torch.tensor([[0], [9]])).long()
    found = []
    for model in (tiny.patched(stock), stock, tiny.exact(stock)):
        two = [given["input_ids"], mask][:: 1 if kind is HandsOn else -1]
        model(*two, None, labels=given["labels"]).loss.backward()
        found.append(tiny.gradients(model))
    tiny.assert_within(*found)


def test_hooks_of_the_head_see_the_last_hidden_states():
    """Granite scales its logits."""
    stock = small_model("granite", torch.float32)
    ours = tiny.patched(stock)
    given = {name: ids % 64 for name, ids in tiny.labelled().items()}
    double = tiny.exact(stock)
    for model in (ours, stock, double):
        model.lm_head.register_forward_pre_hook(lambda head, args: (args[0] + 1,))
    tiny.assert_within(*(tiny.step(model, given) for model in (ours, stock, double)))


def test_the_gradient_that_a_backward_gets_stays_as_it_is():
    """A layer of Nemotron-H returns x + attention(x): the gradient of x begins as its output's."""
    ours = tiny.patched(small_model("nemotron_h"), checkpointing="gpu")
    x = torch.randn(1, tiny.TOKENS, 64, dtype=torch.float64, requires_grad=True)
    out = ours.model(inputs_embeds=x, output_hidden_states=True).hidden_states
    given = [torch.ones_like(y) for y in out[1:-1]]
    torch.autograd.backward(out[1:-1], given)
    assert all((dy == 1).all() for dy in given)
