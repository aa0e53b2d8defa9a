"""Layers that are stopped at their attention, with and without gradients; a layer that cannot be
stopped runs untiled.
"""

import copy

import families
import pytest
import tiny
import torch
from test_families import assert_close, batch, step
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.decoder import verdict

TILE = hfpatch.Checkpointing(offload="host", tile=16)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt_oss",
        pytest.param("falcon_h1", marks=pytest.mark.long),
    ],
)
def test_without_a_gradient_layers_run_by_tiles(name):
    """A plain layer, one with sinks, windows and experts, and one with a mixer, frozen and
    under no_grad.
    """
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    step(ours, batch())
    ours.requires_grad_(False)
    found = []
    layer = ours.model.layers[-1]
    mlp = layer.feed_forward if name == "falcon_h1" else layer.mlp
    part = mlp.router if name == "gpt_oss" else mlp.gate_proj
    part.register_forward_pre_hook(
        tiny.OfAnEngine(lambda _, args: found.append(args[0].numel() // args[0].shape[-1]))
    )
    for model in (stock, ours):
        model.config.output_router_logits = name == "gpt_oss"
    got, wanted = (m(**batch(), use_cache=False) for m in (ours, stock))
    assert abs(got.loss - wanted.loss) <= 1e-5 * wanted.loss
    if name == "gpt_oss":
        for a, b in zip(got.router_logits, wanted.router_logits, strict=True):
            assert a.shape == b.shape and (a - b).norm() <= 1e-5 * b.norm()
    assert max(found) == 16  # tokens of both rows together
    for model in (stock, ours):
        model.eval()
        model.config.output_router_logits = False  # older gpt-oss fails with them beside a cache
    ids = batch()["input_ids"][:1]
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(ours.generate(ids, **more), stock.generate(ids, **more))


class Swallowing(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        out = hidden_states
        try:
            out = super().forward(hidden_states, **kwargs)
        finally:
            return out  # noqa: B012


class Catching(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        try:
            return super().forward(hidden_states, **kwargs)
        except BaseException:
            return hidden_states


class Idle(LlamaDecoderLayer):
    """Calls no attention of transformers' interface: keys of its own."""

    def forward(self, hidden_states, **kwargs):
        h = self.self_attn.v_proj(self.input_layernorm(hidden_states))
        seen = torch.ones(h.shape[1], h.shape[1], dtype=h.dtype).tril()
        h = (seen / seen.sum(1, keepdim=True)) @ h
        h = hidden_states + self.self_attn.o_proj(torch.cat([h, h], -1))
        return h + self.mlp(self.post_attention_layernorm(h))


REASONS = {
    Swallowing: "catches what stops it",
    Catching: "catches what stops it",
    Idle: "something other than attention",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_layer_that_does_not_stop_runs_whole_and_is_said(kind, monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", kind)
    verdict._verdicts.clear()
    stock = tiny.llama(attn_implementation="eager")
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert any("run untiled" in note and REASONS[kind] in note for note in report.notes), report
    assert_close(step(ours, tiny.labelled())[2], step(stock, tiny.labelled())[2])
    verdict._verdicts.clear()


class Skipping(LlamaDecoderLayer):
    """Leaves its attention out where it is told to, after it was asked."""

    __module__ = modeling_llama.__name__  # its attention is of its own library
    skips = False

    def forward(self, hidden_states, **kwargs):
        if self.skips:
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return super().forward(hidden_states, **kwargs) * 1.5


def test_a_layer_that_goes_another_way_later_is_refused(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Skipping)
    verdict._verdicts.clear()
    stock = tiny.llama(attn_implementation="eager")
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(offload="host", tile=8))
    assert not any("untiled" in note for note in ours._hfpatch_report.notes)
    assert_close(step(ours, tiny.labelled())[2], step(stock, tiny.labelled())[2])
    ours.model.layers[1].skips = True
    with pytest.raises(
        RuntimeError, match="a Skipping does not mix tokens .* mixed tokens 0 times, not 1. Call"
    ):
        step(ours, tiny.labelled())
    verdict._verdicts.clear()
