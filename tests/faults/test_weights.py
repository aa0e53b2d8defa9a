"""Backward runs on the weights that forward ran on, or says that they are gone."""

import pytest
import torch
from tiny import gradients, largest_difference, stock_loss
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook

import hfpatch
from tests.layer.deep import pair, tokens

BUDGET = 4096 * 2.0**-52
WAYS = [
    hfpatch.Checkpointing(offload="host", tile=14),
    hfpatch.Checkpointing(offload="host", tile=4096, every=2),
]
STREAMED = hfpatch.Checkpointing(offload="host", tile=14, frozen_weights="host")


@pytest.mark.parametrize("settings", WAYS, ids=["tiles", "every 2"])
@pytest.mark.parametrize("frozen", [False, True])
def test_functional_call_left_before_backward_is_refused(settings, frozen):
    _, model = pair()
    hfpatch.apply(model, checkpointing=settings)
    ids = tokens()
    weights = {n: 2 * p.detach() for n, p in model.named_parameters()}
    for name, weight in weights.items():
        weight.requires_grad_(not frozen or "norm" in name)
    loss = functional_call(model, weights, (), {"input_ids": ids, "labels": ids}).loss
    with pytest.raises(RuntimeError, match="was replaced or modified in place between"):
        loss.backward()


@pytest.mark.parametrize("settings", WAYS, ids=["tiles", "every 2"])
@pytest.mark.parametrize("trained", [True, False])
def test_weights_written_to_before_backward_are_noticed(settings, trained):
    _, model = pair()
    hfpatch.apply(model, checkpointing=settings)
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(trained)
    ids = tokens()
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        weight.mul_(1.1)
    with pytest.raises(
        RuntimeError, match="Linear.weight was replaced or modified in place.*after backward"
    ):
        loss.backward()


@hfpatch.token_wise
class Casting(torch.nn.Linear):
    """As NLLB-MoE's routers do."""

    def forward(self, x):
        self.to(x.dtype)
        return super().forward(x)


@pytest.mark.parametrize(
    "settings", [None, *WAYS, STREAMED], ids=["whole", "tiles", "every 2", "streamed"]
)
def test_a_layer_that_casts_its_weights_in_its_forward_edits_nothing(settings):
    stock, model = pair()
    for m in (stock, model):
        for layer in m.model.layers:
            up = Casting(*reversed(layer.mlp.up_proj.weight.shape), bias=False)
            up.weight.data = layer.mlp.up_proj.weight.data
            layer.mlp.up_proj = up.requires_grad_(False)
            layer.mlp.gate_proj.requires_grad_(False)
    hfpatch.apply(model, checkpointing=settings or WAYS[0])
    if settings is None:
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: None)  # so that it runs untiled
    ids = tokens()
    for _ in range(2):  # the layers are asked at their first call, which casts too
        for m in (stock, model):
            m.zero_grad()
            for layer in m.model.layers:
                layer.mlp.up_proj.float()
        stock_loss(stock, ids, input_ids=ids).backward()
        model(ids, labels=ids).loss.backward()
        assert largest_difference(gradients(stock), gradients(model)) < BUDGET


class Gained(torch.nn.Module):
    """A layer's MLP with a buffer that it reads, one that it writes, and dropout behind it."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.drop = mlp, torch.nn.Dropout(0.5)
        self.register_buffer("gain", torch.tensor(1.3, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x):
        self.seen.add_(1)
        return self.drop(self.mlp(x) * self.gain)


EDITS = {
    # what is done to layer 1 (a gained one, frozen) between forward and backward -> what is said,
    # None where gradients are as ever
    "buffer in place": (lambda m, layer: layer.mlp.gain.mul_(2),
                        "Gained.gain was replaced or modified in place"),
    "another buffer": (lambda m, layer: setattr(layer.mlp, "gain", layer.mlp.gain * 2),
                       "Gained.gain was replaced or modified in place"),
    "another module": (lambda m, layer: setattr(layer.mlp, "mlp", torch.nn.Identity()),
                       "modules, .* of a LlamaDecoderLayer changed"),
    "undo": (lambda m, layer: hfpatch.undo(m), "modules, .* of a LlamaDecoderLayer changed"),
    "eval": (lambda m, layer: m.eval(), None),
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "whole"])
@pytest.mark.parametrize("edit", EDITS)
def test_what_a_layer_is_between_forward_and_backward(edit, whole):
    """It runs again as it was, or says that it cannot; a frozen layer below trained ones is run
    again too.
    """
    change, said = EDITS[edit]
    _, model = pair()
    for layer in model.model.layers:
        layer.mlp = Gained(layer.mlp)
    model.model.layers[1].requires_grad_(False)
    hfpatch.apply(model, checkpointing=WAYS[0])
    if whole:
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: None)
    ids, found = tokens(), []
    for edited in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(ids, labels=ids).loss
        if edited:
            change(model, model.model.layers[1])
        if edited and said:
            with pytest.raises(RuntimeError, match=f"hfpatch: .*{said}.*after backward"):
                loss.backward()
            return
        loss.backward()
        found.append(model.model.embed_tokens.weight.grad.clone())
    assert torch.equal(*found)


def _doubled(module):
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)
    return lambda: delattr(module, "forward")


# what is put around a module, or all -> what takes it away again
AROUND = {
    "forward hook": lambda m: m.register_forward_hook(lambda _, given, known, out: 2 * out,
                                                      with_kwargs=True).remove,
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, given: (2 * given[0],)).remove,
    "backward hook": lambda m: m.register_full_backward_hook(lambda _, dx, dy: (2 * dx[0],)).remove,
    "hook on all": lambda m: register_module_forward_hook(
        lambda m, given, out: 2 * out if type(m) is torch.nn.Linear else None
    ).remove,
    "forward": _doubled,
}  # fmt: skip


@pytest.mark.parametrize("goes", [False, True], ids=["comes", "goes"])
@pytest.mark.parametrize("settings", WAYS, ids=["tiles", "every 2"])
@pytest.mark.parametrize("kind", AROUND)
def test_hooks_and_forwards_that_come_or_go_before_the_backward(kind, settings, goes):
    """The layer would run again with others than it had."""
    _, model = pair()
    hfpatch.apply(model, checkpointing=settings, rms_norm=False)  # so that modules are called
    ids, module = tokens(), model.model.layers[0].self_attn.q_proj
    take_away = AROUND[kind](module) if goes else None
    loss = model.model(ids, use_cache=False).last_hidden_state.square().mean()
    if goes:
        take_away()
    else:
        take_away = AROUND[kind](module)
    try:
        with pytest.raises(
            RuntimeError,
            match="hfpatch: modules, hooks, forwards or merged adapters of a .*after backward",
        ):
            loss.backward()
    finally:
        if not goes:
            take_away()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()  # and nothing of it stays


@pytest.mark.parametrize("whole", [False, True], ids=["tiles", "whole"])
def test_adapters_that_are_on_again_at_the_backward(whole):
    """`with model.disable_adapter():` around a forward alone; and what is merged into a weight is
    noticed.
    """
    from peft import LoraConfig, get_peft_model

    stock, model = pair()
    hfpatch.apply(model, checkpointing=WAYS[0])
    adapted = get_peft_model(
        model, LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    if whole:
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: None)
    ids = tokens()
    for m in (stock, model):
        m.get_input_embeddings().weight.requires_grad_(True)
    stock_loss(stock, ids, input_ids=ids).backward()
    with adapted.disable_adapter():
        loss = model(ids, labels=ids).loss
    loss.backward()
    got, expected = (m.get_input_embeddings().weight.grad for m in (model, stock))
    assert (got - expected).abs().max() < BUDGET
    loss = model(ids, labels=ids).loss
    adapted.merge_adapter()
    with pytest.raises(
        RuntimeError,
        match="merged adapters of a LlamaDecoderLayer changed",
    ):
        loss.backward()


def fallbacks(model):
    """Each way to whole layers."""
    yield (
        "dropout",
        lambda m: [setattr(layer.self_attn, "attention_dropout", 1e-9) for layer in m.model.layers],
        {},
    )
    yield (
        "hooks",
        lambda m: [
            layer.self_attn.register_forward_hook(lambda *a: None) for layer in m.model.layers
        ],
        {},
    )
    yield (
        "4D mask",
        lambda m: None,
        {"attention_mask": torch.ones(37, 37, dtype=torch.bool).tril()[None, None]},
    )


@pytest.mark.parametrize("index", range(3), ids=["dropout", "hooks", "4D mask"])
@pytest.mark.parametrize("every", [2, 3])
def test_segments_and_layers_that_run_whole(every, index):
    stock, model = pair()
    _, prepare, inputs = list(fallbacks(model))[index]
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14, every=every))
    prepare(model)
    ids = tokens()
    torch.manual_seed(1)
    stock_loss(stock, ids, input_ids=ids).backward()
    torch.manual_seed(1)
    model(ids, labels=ids, **inputs).loss.backward()
    got, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (model, stock))
    assert largest_difference(expected, got) < (1e-5 if index == 0 else BUDGET)
