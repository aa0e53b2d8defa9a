"""Layers without attention: each tile by tile through time, with its input saved and nothing else
(layer/timed.py). That their gradients are those of whole rows, in every family and way of keeping,
test_time.py holds.
"""

import copy

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
        found.append(call.layer._hfpatch_index)
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
    ours = ready(stock, timed_layers, inputs)
    compared(ours, stock, batch(TOKENS))
    assert timed_layers == [0, 1, 2]
    assert len(inputs) == 4  # no output of a mixer


def test_what_a_mixer_reads_is_made_again(timed_layers):
    """Qwen4's streams are mixed by projections before the mixer. Nothing behind it reads those, and
    they were left out once, without a word.
    """
    stock = families.small_model("qwen4_exp_text")
    ours = ready(stock, timed_layers)
    compared(ours, stock, batch(20))
    assert timed_layers == [0, 1, 2]


def test_a_layer_without_a_mixer_goes_through_time_too(timed_layers):
    """Nemotron-H's layers are a mixer, an attention, an MLP or experts each."""
    stock = families.small_model("nemotron_h")
    ours = ready(stock, timed_layers)
    compared(ours, stock, batch(TOKENS))
    assert {1, 3} <= {*timed_layers}


def test_a_mixer_is_given_something_for_its_trial_alone(timed_layers, monkeypatch):
    """Each layer of each step finds the answer of the first."""
    from hfpatch.layer import timed

    asked, real = [], timed.tokens_tried
    monkeypatch.setattr(timed, "tokens_tried", lambda module: asked.append(module) or real(module))
    ours = ready(families.small_model(FAMILY), timed_layers)
    asked.clear()
    for _ in range(2):
        step(ours, batch(TOKENS))
    assert len(timed_layers) == 6 and len(asked) == 1


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


@pytest.mark.parametrize("where", ["before", "behind", "backward"])
def test_a_layer_with_hooks_goes_through_time(where, timed_layers):
    """Its hook may hand its input or its output to another reader, or change their gradient."""
    stock = families.small_model(FAMILY)
    ours = ready(stock, timed_layers)
    given, found = batch(TOKENS), []
    for model in (ours, stock):
        layer, read = find_decoder(model).layers[1], []
        if where == "before":
            layer.register_forward_pre_hook(lambda m, args, read=read: read.append(args[0]))
        elif where == "behind":
            layer.register_forward_hook(lambda m, args, y, read=read: read.append(y))
        else:
            layer.register_full_backward_pre_hook(lambda m, dys: tuple(2 * dy for dy in dys))
        with lifted():
            loss = model(**given, use_cache=False).loss
            (loss + sum(x.square().mean() for x in read)).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*found, 1e-12)
    assert timed_layers == [0, 1, 2]


def test_an_output_with_another_reader_has_both_gradients(monkeypatch):
    """One that no rule sees in forward."""
    stock = families.small_model(FAMILY)
    ours, _ = patched(stock)
    outputs, call, found = [], torch.nn.Module.__call__, []
    first = [find_decoder(m).layers[0] for m in (ours, stock)]

    def noting(module, *args, **kwargs):
        y = call(module, *args, **kwargs)
        outputs.extend([y] if module in first else [])
        return y

    monkeypatch.setattr(torch.nn.Module, "__call__", noting)
    for model in (ours, stock):
        with lifted():
            loss = model(**batch(TOKENS), use_cache=False).loss
            (loss + outputs.pop().square().sum()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*found, 1e-12)


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


@pytest.mark.parametrize("way", ["hook", "kept"])
def test_who_looks_at_a_gradient_between_layers_sees_that_layers(way, monkeypatch):
    """Each layer's backward makes the gradient of its input."""
    stock = families.small_model(FAMILY)
    ours, _ = patched(stock)
    call, seen, kept = torch.nn.Module.__call__, [], []
    first = [find_decoder(m).layers[0] for m in (ours, stock)]

    def looking(module, *args, **kwargs):
        y = call(module, *args, **kwargs)
        if module in first and way == "hook":
            y.register_hook(lambda dy: seen.append(dy.clone()))
        elif module in first:
            y.retain_grad()
            kept.append(y)
        return y

    monkeypatch.setattr(torch.nn.Module, "__call__", looking)
    compared(ours, stock, batch(TOKENS))
    got, wanted = seen or [y.grad for y in kept]
    assert_same({"dy": got}, {"dy": wanted}, 1e-12)


@pytest.mark.parametrize("every", [2, "auto"], ids=["segment", "tiles"])
def test_a_graph_that_is_cut_between_layers(every, monkeypatch):
    """Each part of it has a backward of its own, the first part's before the second's."""
    stock = families.small_model(FAMILY)
    ours, _ = patched(stock, hfpatch.Checkpointing(offload="host", tile=64, every=every))
    call, found = torch.nn.Module.__call__, []
    second = [find_decoder(m).layers[1] for m in (ours, stock)]

    def cutting(module, *args, **kwargs):
        if module in second:
            cut.append(args[0])
            args = (args[0].detach().requires_grad_(), *args[1:])
            cut.append(args[0])
        return call(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", cutting)
    for model in (ours, stock):
        cut = []
        with lifted():
            loss = model(**batch(TOKENS), use_cache=False).loss
            cut[0].square().mean().backward()
            loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        found[-1]["dx"] = cut[1].grad
    assert_same(*found, 1e-12)


def test_frozen_layers_at_the_start(timed_layers):
    """The gradient ends where the first trained weight is."""
    stock = families.small_model(FAMILY)
    stock.get_input_embeddings().requires_grad_(False)
    layers = find_decoder(stock).layers
    layers[0].requires_grad_(False)
    layers[1].mlp.requires_grad_(False)
    ours = ready(stock, timed_layers)
    compared(ours, stock, batch(TOKENS))
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


def operations(model, tokens: int) -> int:
    """How many operations a step dispatches; a fused one of ours counts as one, as it launches one
    kernel.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            views = torch.Tag.view_copy in op.tags or op.is_view
            self.count += not views
            return op(*args, **(kwargs or {}))

    given = {name: rows[:1] for name, rows in batch(tokens).items()}
    step(model, given)  # what is found out once
    with Counting() as counted:
        step(model, given)
    return counted.count


def test_a_tile_launches_no_more_than_a_row_of_its_length():
    """Under transformers' checkpointing, forward and backward."""
    stock = families.small_model(FAMILY).float()
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=256))
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    tile = operations(ours, 1024) - operations(ours, 768)
    row = operations(stock, 256)
    assert 0 < tile <= row
