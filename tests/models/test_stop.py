"""The stop at a layer's attention: raised for gradients alone, and a forward that does not end there runs whole and is said."""

import copy

import families
import pytest
import tiny
import torch
from test_families import assert_close, batch, step
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.models import asking, silent, verdict

TILE = hfpatch.Checkpointing(offload="host", tile=16)


@pytest.fixture
def stops(monkeypatch):
    """As many entries as stops were raised."""
    raised = []

    class Counted(asking.Stopped):
        def __init__(self):
            raised.append(1)

    monkeypatch.setattr(asking, "Stopped", Counted)
    return raised


BY_FORWARDS = tiny.not_with_transformers_5_0(
    "records router logits by forwards on instances, which it finds a tile at a time"
)


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt_oss", marks=BY_FORWARDS), pytest.param("falcon_h1", marks=pytest.mark.long)]
)
def test_without_a_gradient_nothing_is_stopped(name, stops):
    """A common block, one that is asked (sinks, windows, experts) and one with a mixer; the MLP still runs by tiles."""
    stock = families.small_model(name)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE)
    stops.clear()
    step(ours, batch())
    assert bool(stops) == (name != "llama"), "a block's parts are called one by one"
    stops.clear()
    ours.requires_grad_(False)
    found = []
    layer = ours.model.layers[-1]
    mlp = layer.feed_forward if name == "falcon_h1" else layer.mlp
    part = mlp.router if name == "gpt_oss" else mlp.gate_proj
    part.register_forward_pre_hook(tiny.OfAnEngine(lambda _, args: found.append(args[0].numel() // args[0].shape[-1])))
    for model in (stock, ours):
        model.config.output_router_logits = name == "gpt_oss"
    got, wanted = (m(**batch(), use_cache=False) for m in (ours, stock))
    assert abs(got.loss - wanted.loss) <= 1e-5 * wanted.loss
    if name == "gpt_oss":
        for a, b in zip(got.router_logits, wanted.router_logits, strict=True):
            assert a.shape == b.shape and (a - b).norm() <= 1e-5 * b.norm()
    assert max(found) == 16  # tokens of both rows together
    ours.eval(), stock.eval()
    ids = batch()["input_ids"][:1]
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(ours.generate(ids, **more), stock.generate(ids, **more))
    assert not stops


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
    Idle: "something else than attention",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_layer_that_does_not_stop_runs_whole_and_is_said(kind, monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", kind)
    verdict._verdict.cache_clear()
    stock = tiny.llama(attn_implementation="eager")
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert any("checkpointed whole" in note and REASONS[kind] in note for note in report.notes), report
    assert_close(step(ours, tiny.labelled())[2], step(stock, tiny.labelled())[2])
    verdict._verdict.cache_clear()


class Skipping(LlamaDecoderLayer):
    """Leaves its attention out where it is told to, after it was asked."""

    __module__ = modeling_llama.__name__  # its attention is of its own library
    skips = False

    def forward(self, hidden_states, **kwargs):
        if self.skips:
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return super().forward(hidden_states, **kwargs) * 1.5


def test_a_layer_that_goes_another_way_later_runs_whole_from_then_on(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Skipping)
    verdict._verdict.cache_clear()
    stock = tiny.llama(attn_implementation="eager")
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(offload="host", tile=8))
    assert not any("whole" in note for note in ours._hfpatch_report.notes)
    assert_close(step(ours, tiny.labelled())[2], step(stock, tiny.labelled())[2])
    for model in (ours, stock):
        model.model.layers[1].skips = True
    with pytest.warns(UserWarning, match="runs whole from now on: its forward mixed tokens 0 times, not 1"):
        got = step(ours, tiny.labelled())[2]
    wanted = step(stock, tiny.labelled())[2]
    assert_close(got, wanted)
    assert_close(step(ours, tiny.labelled())[2], wanted)
    verdict._verdict.cache_clear()


class Experts(nn.Linear):
    """Flattens its tokens by a view, and gives a score a token behind its output."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        self.most = max(getattr(self, "most", 0), len(flat))
        return super().forward(flat).view(x.shape), flat[:, :2]


@pytest.mark.parametrize("widest", [4, 1])  # of one token a row, scores over flattened tokens look like rows of tokens
def test_what_takes_a_view_of_its_tokens_runs_by_tiles(widest):
    layer, x = nn.Module(), torch.randn(2, 10, 4)
    bounds = [(a, min(10, a + widest)) for a in range(0, 10, widest)]
    layer.attention, layer.experts = nn.Linear(4, 4), Experts(4, 4)
    wanted = layer.experts(x)
    layer.experts.most = 0
    with torch.no_grad(), silent.by_tiles(layer, ("attention",), bounds):
        got = layer.experts(x)
        assert layer.attention(x).shape == x.shape
    assert layer.experts.most == 2 * widest and [a.shape for a in got] == [b.shape for b in wanted]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
