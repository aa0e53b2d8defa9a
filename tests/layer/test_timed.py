"""Layers without attention: each tile by tile through time, with its input saved and nothing else
(layer/timed.py). That their gradients are those of whole rows, in every family and way of keeping,
test_time.py holds.
"""

import families
import pytest
import tiny
import torch
from numerics import lifted

import hfpatch
from hfpatch.compat import graph_task
from hfpatch.decoder.find import find_decoder
from hfpatch.layer.timed import TimedCall
from hfpatch.store.transfers import Transfers
from tests.decoder.test_families import batch, step
from tests.layer.test_time import TOKENS, assert_same, packed, patched

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")
FAMILY = "qwen3_5_text"  # three delta nets and an attention


@pytest.fixture
def timed_layers(monkeypatch):
    """The index of the layer of each call that goes through time itself."""
    found, run = [], TimedCall.forward

    def noting(call, *args, **kwargs):
        found.append(call.layer._hfpatch.index)
        return run(call, *args, **kwargs)

    monkeypatch.setattr(TimedCall, "forward", noting)
    return found


@pytest.fixture
def inputs(monkeypatch):
    """Shapes of the hidden states that a forward saves."""
    found, save = [], Transfers.save

    def noting(transfers, x):
        # in a backward the gradient of the attention's input waits for a while
        kept = graph_task() == -1 and x.shape == (2, TOKENS, 64)
        found.extend([tuple(x.shape)] if kept else [])
        return save(transfers, x)

    monkeypatch.setattr(Transfers, "save", noting)
    return found


def ready(stock, *noted: list):
    """A patched copy; what its small instance did is not noted."""
    ours, _ = patched(stock)
    for found in noted:
        found.clear()
    return ours


def compared(ours, stock, given, pieces=None, within=1e-12):
    with lifted():
        got, wanted = step(ours, given)[2], step(stock, given, pieces)[2]
    assert_same(got, wanted, within)


def test_its_input_is_all_that_a_layer_saves(timed_layers, inputs):
    stock = families.small_model(FAMILY)
    compared(ready(stock, timed_layers, inputs), stock, batch(TOKENS))
    assert timed_layers == [0, 1, 2]
    assert len(inputs) == 4  # no output of a mixer


def test_what_a_mixer_reads_is_made_again(timed_layers):
    """Qwen4's streams are mixed by projections before the mixer. Nothing behind it reads those, and
    they were left out once, without a word.
    """
    stock = families.small_model("qwen4_exp_text")
    compared(ready(stock, timed_layers), stock, batch(20))
    assert timed_layers == [0, 1, 2]


def test_a_layer_without_a_mixer_goes_through_time_too(timed_layers):
    """Nemotron-H's layers are a mixer, an attention, an MLP or experts each."""
    stock = families.small_model("nemotron_h")
    compared(ready(stock, timed_layers), stock, batch(TOKENS))
    assert {1, 3} <= {*timed_layers}


def test_documents(timed_layers):
    """Cut anywhere; where most are short, layers go one by one and documents share their MLPs'
    tiles.
    """
    stock = families.small_model(FAMILY)
    ours = ready(stock, timed_layers)
    given, pieces = packed()
    compared(ours, stock, given, pieces)
    assert timed_layers
    timed_layers.clear()
    short = given | {"position_ids": (torch.arange(TOKENS) % 11)[None].repeat(2, 1)}
    short["labels"] = short["labels"].masked_fill(short["position_ids"] == 0, -100)
    short["num_items_in_batch"] = (short["labels"] != -100).sum()
    spans = [(r, a, min(a + 11, TOKENS)) for r in range(2) for a in range(0, TOKENS, 11)]
    n = {"num_items_in_batch": short["num_items_in_batch"]}
    ones = [{k: short[k][r : r + 1, a:b] for k in ("input_ids", "labels")} | n for r, a, b in spans]
    compared(ours, stock, short, ones)
    assert not timed_layers


def test_hidden_states_are_those_of_each_layer(timed_layers):
    """A loss may read any of them: layers then go one by one."""
    stock = families.small_model(FAMILY)
    ours = ready(stock, timed_layers)
    found = []
    for model in (ours, stock):
        with lifted():
            out = model(**batch(TOKENS), use_cache=False, output_hidden_states=True)
            loss = out.loss + sum(h.square().mean() for h in out.hidden_states)
            loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*found, 1e-12)
    assert not timed_layers


def scaled(y):
    with torch.no_grad():
        y.mul_(3)


@pytest.mark.parametrize("every", [2, "auto"], ids=["segment", "tiles"])
@pytest.mark.parametrize("change", [lambda y: y.add_(1), scaled], ids=["with", "without a graph"])
def test_an_output_written_to_between_layers_is_kept(change, every, monkeypatch):
    """The layer before it cannot make it again."""
    stock = families.small_model(FAMILY)
    ours, _ = patched(stock, hfpatch.Checkpointing(offload="host", tile=64, every=every))
    call, first = torch.nn.Module.__call__, [find_decoder(m).layers[0] for m in (ours, stock)]

    def changing(module, *args, **kwargs):
        y = call(module, *args, **kwargs)
        if module in first:
            change(y)
        return y

    monkeypatch.setattr(torch.nn.Module, "__call__", changing)
    compared(ours, stock, batch(TOKENS))


def test_frozen_layers_at_the_start(timed_layers):
    """The gradient ends where the first trained weight is."""
    stock = families.small_model(FAMILY)
    stock.get_input_embeddings().requires_grad_(False)
    layers = find_decoder(stock).layers
    layers[0].requires_grad_(False)
    layers[1].mlp.requires_grad_(False)
    compared(ready(stock, timed_layers), stock, batch(TOKENS))
    assert timed_layers == [0, 1, 2]


def test_one_part_of_a_graph(timed_layers):
    """Gradients of some parameters alone, and then of all."""
    stock = families.small_model(FAMILY)
    ours = ready(stock, timed_layers)
    found = []
    for model in (ours, stock):
        with lifted():
            loss = model(**batch(TOKENS), use_cache=False).loss
            some = [p for n, p in model.named_parameters() if "layers.1." in n]
            one = torch.autograd.grad(loss, some, retain_graph=True)
            loss.backward()
        every = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(every | {f"one {i}": x for i, x in enumerate(one)})
    assert_same(*found, 1e-12)
    with pytest.raises(
        RuntimeError, match="this graph was freed by its first backward|second time"
    ):
        loss = ours(**batch(TOKENS), use_cache=False).loss
        loss.backward()
        loss.backward()


def test_weights_written_to_before_backward_are_noticed():
    """Those of any layer."""
    for index in range(3):
        ours, _ = patched(families.small_model(FAMILY))
        loss = ours(**batch(TOKENS), use_cache=False).loss
        with torch.no_grad():
            find_decoder(ours).layers[index].mlp.up_proj.weight.add_(1)
        with pytest.raises(RuntimeError, match="between a layer's forward and its backward"):
            loss.backward()
