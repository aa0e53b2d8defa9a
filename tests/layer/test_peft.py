"""PEFT's methods over tiled layers: gradients as over transformers' own."""

import copy
import sys
import warnings
from pathlib import Path

import peft
import pytest
import tiny
import torch

import hfpatch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))
SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]
PROMPT = {"num_virtual_tokens": 4}
# What changes each layer's products, or what stands around them: (config, its settings); SOME are
# its modules where it has any.
METHODS = {
    "LoRA": ("Lora", {"r": 4}), "DoRA": ("Lora", {"r": 4, "use_dora": True}),
    "rsLoRA": ("Lora", {"r": 4, "use_rslora": True}),
    "biases": ("Lora", {"r": 4, "bias": "all"}), "trained head": ("Lora", {"r": 4,
                                                                           "modules_to_save": ["lm_head", "embed_tokens"]}),
    "trained norms": ("Lora", {"r": 4, "modules_to_save": ["input_layernorm",
                                                           "post_attention_layernorm"]}),
    "trained tokens": ("Lora", {"r": 4, "trainable_token_indices": [0, 1, 3]}),
    "LoRA on the embedding": ("Lora", {"r": 4, "target_modules": ["embed_tokens", *SOME]}),
    "LoRA on the head": ("Lora", {"r": 4, "target_modules": ["lm_head", *SOME]}),
    "aLoRA": ("Lora", {"r": 4, "alora_invocation_tokens": [5]}),
    "PiSSA": ("Lora", {"r": 4, "init_lora_weights": "pissa"}),
    "target_parameters": ("Lora", {"r": 4, "target_modules": ["q_proj"],
                                   "target_parameters": ["mlp.up_proj.weight"]}),
    "AdaLoRA": ("AdaLora", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "AdaptionPrompt": ("AdaptionPrompt", {"adapter_len": 4, "adapter_layers": 1,
                                          "target_modules": None}),
    "IA3": ("IA3", {"feedforward_modules": ["down_proj"]}),
    "VeRA": ("Vera", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "OFT": ("OFT", {"r": 0, "oft_block_size": 4}), "BOFT": ("BOFT", {"boft_block_size": 4}),
    "HRA": ("HRA", {"r": 4}),
    "LoHa's dropout": ("LoHa", {"r": 4, "rank_dropout": 0.5}),
    "BOFT's dropout": ("BOFT", {"boft_block_size": 4, "boft_dropout": 0.5}),
    "LoHa": ("LoHa", {"r": 4}), "LoKr": ("LoKr", {"r": 4}), "MiSS": ("Miss", {"r": 2}),
    "RandLoRA": ("RandLora", {"r": 4}),
    "LN tuning": ("LNTuning", {"target_modules": ["input_layernorm", "norm"]}),
    "RoAd": ("Road", {"variant": "road_1", "group_size": 2}),
    "SHiRA": ("Shira", {"r": 1}), "VBLoRA": ("VBLoRA", {"r": 4, "vector_length": 4,
                                                        "num_vectors": 4}),
    "FourierFT": ("FourierFT", {"n_frequency": 10}), "C3A": ("C3A", {"block_size": 4}),
    "WaveFT": ("WaveFT", {"n_frequency": 8}),
    "TinyLoRA": ("TinyLora", {}), "UniLoRA": ("UniLora", {"theta_d_length": 257}),
    "GraLoRA": ("Gralora", {"r": 4, "gralora_k": 2}),
    "DeLoRA": ("Delora", {"r": 2}), "HiRA": ("Hira", {"r": 4}), "Lily": ("Lily", {"r": 4}),
    "PEANuT": ("Peanut", {"r": 4}),
    "PSOFT": ("Psoft", {"r": 4, "psoft_alpha": 4}), "GLoRA": ("Glora", {}), "BEFT": ("Beft", {}),
    "DEFT": ("Deft", {}),
    "FRoD": ("Frod", {"sparse_rate": 0.01}),
    "trained tokens alone": ("TrainableTokens", {"token_indices": [3, 5],
                                                 "target_modules": ["embed_tokens"]}),
    "Supertuning": ("Supertuning", {"sparsity": 0.9}),
    "prompt tuning": ("PromptTuning", PROMPT), "P-tuning": ("PromptEncoder", {**PROMPT,
                                                                              "encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuning", PROMPT),
}  # fmt: skip
# On the output, on the weight, on attention itself, by a draw for all tokens.
SHORT = ("IA3", "OFT", "AdaptionPrompt", "LoHa's dropout")
WITHOUT_MODULES = ("prompt tuning", "P-tuning", "prefix tuning")


def assert_as_good(got: dict, plain: dict, true: dict) -> None:
    """Each error within twice what stock loses, of the value's size, anywhere: a gradient of one
    number loses nothing by luck.
    """
    assert got.keys() == plain.keys() == true.keys() and len(got) > 1
    size = {what: value.abs().max().item() for what, value in true.items()}
    error = lambda of: {n: (of[n].double() - true[n]).abs().max().item() for n in true if size[n]}  # noqa: E731
    lost = max(e / size[n] for n, e in error(plain).items())
    assert lost < 1e-4, "stock itself is off"
    for name, e in error(got).items():
        assert e <= 2 * (lost + torch.finfo(torch.float32).eps) * size[name], (
            name,
            e / size[name],
            lost,
        )


def adapted(name: str):
    kind, settings = METHODS[name]
    modules = {} if name in WITHOUT_MODULES else {"target_modules": SOME}
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **{**modules, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        made = peft.get_peft_model(tiny.llama(), config).train()
    torch.manual_seed(1)
    with torch.no_grad():  # a fresh adapter is no change, whose gradients are zero in part
        for p in made.parameters():
            if p.requires_grad and p.is_floating_point():
                p.add_(0.02 * torch.randn(p.shape))
    return made


@pytest.mark.filterwarnings("ignore")  # what each says of itself
@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(n, marks=pytest.mark.long) for n in METHODS if n not in SHORT)]
)
def test_gradients_are_those_over_stock_layers(name):
    stock = adapted(name)
    ours, batch = copy.deepcopy(stock), tiny.labelled()
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    found = []
    for model, more in ((ours, batch), (stock, batch), (tiny.exact(stock), batch)):
        torch.manual_seed(2)
        found.append(tiny.step(model, more))
    got, plain, true = found
    assert_as_good(got, plain, true)


def test_adapters_on_parameters_may_run_again_before_backward():
    """PEFT's parametrization writes to the weight in each forward."""
    stock = adapted("target_parameters").double()
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=tiny.TILED)
    for model in (ours, stock):
        first, second = model(**tiny.labelled()).loss, model(**tiny.labelled(1, 17)).loss
        (first + second).backward(retain_graph=True)
        first.backward()
    trained = [(n, p) for n, p in stock.named_parameters() if p.requires_grad]
    for name, p in trained:
        got = ours.get_parameter(name).grad
        assert (got - p.grad).norm() <= 1e-5 * p.grad.norm(), name


def test_tuned_norms_do_not_make_another_kind_of_layer():
    """PEFT keeps its copies of norms within the layers, under wrappers, also before apply()."""
    assert "untiled" not in str(hfpatch.apply(adapted("LN tuning"), checkpointing=tiny.TILED))


@pytest.mark.parametrize("name, keeps", [("prefix tuning", True), ("prompt tuning", False)])
def test_keys_that_come_with_the_batch_are_said_to_undo_the_tiles(name, keeps, capfd):
    model = adapted(name)
    hfpatch.apply(model, checkpointing=tiny.TILED)
    model(**tiny.labelled()).loss.backward()
    said = capfd.readouterr().err
    assert (
        "LlamaDecoderLayers run untiled and not checkpointed: keys and values come with the batch"
        in said
    ) == keeps


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_offsets_under_gradient_checkpointing():
    """PEFT's hooks of aLoRA stay until a layer's backward begins, which the first layer's, whose
    input is frozen, does too soon.
    """
    model = adapted("aLoRA")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tiny.assert_as_good(tiny.patched(model), model, tiny.labelled())


def test_adapters_switched_between_passes():
    """Each forward's layers run again with the adapter that it had, whichever one the model has by
    the time of the backward.
    """
    stock, runs = (
        peft.get_peft_model(
            tiny.llama(), peft.LoraConfig(r=4, target_modules=SOME), adapter_name="first"
        ),
        [],
    )
    stock.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj", "down_proj"]))
    for name, p in stock.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    for model in (tiny.patched(stock), copy.deepcopy(stock), tiny.exact(stock)):
        model.train()
        losses = []
        for adapter in ("first", "second"):
            model.set_adapter(adapter)
            losses.append(model(**tiny.labelled(), use_cache=False).loss)
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name)  # as the switch found those of the first
        (losses[0] + 2 * losses[1]).backward()
        runs.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert any("first" in n for n in runs[0]) and any("second" in n for n in runs[0])
    tiny.assert_within(*runs)


def quantised(base: str):
    """A tiny Llama over whose layers' frozen weights LoRA lies, and its twin over the weights that
    those stand for.
    """
    model = tiny.llama()
    if base == "NF4":
        import nf4

        nf4.quantise(model)
    else:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(
            model.model.layers, getattr(quantization, f"{base}WeightOnlyConfig")()
        )
    plain = tiny.llama()
    for name, linear in plain.model.layers.named_modules():
        if isinstance(linear, torch.nn.Linear):
            packed = model.model.layers.get_submodule(name)
            linear.weight.data = (
                packed.dequantised() if base == "NF4" else packed.weight.dequantize()
            )
    made = []
    for each in (model, plain):
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=SOME, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        made.append(peft.get_peft_model(each, config).train())
    return made


@pytest.mark.filterwarnings("ignore:.*get_apply_tensor_subclass:UserWarning")
@pytest.mark.parametrize(
    "base",
    [
        pytest.param("Int8", marks=pytest.mark.long),
        pytest.param("Float8", marks=pytest.mark.long),
        "NF4",
    ],
)
def test_lora_over_a_quantised_base(base):
    stock, plain = quantised(base)
    hfpatch.apply(ours := copy.deepcopy(stock), checkpointing=tiny.TILED)
    batch = tiny.labelled()
    got, usual, true = (tiny.step(m, batch) for m in (ours, stock, tiny.exact(plain)))
    assert len(got) > 15
    assert_as_good(got, usual, true)
