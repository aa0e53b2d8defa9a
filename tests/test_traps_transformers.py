"""Traps of patching transformers: names, copies, checkpoints, configurations, outputs, generation,
compilation.
"""

import copy
import io
import os
import pickle
import weakref

import pytest
import tiny
import torch
from families import small_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.llama import modeling_llama as hf

import hfpatch
from hfpatch.decoder.small_instance import scaled_config
from hfpatch.layer import layer as layer_module
from hfpatch.parts.parts import norm_part


def count_tiled(monkeypatch) -> list:
    """Appended to at each call of the tiled layer."""
    calls, tiled = [], layer_module.tiled_layer
    monkeypatch.setattr(layer_module, "tiled_layer", lambda *a: (calls.append(1), tiled(*a))[1])
    return calls


# --- names and copies -----------------------------------------------------------------------------


def test_class_names_stay():
    """FSDP's wrap policies, accelerate's _find_final_norm, PEFT and quantisers read them."""
    stock = tiny.llama()
    assert [k.__name__ for k in tiny.classes(tiny.patched(stock))] == [
        k.__name__ for k in tiny.classes(stock)
    ]
    assert all(isinstance(m, k) for m, k in zip(tiny.patched(stock).modules(), tiny.classes(stock)))


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_is_byte_equal_to_stock(tmp_path, tied):
    """A renamed class leaks into config.json's "architectures"; a wrapper module into the keys."""
    stock = tiny.llama(tie_word_embeddings=tied)
    ours = tiny.patched(stock)
    tiny.step(ours, tiny.labelled())
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    names = sorted(os.listdir(tmp_path / "stock"))
    assert sorted(os.listdir(tmp_path / "ours")) == names and "model.safetensors" in names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (
            tmp_path / "stock" / name
        ).read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is hf.LlamaForCausalLM
    assert torch.equal(loaded(tiny.ids()).logits, stock.eval()(tiny.ids()).logits)


@tiny.not_before_transformers((5, 14), "has no is_custom_code")
def test_a_mixture_of_experts_is_saved_as_the_hub_has_it(tmp_path):
    """transformers keeps experts in one tensor and writes one each, but not for a class that is no
    module of its own.
    """
    stock = Qwen3MoeForCausalLM(scaled_config(Qwen3MoeConfig(), 1))
    ours = tiny.patched(stock)
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (
            tmp_path / "stock" / name
        ).read_bytes(), name
    # PEFT's adapter_config.json names it "parent_library"
    assert type(ours).__module__ == type(stock).__module__
    assert pickle.loads(pickle.dumps(ours)).is_custom_code() is False


def test_another_default_device():
    """torch.set_default_device("cuda") is for the user's tensors: what is made on the host beside
    them says so.
    """
    batch = {**tiny.labelled(), "attention_mask": torch.ones(2, tiny.TOKENS, dtype=torch.long)}
    batch["attention_mask"][1, :5] = 0
    wanted, ours = tiny.step(tiny.patched(tiny.llama()), batch), tiny.llama()
    # what forgets to say is without data, as on a GPU on the wrong device
    torch.set_default_device("meta")
    try:
        report = hfpatch.apply(ours, checkpointing=tiny.TILED)
        got = tiny.step(ours, batch)
    finally:
        torch.set_default_device(None)
    assert not report.skipped
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_from_pretrained_of_the_patched_class_is_stock_weights(tmp_path):
    """type(model).from_pretrained, as TRL and PEFT call it, must not give a class whose settings
    were never made.
    """
    stock = tiny.llama()
    stock.save_pretrained(tmp_path)
    again = type(tiny.patched(stock)).from_pretrained(tmp_path).train()
    tiny.assert_as_good(again, stock, tiny.labelled())


def test_deepcopy_is_patched_and_apart():
    """A closure or a bound method would keep the copy computing with the original's weights."""
    stock = tiny.llama()
    ours = tiny.patched(stock)
    tiny.step(ours, tiny.labelled())
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.fill_(float("nan"))
    tiny.assert_as_good(twin, stock, tiny.labelled())
    assert tiny.classes(twin) == tiny.classes(ours)
    assert twin.model.layers[0]._hfpatch.runtime is not ours.model.layers[0]._hfpatch.runtime


@pytest.mark.parametrize("used", [False, True])
def test_torch_save_of_the_whole_model(used):
    """Liger's bound methods fail here. Also once a step has run."""
    stock = tiny.llama()
    ours = tiny.patched(stock)
    if used:
        tiny.step(ours, tiny.labelled())
        ours.zero_grad()
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert tiny.classes(loaded) == tiny.classes(ours)
    tiny.assert_as_good(loaded, stock, tiny.labelled())
    hfpatch.undo(loaded)
    assert tiny.classes(loaded) == tiny.classes(stock)


def test_patched_model_is_freed():
    model = tiny.patched(tiny.llama())
    tiny.step(model, tiny.labelled())
    gone = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    del model
    import gc

    gc.collect()
    assert gone() is None


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["off", "tiled"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_bias": True},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"tie_word_embeddings": True},
        {"head_dim": 24},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"pad_token_id": None},
    ],
    ids=lambda c: "-".join(f"{n}={v}" for n, v in c.items()),
)
def test_configurations(changes, way):
    """Naive: biases dropped, SiLU computed for gelu, a tied weight's gradient counted once."""
    stock = tiny.llama(**changes)
    tiny.assert_as_good(tiny.patched(stock, checkpointing=tiny.WAYS[way]), stock, tiny.labelled())


class ClampedMLP(hf.LlamaMLP):
    """As DeepSeek-V4's: gate and up do not grow beyond a limit."""

    def forward(self, x):
        return self.down_proj(
            self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x).clamp(-10, 10)
        )


class DroppingMLP(hf.LlamaMLP):
    """As Seed-OSS's, in training alone."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class OneSidedMLP(hf.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).detach()) * self.up_proj(x))


class NotingMLP(hf.LlamaMLP):
    def forward(self, x):
        self.seen = x.detach().norm()
        return super().forward(x)


@pytest.mark.parametrize("kind, changes, reason", [
    (hf.LlamaMLP, {"hidden_act": "mish"}, "no fused form of its activation"),
    (hf.LlamaMLP, {"hidden_act": "gelu_10"}, "no fused form of its activation"),
    (ClampedMLP, {}, "no fused form of its activation"),
    (OneSidedMLP, {}, "no fused form of its activation"),
    (DroppingMLP, {}, "it draws random numbers"), (NotingMLP, {}, "its forward writes to more than its output"),
])  # fmt: skip
def test_an_mlp_without_a_fused_form_is_kept_and_the_report_says_so(
    kind, changes, reason, monkeypatch
):
    monkeypatch.setattr(hf, "LlamaMLP", kind)
    model = tiny.llama(**changes).eval()  # as from_pretrained returns it
    assert ("mlp", reason) in hfpatch.apply(model, checkpointing=tiny.TILED).skipped
    assert all(type(layer.mlp) is kind for layer in model.model.layers)


# Each returns values of an RMSNorm: (the norm, float32 hidden states, their mean of squares).
@pytest.mark.parametrize("values", [
    lambda norm, x, square: x / (square.sqrt() + norm.variance_epsilon),
    lambda norm, x, square: x / (square + norm.variance_epsilon).sqrt().detach(),
    lambda norm, x, square: (x / (square + norm.variance_epsilon).sqrt()).clamp(-6, 6),
], ids=["epsilon outside", "detached", "clamped"])  # fmt: skip
def test_a_norm_with_another_epsilon_backward_or_bound_is_kept(values):
    def forward(norm, x):
        wide = x.float()
        return norm.weight * values(norm, wide, wide.pow(2).mean(-1, keepdim=True)).to(x)

    kind = type("OwnRMSNorm", (hf.LlamaRMSNorm,), {"forward": forward})
    assert norm_part(kind(64, 1e-8)) == "its results differ from the fused norm's"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings(when, tied):
    """resize_token_embeddings makes a new Linear: a weight captured at patch time would be the old
    one.
    """
    stock = tiny.llama(tie_word_embeddings=tied)
    ours = copy.deepcopy(stock)
    if when == "after":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (ours, stock):
        torch.manual_seed(7)
        model.resize_token_embeddings(tiny.VOCAB + 9, mean_resizing=False)
    if when == "before":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    batch = tiny.labelled()
    batch["labels"][1, 5] = batch["input_ids"][1, 5] = tiny.VOCAB + 8
    tiny.assert_as_good(ours, stock, batch)
    hfpatch.undo(ours)
    assert tiny.classes(ours) == tiny.classes(stock)


def test_new_head_falls_back_and_says_so():
    """A head that is no Linear (quantised, adapted) is called as it is, through whole logits."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    stock = tiny.llama()
    ours = tiny.patched(stock)
    for model in (ours, stock):
        weight = model.lm_head.weight
        model.lm_head = Doubled(64, tiny.VOCAB, bias=False)
        model.lm_head.weight = weight
    with pytest.warns(UserWarning, match="whole logits, as lm_head is a .*Doubled"):
        out = ours(**tiny.labelled())
    assert out.logits is not None
    tiny.assert_as_good(ours, stock, tiny.labelled())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_is_drawn_again_in_backward(family):
    """In attention: whole-layer checkpoints with the generator's state brought back; same draws,
    same numbers as stock.
    """
    stock = tiny.llama(attention_dropout=0.3)
    if family == "gpt2":  # which has another name for it
        stock = small_model("gpt2", torch.float32)
        for block in stock.transformer.h:
            block.attn.attn_dropout.p = stock.config.attn_pdrop = 0.3
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert any("is 0.3: in training, layers run untiled" in note for note in report.notes)
    given = {name: ids % stock.config.vocab_size for name, ids in tiny.labelled().items()}
    found = []
    for model in (ours, stock, double := tiny.exact(stock)):
        torch.manual_seed(5)
        found.append(tiny.step(model, given))
    got, plain, exact = found
    others = tiny.step(double, given)
    same, other = ((plain["loss"] - run["loss"]).abs() for run in (exact, others))
    assert same < torch.finfo(torch.float32).eps ** 0.5 * other, "the float64 twin draws the same"
    for name in got:
        tiny.numerics.assert_close(got[name], plain[name], exact[name], name)


# --- transformers' own checkpointing --------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_transformers_checkpointing_is_replaced_and_comes_back(when, monkeypatch):
    """Trainer turns it on after apply; hfpatch's must stay in place, and undo must leave theirs
    working.
    """
    stock = tiny.llama()
    ours = copy.deepcopy(stock)
    if when == "before":
        tiny.checkpoint(ours)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    if when == "after":
        tiny.checkpoint(ours)
    calls = count_tiled(monkeypatch)
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert len(calls) == 2, "once a layer: not recomputed as a whole"
    hfpatch.undo(ours)
    runs = []
    ours.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    tiny.assert_as_good(ours, stock, tiny.labelled())
    assert len(runs) == 2


# --- what callers ask of the outputs --------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_hidden_states(training, monkeypatch):
    """Recorded by class name, through hooks that stay: asking once must not turn the tiled layer
    off for good.
    """
    stock = tiny.llama().train(training)
    ours = tiny.patched(stock).train(training)
    for _ in range(2):
        got = ours(tiny.ids(), output_hidden_states=True).hidden_states
        plain = stock(tiny.ids(), output_hidden_states=True).hidden_states
        true = tiny.exact(tiny.llama())(tiny.ids(), output_hidden_states=True).hidden_states
        assert len(got) == len(plain) == 3
        for g, p, e in zip(got, plain, true):
            tiny.numerics.assert_close(g, p, e)
    ours.train()
    calls = count_tiled(monkeypatch)
    tiny.assert_as_good(ours, tiny.llama(), tiny.labelled())
    assert len(calls) == 2


def test_hidden_states_with_labels_carry_gradients():
    stock = tiny.llama()
    loss = lambda out: (  # noqa: E731
        out.loss + out.hidden_states[1].pow(2).mean() + out.hidden_states[-1].pow(2).mean()
    )
    tiny.assert_as_good(
        tiny.patched(stock), stock, {**tiny.labelled(), "output_hidden_states": True}, loss
    )


def test_attentions_then_training_is_tiled_again(monkeypatch):
    stock = tiny.llama(attn_implementation="eager")
    ours = tiny.patched(stock)
    got, plain = (m(tiny.ids(), output_attentions=True).attentions for m in (ours, stock))
    assert len(got) == len(plain) == 2
    for g, p in zip(got, plain):
        assert g.shape == (2, 4, tiny.TOKENS, tiny.TOKENS)
        torch.testing.assert_close(g, p)
    calls = count_tiled(monkeypatch)
    tiny.assert_as_good(ours, tiny.llama(attn_implementation="eager"), tiny.labelled())
    assert len(calls) == 2, (
        "the recording hooks that transformers leaves behind count as hooks on self_attn"
    )
    hfpatch.undo(ours)
    tiny.assert_as_good(ours, tiny.llama(attn_implementation="eager"), tiny.labelled())


@pytest.mark.parametrize("cls", [hf.LlamaForCausalLM, LlamaModel])
@pytest.mark.parametrize("through", ["argument", "config"])
def test_return_dict_false(cls, through):
    stock = tiny.llama(cls)
    batch = tiny.labelled() if cls is hf.LlamaForCausalLM else {"input_ids": tiny.ids()}
    ours = tiny.patched(stock)
    if through == "argument":
        batch["return_dict"] = False
    else:
        ours.config.return_dict = False
    out = ours(**batch)
    assert type(out) is tuple
    batch.pop("return_dict", None)
    assert torch.equal(out[0], tiny.patched(tiny.llama(cls))(**batch)[0])


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([2, 5, 20])], ids=["1", "3", "tensor"])
def test_logits_to_keep(keep):
    stock = tiny.llama().eval()
    ours = tiny.patched(stock)
    got, plain = (m(tiny.ids(), logits_to_keep=keep).logits for m in (ours, stock))
    assert got.shape == (2, keep if isinstance(keep, int) else len(keep), tiny.VOCAB)
    tiny.numerics.assert_close(
        got, plain, tiny.exact(stock)(tiny.ids(), logits_to_keep=keep).logits
    )


def test_logits_to_keep_with_labels():
    """The loss is then over the kept logits, labels being cut by the caller."""
    stock = tiny.llama()
    batch = {"input_ids": tiny.ids(), "labels": tiny.ids()[:, -6:], "logits_to_keep": 6}
    tiny.assert_as_good(tiny.patched(stock), stock, batch)


@pytest.mark.parametrize("way", tiny.WAYS)
def test_inputs_embeds(way):
    """The gradient of the embeddings passed in, which the caller still holds: it must not be
    overwritten, nor the input.
    """
    stock = tiny.llama(dtype=torch.float32)
    embeds = torch.randn(2, tiny.TOKENS, 64, generator=torch.Generator().manual_seed(2))
    kept = embeds.clone()
    batch = {"inputs_embeds": embeds, "labels": tiny.ids()}
    tiny.assert_as_good(tiny.patched(stock, checkpointing=tiny.WAYS[way]), stock, batch)
    assert torch.equal(embeds, kept)


def test_no_input_and_both_inputs_raise_as_stock():
    ours = tiny.patched(tiny.llama())
    for batch in ({}, {"input_ids": tiny.ids(), "inputs_embeds": torch.zeros(2, tiny.TOKENS, 64)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            ours(**batch, labels=tiny.ids())


def test_no_labels_gives_logits():
    stock = tiny.llama()
    ours = tiny.patched(stock)
    for training in (True, False):
        stock.train(training), ours.train(training)
        got, plain, true = (m(tiny.ids()).logits for m in (ours, stock, tiny.exact(stock)))
        tiny.numerics.assert_close(got, plain, true)


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("apply_options", [{}, {"checkpointing": "off"}], ids=["tiled", "off"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"use_cache": False}, {"do_sample": True}], ids=str
)
def test_generate_gives_the_same_tokens(padding, options, apply_options):
    """Bit-equal tokens in fp32, with the KV cache, batched, padded on the left."""
    stock = tiny.llama().eval()
    ours = tiny.patched(stock, **apply_options)
    input_ids = tiny.ids(3, 9)
    mask = torch.ones_like(input_ids)
    if padding == "left":
        for row, n in ((0, 4), (1, 1)):
            input_ids[row, :n], mask[row, :n] = 0, 0
    arguments = {"max_new_tokens": 12, "do_sample": False, **options}
    tokens = []
    for model in (ours, stock):
        torch.manual_seed(11)
        tokens.append(model.generate(input_ids, attention_mask=mask, **arguments))
    assert torch.equal(*tokens) and tokens[0].shape[1] > 9


@pytest.mark.parametrize("way", tiny.WAYS)
def test_a_cache_that_training_asks_for_is_filled(way):
    """Dropped without a word it would leave the tokens that follow without those before them."""
    stock = tiny.llama(dtype=torch.float64)
    ours, true, ids = (
        tiny.patched(stock, checkpointing=tiny.WAYS[way]),
        tiny.exact(stock),
        tiny.ids(),
    )
    for model in (ours, true):
        past = model(ids[:, :9], use_cache=True).past_key_values
        assert past.get_seq_length() == 9
        model(ids[:, 9:], past_key_values=past, labels=ids[:, 9:]).loss.backward()
    tiny.assert_same_in_double(tiny.gradients(ours), tiny.gradients(true))


def test_a_chunk_of_a_prompt_may_begin_inside_its_padding():
    """Its mask tells of the tokens before it too; the positions of padding are no document of their
    own.
    """
    stock = tiny.llama().eval()
    ours = tiny.patched(stock)
    ids, mask = tiny.ids(1, 9), torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for model in (ours, stock, tiny.exact(stock)):
        cache, logits = None, []
        for a, b in ((0, 1), (1, 4), (4, 9)):
            with torch.no_grad():
                out = model(
                    ids[:, a:b],
                    attention_mask=mask[:, :b],
                    position_ids=positions[:, a:b],
                    past_key_values=cache,
                    use_cache=True,
                )
            cache = out.past_key_values
            logits.append(out.logits)
        found.append(torch.cat(logits, 1)[mask.bool()])
    tiny.numerics.assert_close(*found)


# --- torch.compile --------------------------------------------------------------------------------


# Where a graph breaks, Dynamo reads .grad of what comes in.
breaks = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@breaks
@pytest.mark.filterwarnings("ignore:hfpatch. the loss runs through whole logits")
@pytest.mark.parametrize(
    "own",
    [{}, {"loss_function": property(lambda self: lambda logits, *_, **more: logits.std())}],
    ids=["stock", "own loss"],
)
def test_compile_with_the_tiled_layer(own):
    stock = tiny.llama(type("OfAUser", (tiny.LlamaForCausalLM,), own))
    ours = tiny.patched(stock)
    torch._dynamo.reset()
    ours.compile(backend="aot_eager")
    torch.testing.assert_close(
        *(tiny.step(model, tiny.labelled()) for model in (ours, stock)), rtol=1e-4, atol=1e-6
    )


@breaks
@pytest.mark.parametrize("family", tiny.longer(["granite", "gemma2"], "gemma2"))
def test_compile_of_logits_that_are_scaled_or_capped(family):
    stock = small_model(family).double()
    ids = torch.randint(3, stock.config.vocab_size, (2, tiny.TOKENS))
    ours, batch = tiny.patched(stock), {"input_ids": ids, "labels": ids}
    torch._dynamo.reset()
    ours.compile(backend="eager")
    got, true = tiny.step(ours, batch), tiny.step(stock, batch)
    for name, wanted in true.items():
        assert (got[name] - wanted).norm() <= 1e-5 * wanted.norm(), name
    assert ours(**batch).logits is None, "the loss is fused"


# --- other architectures --------------------------------------------------------------------------


def test_compiled_evaluation_takes_masks_positions_labels_and_any_length():
    """One whole graph for all lengths, as of transformers' own model."""
    stock = tiny.llama().eval()
    ours = tiny.patched(stock).eval()
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        ours,
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )
    for tokens in (12, 17):
        ids = tiny.ids()[:, :1].expand(2, tokens).contiguous()
        visible, positions = (
            torch.ones_like(ids),
            torch.arange(tokens).expand(2, tokens).contiguous(),
        )
        visible[0, -3:] = 0
        batch = {
            "input_ids": ids,
            "attention_mask": visible,
            "position_ids": positions,
            "labels": ids,
            "use_cache": False,
        }
        with torch.no_grad():
            got, want = compiled(**batch), stock(**batch)
        torch.testing.assert_close(got.logits, want.logits)
        torch.testing.assert_close(got.loss, want.loss)
    assert len(graphs) == 1


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="export of torch 2.11 asks that min(16 T, 32 T) be 16 T, and cannot tell that it is",
)
def test_exported_evaluation_takes_masks_positions_and_any_length():
    """As transformers' own model: torch.export with a mask, positions and a dynamic number of
    tokens.
    """
    stock = tiny.llama().eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny.patched(stock).eval()

        def forward(self, ids, mask, positions):
            return self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).logits

    def given(tokens):
        ids = tiny.ids()[:, :1].expand(2, tokens).contiguous()
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        return ids, mask, torch.arange(tokens).expand(2, tokens).contiguous()

    length = {1: torch.export.Dim("tokens", min=4, max=64)}
    with torch.no_grad():
        made = torch.export.export(
            Logits(), given(12), dynamic_shapes=(length, length, length), strict=False
        ).module()
        for tokens in (12, 17):
            ids, mask, positions = given(tokens)
            want = stock(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).logits
            torch.testing.assert_close(made(ids, mask, positions), want)
