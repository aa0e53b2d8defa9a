"""The block whose derivatives are written out: bit for bit what modules and autograd give, and it
steps aside for who looks on.
"""

import gc
import weakref
from collections import Counter, OrderedDict

import pytest
import tiny
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import hfpatch
from hfpatch.layer import direct, function
from hfpatch.layer.arguments import takes_by_name
from hfpatch.layer.direct import Direct


def qwen3():
    torch.manual_seed(0)
    settings = {
        k: v
        for k, v in tiny.config().to_dict().items()
        if k in vars(Qwen3Config()) and k != "model_type"
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings | {"head_dim": 16})).to(torch.bfloat16).train()


MODELS = {
    "llama": lambda: tiny.llama(dtype=torch.bfloat16),
    "biases": lambda: tiny.llama(dtype=torch.bfloat16, attention_bias=True, mlp_bias=True),
    "norms of heads": qwen3,
}
FROZEN = {
    "all trained": (),
    "inputs frozen": ("embed",),
    "some frozen": ("q_proj", "down_proj", "norm", "v_proj.bias"),
}
KEPT = {
    "one tile": {"tile": 64},
    "tiles": {"tile": 8},
    "known": {"tile": 8, "keep": ("mid", "gate_up")},
}


@pytest.fixture
def used(monkeypatch):
    """Tiles that ran behind attention without a module's call."""
    calls, after = [], Direct.after
    monkeypatch.setattr(
        Direct, "after", lambda *args, **kwargs: calls.append(1) or after(*args, **kwargs)
    )
    return calls


STEPS = ("before", "after", "after_backward", "before_backward")


@pytest.mark.parametrize("tile, tiles", [(8, 6), (64, 1)])
def test_a_llama_runs_by_its_written_out_form(tile, tiles, monkeypatch):
    """In every layer and tile, both ways: a rule that kept it away would cost time in silence."""
    counts = Counter()
    for name in STEPS:
        run = getattr(Direct, name)
        monkeypatch.setattr(
            Direct,
            name,
            lambda *args, run=run, name=name, **kwargs: (
                counts.update([name]) or run(*args, **kwargs)
            ),
        )
    settings = hfpatch.Checkpointing(plain=0, tile=tile, keep=(), save_attention=True, every=1)
    ours = tiny.patched(tiny.llama(), checkpointing=settings)
    for _ in range(2):  # the second finds what was noted of the layers
        counts.clear()
        tiny.step(ours, tiny.labelled())
        layers = len(ours.model.layers)
        # before attention: in forward, for attention's backward and for its own; one tile's graph
        # serves both
        runs = dict(zip(STEPS, (3 if tiles > 1 else 2, 1, 1, 1)))
        assert counts == {name: n * layers * tiles for name, n in runs.items()}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_modules_to_the_bit(model, frozen, kept, used, monkeypatch):
    model = MODELS[model]()
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in FROZEN[frozen]))
    settings = hfpatch.Checkpointing(plain=0, **KEPT[kept])
    got = tiny.step(tiny.patched(model, checkpointing=settings), tiny.labelled())
    assert used
    used.clear()
    monkeypatch.setattr(function, "direct_of", lambda *args: None)
    # What is known changes no bit either: of a sum its two gradients are added in the norm's pass,
    #     as where it is not known.
    settings = hfpatch.Checkpointing(plain=0, tile=KEPT[kept]["tile"], keep=())
    wanted = tiny.step(tiny.patched(model, checkpointing=settings), tiny.labelled())
    assert not used and got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("name", ["mlp.down_proj", "input_layernorm", "mlp", "self_attn.q_proj"])
def test_who_looks_on_sees_every_call(name, used):
    ours, seen = tiny.patched(tiny.llama()), []
    tiny.step(ours, tiny.labelled())
    found = len(used)
    for layer in ours.model.layers:
        layer.get_submodule(name).register_forward_hook(tiny.OfAnEngine(lambda *_: seen.append(1)))
    tiny.step(ours, tiny.labelled())
    assert found and len(used) == found and seen


@pytest.mark.parametrize("name", ["mlp", "input_layernorm"])
def test_a_forward_on_a_fused_class_is_called(name, used):
    ours, seen = tiny.patched(tiny.llama()), []
    kind = type(ours.model.layers[0].get_submodule(name))
    forward = kind.forward
    kind.forward = lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)
    try:
        tiny.step(ours, tiny.labelled())
    finally:
        del kind.forward
    assert seen and not used


def test_a_bias_that_is_no_parameter_is_added():
    models, bias = [tiny.patched(tiny.llama()) for _ in range(2)], 0.2 * torch.randn(112)
    for model, made in zip(
        models, (torch.Tensor.clone, lambda b: torch.nn.Parameter(b, requires_grad=False))
    ):
        for layer in model.model.layers:
            del layer.mlp.gate_proj.bias
            layer.mlp.gate_proj.bias = made(bias)
    got, wanted = (tiny.step(model, tiny.labelled()) for model in models)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("tile", [8, 64])
def test_a_leaf_that_is_no_parameter_gets_its_gradient(tile):
    ours = tiny.patched(
        tiny.llama(mlp_bias=True), checkpointing=hfpatch.Checkpointing(plain=0, tile=tile)
    )
    wanted = tiny.step(ours, tiny.labelled())
    up = ours.model.layers[1].mlp.up_proj
    bias = up.bias.detach().clone().requires_grad_()
    del up.bias
    up.bias = bias
    ours.zero_grad()
    got = tiny.step(ours, tiny.labelled())
    name = "model.layers.1.mlp.up_proj.bias"
    # of several tiles, added in its own dtype
    assert torch.allclose(bias.grad, wanted.pop(name), rtol=1e-5)
    assert all(torch.equal(got[n], value) for n, value in wanted.items())


def test_weights_pruned_before_their_backward_are_those_of_forward(used):
    ours = tiny.patched(tiny.llama())
    wanted = tiny.step(ours, tiny.labelled())
    ours.zero_grad()
    loss = ours(**tiny.labelled()).loss
    for layer in ours.model.layers:
        for name in ("input_layernorm", "mlp.up_proj"):
            prune.l1_unstructured(layer.get_submodule(name), "weight", 0.5)
    loss.backward()
    got = {n.replace("_orig", ""): p.grad for n, p in ours.named_parameters()}
    assert used and all(torch.equal(got[n], value) for n, value in wanted.items() if n != "loss")


def test_a_norm_of_another_width_is_refused():
    ours = tiny.patched(tiny.llama())
    ours.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"expected weight \[D\] or None"):
        ours(**tiny.labelled())


@pytest.mark.parametrize("trained", [False, True])
def test_what_only_weights_gradients_read_is_kept_for_them_alone(trained, monkeypatch):
    """A frozen projection's input would live on beside its own gradient."""
    inputs, alive = {}, []
    watch = lambda name, ys: inputs.update({name: StorageWeakRef(ys[0].untyped_storage())}) or ys  # noqa: E731
    ops, spied = direct._OPS[False], {}
    for norm, name in (("norm", "h"), ("add_norm", "normed")):
        run = getattr(ops, norm)
        spied[norm] = lambda *args, run=run, name=name: watch(name, run(*args))
    seen = lambda name: alive.append(not inputs[name].expired())  # noqa: E731
    spied["rope"] = lambda *args: (seen("h") if args[4] else None) or ops.rope(*args)
    spied["swiglu_back"] = lambda *args: seen("normed") or ops.swiglu_back(*args)
    monkeypatch.setitem(direct._OPS, False, ops._replace(**spied))
    ours = tiny.patched(tiny.llama(), checkpointing=hfpatch.Checkpointing(plain=0, tile=8))
    for name, p in ours.named_parameters():
        p.requires_grad_(trained or "layers" not in name)
    tiny.step(ours, tiny.labelled())
    assert alive and all(lives == trained for lives in alive)


ANGLES = torch.ones(1, 4, 8), torch.ones(1, 4, 8)
OTHERS = {
    "angles": ({"position_embeddings": ANGLES}, True),
    "angles that want a gradient": (
        {"position_embeddings": (ANGLES[0], ANGLES[1].clone().requires_grad_())},
        False,
    ),
    "a number": ({"position_embeddings": ANGLES, "num_items_in_batch": torch.tensor(3.0)}, True),
    "offsets": ({"position_embeddings": ANGLES, "offsets": torch.arange(4)}, True),
    "values": ({"position_embeddings": ANGLES, "deepstack": torch.ones(4)}, False),
    "an object": ({"position_embeddings": ANGLES, "settings": {"x": torch.arange(4)}}, True),
    "a gradient in an object": ({"settings": {"x": torch.ones(4, requires_grad=True)}}, False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_block_leaves_no_argument_aside_that_matters(name):
    kwargs, by_name = OTHERS[name]
    assert takes_by_name((), kwargs) is by_name
    if not by_name:
        assert not takes_by_name((kwargs.popitem()[1],), {})


class Halved(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) / 2


def hooked(layer):
    layer.mlp.register_forward_hook(lambda module, args, y: y / 2)


def forward_of_its_own(layer):
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) / 2


def wrapped(layer):
    layer.mlp.down_proj = Halved(layer.mlp.down_proj)


def hooked_on_all(layer):
    hook = lambda module, args, y: y / 2 if module is layer.mlp else y  # noqa: E731
    torch.nn.modules.module.register_module_forward_hook(hook)


def class_patched(layer):
    kind = layer.input_layernorm._hfpatch_base
    kind.forward = lambda self, x: 2 * self.weight * x


CHANGES = {
    "hook": hooked,
    "forward": forward_of_its_own,
    "module": wrapped,
    "hook on all": hooked_on_all,
    "class": class_patched,
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.ReLU()),
    "attention that is not causal": lambda layer: setattr(layer.self_attn, "is_causal", False),
    "scale": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "frozen": lambda layer: layer.mlp.up_proj.weight.requires_grad_(False),
    "weight": lambda layer: setattr(
        layer.mlp.up_proj, "weight", torch.nn.Parameter(layer.mlp.up_proj.weight.detach() / 2)
    ),
    "bias": lambda layer: setattr(
        layer.mlp.up_proj, "bias", torch.nn.Parameter(torch.ones(tiny.config().intermediate_size))
    ),
    "tied": lambda layer: setattr(layer.self_attn.v_proj, "weight", layer.self_attn.k_proj.weight),
    "data": lambda layer: setattr(
        layer.mlp.up_proj.weight, "data", layer.mlp.up_proj.weight.data / 2
    ),
}


@pytest.mark.filterwarnings("ignore:hfpatch. the loss runs through whole logits")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_behind_a_step_is_seen(change, monkeypatch):
    """What was found of a layer's modules holds for as long as all stands in them that stood
    there.
    """
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", OrderedDict())
    kind = type(tiny.llama().model.layers[0].input_layernorm)
    monkeypatch.setattr(kind, "forward", kind.forward)
    steps = []
    for first in (True, False):
        ours = tiny.patched(tiny.llama(), checkpointing=hfpatch.Checkpointing(plain=0, tile=8))
        if first:
            steps.append(tiny.step(ours, tiny.labelled()))
            steps.append(tiny.step(ours, tiny.labelled()))
            ours.zero_grad()
        with monkeypatch.context() as context:
            context.setattr(kind, "forward", kind.forward)
            CHANGES[change](ours.model.layers[1])
            steps.append(tiny.step(ours, tiny.labelled()))
        torch.nn.modules.module._global_forward_hooks.clear()
    _, before, after, fresh = steps
    assert after.keys() == fresh.keys() and all(torch.equal(after[n], fresh[n]) for n in fresh)
    assert after.keys() != before.keys() or any(
        not torch.equal(after[n], before[n]) for n in before
    )


def as_buffer(layer):
    weight = layer.mlp.up_proj.weight.detach()
    del layer.mlp.up_proj.weight
    layer.mlp.up_proj.register_buffer("weight", weight / 2)


EDITS = {
    **{name: CHANGES[name] for name in ("weight", "bias", "tied")},
    "bias of attention": lambda layer: setattr(
        layer.self_attn.q_proj, "bias", torch.nn.Parameter(torch.ones(tiny.config().hidden_size))
    ),
    "buffer": as_buffer,
    "nothing": lambda layer: delattr(layer.mlp.up_proj, "weight"),
}


@pytest.mark.parametrize("by_modules", [False, True], ids=["direct", "by modules"])
@pytest.mark.parametrize("tile", [8, tiny.TOKENS])
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_put_in_a_place_before_backward_changes_no_gradient(
    edit, tile, by_modules, monkeypatch
):
    """A bias where there was none was added as the layer ran again; what had been a parameter was
    looked for among those.
    """
    if by_modules:
        monkeypatch.setattr(function, "direct_of", lambda *args: None)
    ours = tiny.patched(tiny.llama(), checkpointing=hfpatch.Checkpointing(plain=0, tile=tile))
    wanted, theirs = tiny.step(ours, tiny.labelled()), dict(ours.named_parameters())
    ours.zero_grad()
    loss, up = ours(**tiny.labelled()).loss, ours.model.layers[1].mlp.up_proj
    EDITS[edit](ours.model.layers[1])
    then = vars(up)["_parameters"].copy(), vars(up)["_buffers"].copy(), [*vars(up)]
    loss.backward()
    for name, p in theirs.items():
        assert torch.equal(p.grad, wanted[name]), name
    now = vars(up)["_parameters"], vars(up)["_buffers"], [*vars(up)]
    assert now == then and "weight" not in vars(up)


def test_a_model_that_ran_is_freed_at_once():
    ours = tiny.patched(tiny.llama())
    gc.collect()
    gc.disable()
    try:
        tiny.step(ours, tiny.labelled())
        weight = weakref.ref(ours.model.layers[1].mlp.up_proj.weight)
        del ours
        assert weight() is None
    finally:
        gc.enable()


def test_a_weight_that_is_replaced_is_freed_at_once():
    ours = tiny.patched(tiny.llama())
    tiny.step(ours, tiny.labelled())
    up = ours.model.layers[1].mlp.up_proj
    before = weakref.ref(up.weight)
    up.weight = torch.nn.Parameter(torch.ones_like(up.weight))
    assert before() is None


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def profiled(step):
    with torch.profiler.profile(acc_events=True) as profile:  # older torch warns without, once
        step()
    return [event.name for event in profile.events()]


def by_mode(step):
    with Names() as mode:
        step()
    return mode.names


@pytest.mark.parametrize("names_in", [profiled, by_mode])
def test_who_looks_at_ops_sees_the_fused_ones(names_in, used):
    ours = tiny.patched(tiny.llama(), checkpointing=hfpatch.Checkpointing(plain=0, tile=8))
    names = Counter(names_in(lambda: tiny.step(ours, tiny.labelled())))
    assert used
    for name in ("rope", "rms_norm", "add_rms_norm", "rms_norm_bwd", "swiglu", "swiglu_bwd"):
        assert names[f"hfpatch::{name}"], (name, names)


def test_what_a_module_notes_lives_no_longer():
    ours = tiny.patched(tiny.llama())
    mlp = ours.model.layers[1].mlp
    mlp.noted = torch.ones(3)
    noted = weakref.ref(mlp.noted)
    tiny.step(ours, tiny.labelled())
    mlp.noted = None
    assert noted() is None


def ties(at: str, to: str):
    def tie(model):
        for layer in model.model.layers:
            layer.get_submodule(at).weight = layer.get_submodule(to).weight

    return tie


TIED = {
    "k and v": ties("self_attn.v_proj", "self_attn.k_proj"),
    "q and out": ties("self_attn.o_proj", "self_attn.q_proj"),
    "norms": ties("post_attention_layernorm", "input_layernorm"),
}


@pytest.mark.parametrize("by_modules", [False, True], ids=["written out", "by modules"])
@pytest.mark.parametrize("tile", [8, 64])
@pytest.mark.parametrize("tied", TIED)
def test_a_weight_with_two_names_in_a_layer_is_one(tied, tile, by_modules, monkeypatch):
    """`autograd.grad` gets all of its gradient, and writes nobody's."""
    if by_modules:
        monkeypatch.setattr(function, "direct_of", lambda *args: None)
    stock = tiny.llama(dtype=torch.float64)
    TIED[tied](stock)
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(plain=0, tile=tile))
    batch = tiny.labelled()
    wanted, got = [
        torch.autograd.grad(m(**batch).loss, list(m.parameters())) for m in (stock, ours)
    ]
    assert all(p.grad is None for p in ours.parameters())
    for (name, _), x, y in zip(stock.named_parameters(), got, wanted):
        # norms and rotation are in float32 in stock
        assert (x - y).abs().max() <= 1e-6 * y.abs().max(), name


@pytest.mark.parametrize("tied", TIED)
def test_a_weight_with_two_names_goes_as_it_went_in_forward(tied):
    ours = tiny.llama(dtype=torch.float32)
    TIED[tied](ours)
    ours = tiny.patched(ours, checkpointing=hfpatch.Checkpointing(plain=0, tile=8))
    layers = ours.model.layers
    for frozen in (True, False):
        layers.requires_grad_(not frozen)
        loss = ours(**tiny.labelled()).loss
        layers.requires_grad_(frozen)
        loss.backward()
        # As in stock: what is frozen at either moment gets none.
        assert all(p.grad is None for p in layers.parameters())


@pytest.mark.filterwarnings("ignore:.*whose __call__ is not torch's")
def test_an_activations_class_or_the_call_of_linears_that_is_patched_is_seen(monkeypatch):
    batch = tiny.labelled()
    stock = tiny.llama(dtype=torch.float32)
    ours = tiny.patched(stock, checkpointing=hfpatch.Checkpointing(plain=0, tile=8))
    before = tiny.step(ours, batch)
    for kind, name, patched in (
        (type(stock.model.layers[0].mlp.act_fn), "forward", lambda self, x: torch.tanh(x)),
        (
            torch.nn.Linear,
            "__call__",
            lambda self, x, call=torch.nn.Linear.__call__: call(self, x) / 2,
        ),
    ):
        with monkeypatch.context() as context:
            context.setattr(kind, name, patched)
            stock.zero_grad(), ours.zero_grad()
            wanted, got = tiny.step(stock, batch), tiny.step(ours, batch)
            true = tiny.step(tiny.exact(stock), tiny.as_double(batch))
        tiny.assert_within(got, wanted, true)
        with pytest.raises(AssertionError):
            tiny.assert_within(before, wanted, true)
