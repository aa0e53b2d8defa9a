"""The tiled layer against the unpatched model: every gradient, in every way a training loop may ask
for it.

In float64 both sides compute everything in float64 (weight gradients add up in promote_types(dtype,
float32)), so they agree to its rounding: BUDGET is 2**-52 times the few thousand terms of a sum,
for gradients of order 1.
"""

import pytest
import torch
from tiny import OfAnEngine, classes, gradients, largest_difference, stock_loss

import hfpatch
from hfpatch.attention import heads as heads_module
from hfpatch.context.current import our_attention
from hfpatch.context.masks import Batch
from tests.families import small_model
from tests.layer.deep import pair, tiny_llama, tokens
from tests.numerics import assert_close

pytestmark = pytest.mark.usefixtures("exact_loss")

BUDGET = 4096 * 2.0**-52


def stock_step(model, **inputs):
    loss = stock_loss(model, **inputs)
    loss.backward()
    return loss.detach()


def check(settings, model_changes=None, B=2, T=37, prepare=lambda m: None, **inputs):
    """One step of both models; returns the patched one."""
    stock, model = pair(**(model_changes or {}))
    prepare(stock)
    prepare(model)
    hfpatch.apply(model, checkpointing=settings)
    inputs = inputs or {"input_ids": tokens(B, T), "labels": tokens(B, T)}
    expected = stock_step(stock, **inputs)
    loss = model(**inputs).loss
    loss.backward()
    assert abs(loss.item() - expected.item()) < BUDGET
    assert largest_difference(gradients(stock), gradients(model)) < BUDGET
    return model


# Tiles: not dividing T, dividing it, one token, one tile for all. Two rows, so that a tile is not
#     contiguous.
@pytest.mark.parametrize("tile", [14, 74, 2, 4096])
@pytest.mark.parametrize("keep", ["attention", "input"])
@pytest.mark.parametrize("offload", ["gpu", "host"])
def test_gradients_equal_stock(tile, keep, offload):
    check(hfpatch.Checkpointing(offload=offload, tile=tile, keep=keep))


# Segments: dividing the layers or not, longer than the model; each with its inputs on the device
#     and on the host.
@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("offload", ["gpu", "host"])
@pytest.mark.parametrize("tile", [14, 4096])
def test_every_kth_layer(every, offload, tile):
    check(hfpatch.Checkpointing(offload=offload, every=every, tile=tile), {"num_hidden_layers": 5})


@pytest.mark.parametrize("T", [1, 2, 13])
def test_short_sequences(T):
    stock, model = pair()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=8))
    ids = tokens(3, T)
    for m in (stock, model):
        m.model(ids, use_cache=False).last_hidden_state.square().sum().backward()
    # a sum over up to 2,496 values
    assert largest_difference(gradients(stock), gradients(model)) < BUDGET * 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [14, 4096])
def test_working_dtypes_within_budget(dtype, tile):
    exact, plain = pair(torch.float64)
    plain = plain.to(dtype)
    # The same rounded weights in float64: only the arithmetic differs.
    exact.load_state_dict({k: v.double() for k, v in plain.state_dict().items()})
    model = tiny_llama().to(dtype)
    model.load_state_dict(plain.state_dict())
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=tile))
    ids = tokens(2, 53)
    for m in (exact, plain):
        stock_step(m, input_ids=ids, labels=ids)
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == dtype
        assert_close(p.grad, plain.get_parameter(name).grad, exact.get_parameter(name).grad, name)


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_run_twice_in_a_forward(every):
    """One module at two places of the list, as models made deeper by repetition have it; and undo
    takes it back.
    """
    models = pair()
    for m in models:
        first, second, _ = m.model.layers
        m.model.layers = torch.nn.ModuleList([first, second, first])
    stock, model = models
    before = classes(model)
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14, every=every))
    ids = tokens()
    stock_step(stock, input_ids=ids, labels=ids)
    model(ids, labels=ids).loss.backward()
    assert largest_difference(gradients(stock), gradients(model)) < BUDGET
    hfpatch.undo(model)
    assert classes(model) == before


def freeze_embeddings(model):
    model.model.embed_tokens.requires_grad_(False)


def freeze_all_but_last_layer(model):
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


def only_a_norm_and_v(model):
    model.requires_grad_(False)
    model.model.layers[0].post_attention_layernorm.requires_grad_(True)
    model.model.layers[1].self_attn.v_proj.requires_grad_(True)


@pytest.mark.parametrize("tile", [14, 4096])
@pytest.mark.parametrize("offload", ["gpu", "host"])
@pytest.mark.parametrize(
    "prepare",
    [
        freeze_embeddings,
        freeze_all_but_last_layer,
        only_a_norm_and_v,
        lambda model: model.model.layers[1].requires_grad_(False),
    ],
)
def test_frozen_parts(prepare, tile, offload):
    check(hfpatch.Checkpointing(offload=offload, tile=tile), prepare=prepare)


def test_dropout_is_the_same_when_run_again():
    """With dropout inside a tile the gradient is that of the very function the forward computed
    (finite differences).
    """
    from peft import LoraConfig, get_peft_model

    model = tiny_llama(num_hidden_layers=2)
    model = get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_dropout=0.5,
            target_modules=["q_proj", "o_proj", "up_proj"],
            init_lora_weights=False,
        ),
    )
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14), loss=False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trainable]

    def value(step):
        torch.manual_seed(11)
        for p, d in zip(trainable, direction):
            # not counted as a write to the weights that backward will use
            p.data.add_(d, alpha=step)
        hidden = model.base_model.model.model(tokens(2, 20)).last_hidden_state
        for p, d in zip(trainable, direction):
            p.data.sub_(d, alpha=step)
        return hidden.square().mean()

    value(0.0).backward()
    slope = sum((p.grad * d).sum() for p, d in zip(trainable, direction)).item()
    h = 1e-6
    with torch.enable_grad():
        measured = (value(h).item() - value(-h).item()) / (2 * h)
    assert abs(slope - measured) < 1e-5 * max(1.0, abs(measured))


@pytest.mark.parametrize("every", [1, 2])
def test_draws_that_no_module_tells_of_are_the_same_when_run_again(every, monkeypatch):
    """F.dropout in a layer's own forward (OPT, whose checkpoints drop a tenth), at a rate raised
    once training runs: the gradient is the function's own. What it is given lies in memory as in
    forward: dropout on a GPU draws by that.
    """
    model, drops, real = small_model("opt").train(), [], torch.nn.functional.dropout
    hfpatch.apply(
        model, checkpointing=hfpatch.Checkpointing(offload="host", tile=6, every=every), loss=False
    )
    ids = torch.randint(
        3, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1)
    )
    dropped = lambda x, *args, **kwargs: drops.append(x.stride()) or real(x, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)

    def value():
        torch.manual_seed(11)
        return model.model(ids, use_cache=False).last_hidden_state.mul(torch.arange(64)).sum()

    value().backward()
    for layer in model.model.decoder.layers:
        layer.dropout = 0.3  # a schedule's, say
    drops.clear()
    model.zero_grad()
    value().backward()
    weight, h = model.model.decoder.layers[0].fc1.weight, 1e-7
    step, slope = h * torch.ones_like(weight), weight.grad.sum().item()
    weight.data += step
    after = value().item()
    weight.data -= 2 * step
    measured = (after - value().item()) / (2 * h)
    assert abs(slope - measured) < 1e-5 * abs(measured)
    assert drops and all(all(strides) for strides in drops)


def test_several_forwards_before_backward_and_accumulation():
    stock, model = pair()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))
    a, b = tokens(seed=1), tokens(2, 29, seed=2)
    for m in (stock, model):
        losses = [
            stock_loss(m, x, input_ids=x) if m is stock else m(x, labels=x).loss for x in (a, b, a)
        ]
        # Not the order of the forward passes, so that what was prefetched is not what is wanted.
        losses[0].backward()
        (losses[2] + 2 * losses[1]).backward()
    assert largest_difference(gradients(stock), gradients(model)) < 4 * BUDGET


@pytest.mark.parametrize("settings", [
    hfpatch.Checkpointing(offload="host", tile=14), hfpatch.Checkpointing(offload="host",
                                                                          tile=4096),
    hfpatch.Checkpointing(offload="gpu", tile=14, every=2), "off",
], ids=["tiles", "one", "every", "off"])  # fmt: skip
def test_retain_graph_gives_the_same_again(settings):
    model = tiny_llama()
    hfpatch.apply(model, checkpointing=settings)
    ids = tokens()
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[n], g) for n, g in gradients(model).items())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_attention_forward_runs_once_and_mlp_twice(monkeypatch):
    calls = {"attention": 0, "up": 0}
    forward = heads_module.attention_forward

    def counted(*args, **kwargs):
        calls["attention"] += 1
        return forward(*args, **kwargs)

    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=16))
    # behind apply(), which tries a small model
    monkeypatch.setattr(heads_module, "attention_forward", counted)
    up = model.model.layers[1].mlp.up_proj
    up.register_forward_hook(
        OfAnEngine(lambda m, args, out: calls.__setitem__("up", calls["up"] + args[0].shape[1]))
    )
    ids = tokens(1, 40)
    model(ids, labels=ids).loss.backward()
    # Forty tokens do not fill a GPU: all heads go together.
    assert calls == {"attention": 3, "up": 2 * 40}


# --- hooks and ownership of gradients -------------------------------------------------------------


def test_a_layer_that_something_else_than_its_stack_calls_runs_whole():
    stock, model = pair()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))
    lengths, found = [], []
    model.model.layers[0].mlp.register_forward_pre_hook(
        OfAnEngine(lambda m, args: lengths.append(args[0].shape[1]))
    )
    for m in (stock, model):
        x = m.model.embed_tokens(tokens())
        places = m.model.rotary_emb(x, torch.arange(37)[None])
        m.model.layers[0](x, position_embeddings=places).square().sum().backward()
        found.append(gradients(m))
    size = max(g.abs().max().item() for g in found[0].values() if g is not None)
    assert largest_difference(*found) < BUDGET * size and set(lengths) == {37}


def test_a_layer_leaves_its_incoming_gradient_as_it_is():
    """A skip connection around a layer, retain_grad, a hook that keeps the gradient, and a gradient
    owned by the caller.
    """
    stock, model = pair()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))

    def run(m, kept):
        x = m.model.embed_tokens(tokens())
        places = m.model.rotary_emb(x, torch.arange(37)[None])
        layers = m.model.layers
        with our_attention((), Batch(*x.shape[:2], x.device)):  # as the stack describes it
            y0 = layers[0](x, position_embeddings=places)
            y1 = layers[1](y0, position_embeddings=places)
            y1.retain_grad()
            y1.register_hook(lambda g: kept.__setitem__("hook", g))
            y2 = layers[2](y1, position_embeddings=places) + y0
            z = layers[0](y2, position_embeddings=places)
        kept["y1"] = y1
        upstream = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(9))
        kept["upstream"], kept["copy"] = upstream, upstream.clone()
        z.backward(upstream)
        return {**gradients(m), "y1": y1.grad, "hook": kept["hook"]}

    kept_stock, kept = {}, {}
    expected, got = run(stock, kept_stock), run(model, kept)
    size = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert largest_difference(expected, got) < BUDGET * size
    assert torch.equal(kept["upstream"], kept["copy"])


# --- autocast, DDP, eval --------------------------------------------------------------------------


@pytest.mark.parametrize("static_graph", [False, True])
def test_ddp(static_graph, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stock, model = pair()
        hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))
        ddp = torch.nn.parallel.DistributedDataParallel(model, static_graph=static_graph)
        a, b = tokens(seed=1), tokens(seed=2)
        for x in (a, b):
            stock_step(stock, input_ids=x, labels=x)
        if static_graph:
            for x in (a, b):
                ddp(x, labels=x).loss.backward()
        else:
            with ddp.no_sync():
                ddp(a, labels=a).loss.backward()
            ddp(b, labels=b).loss.backward()
        assert largest_difference(gradients(stock), gradients(model)) < 2 * BUDGET
    finally:
        # Before the group: where the reducer is the last to hold it, torch waits for gloo's thread,
        #     which may want the GIL.
        ddp = None
        dist.destroy_process_group()


def test_evaluation_keeps_nothing():
    stock, model = pair()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14), logits=False)
    model.eval()
    stock.eval()
    ids = tokens()
    with torch.no_grad():
        out = model(ids, labels=ids)
        assert (
            abs(out.loss.item() - stock_loss(stock, ids, input_ids=ids).item()) < BUDGET
            and out.logits is None
        )
        assert (model(ids).logits - stock(ids).logits).abs().max() < BUDGET
    assert model.model._hfpatch.runtime.transfers is None


# --- packed documents and padding -----------------------------------------------------------------


# --- lifetime -------------------------------------------------------------------------------------


def test_host_memory_does_not_grow_and_is_released():
    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))
    ids = tokens()
    held = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        held.append(model.model._hfpatch.runtime.transfers.pool.bytes_held)
    # x and out of 3 layers in float64, the log-sum-exp, and dx of the layer that runs: exactly, with
    # nothing rounded up.
    token = 2 * (3 * (64 * 8 + 64 * 8 + 4 * 8) + 64 * 8)
    assert held == [37 * token] * 4
    pool = model.model._hfpatch.runtime.transfers.pool

    def step(T):
        ids = tokens(2, T)
        model(ids, labels=ids).loss.backward()
        return pool.bytes_held // token

    # Shorter batches use the same memory; a longer one makes room for those up to twice as long.
    assert [step(T) for T in (30, 37, 10, 41, 40, 70, 80, 30)] == [37, 37, 37, 74, 74, 74, 85, 85]
    del loss
    hfpatch.undo(model)
    assert pool.bytes_held == 0


@pytest.mark.parametrize("real", [37, 10])
def test_a_dropped_graph_gives_its_memory_back(real):
    """At once, of padded rows too: no cycle of objects waits for Python's collector."""
    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", tile=14))
    ids = tokens()
    mask = torch.arange(ids.shape[1]) < torch.tensor([[37], [real]])
    for _ in range(3):
        model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100))
    pool = model.model._hfpatch.runtime.transfers.pool
    assert pool.bytes_free == pool.bytes_held > 0


def test_modified_input_is_noticed():
    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="gpu", tile=14))
    x = torch.randn(1, 20, 64, dtype=torch.float64)
    hidden = model.model(inputs_embeds=x).last_hidden_state
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        hidden.sum().backward()


def test_too_little_host_memory_is_said_before_the_step(monkeypatch):
    from hfpatch.layer import policies

    model = tiny_llama()
    hfpatch.apply(model, checkpointing=hfpatch.Checkpointing(offload="host", every=1))
    monkeypatch.setattr(policies.memory, "host_free", lambda *a, **k: 30_000)
    ids = tokens()
    with pytest.raises(ValueError, match="host memory.*pass a directory as offload"):
        model(ids, labels=ids)


def test_some_layers_compute_again_what_others_keep(monkeypatch):
    """keep=2: the first two layers keep gate and up; gradients are exact."""
    import dataclasses

    from hfpatch.layer.runtime import LayerRuntime

    resolve = LayerRuntime._resolve
    monkeypatch.setattr(
        LayerRuntime, "_resolve", lambda *a: dataclasses.replace(resolve(*a), keep=2)
    )
    settings = hfpatch.Checkpointing(offload="host", tile=14, plain=1)
    check(settings, {"num_hidden_layers": 4})
    hfpatch.apply(model := tiny_llama(num_hidden_layers=4), checkpointing=settings)
    runtime, calls = model.model.layers[0]._hfpatch.runtime, []
    link = runtime.link
    monkeypatch.setattr(
        runtime, "link", lambda call, x: calls.append(call.keeps_gates) or link(call, x)
    )
    model(tokens(2, 22), labels=tokens(2, 22)).loss.backward()
    assert calls == [True, True, False]


@pytest.mark.parametrize("tile", [14, 4096])
@pytest.mark.parametrize("keep", ["attention", "input"])
def test_several_groups(tile, keep, monkeypatch):
    monkeypatch.setattr(heads_module, "heads_per_group", lambda *sizes: 2)
    settings = hfpatch.Checkpointing(offload="host", tile=tile, keep=keep)
    check(settings, {"num_attention_heads": 8, "num_key_value_heads": 4})


def test_values_for_the_host_between_compiled_graphs():
    """TRL's trainers under torch.compile: what runs between two graphs is not traced as one of its
    own (an error inside dynamo).
    """
    from hfpatch.store.device import on_host

    def labelled(x):
        torch._dynamo.graph_break()
        return on_host((x != -100).sum())

    assert torch.compile(labelled, backend="eager")(torch.tensor([1, -100, 2])) == 2
