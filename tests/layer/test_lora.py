"""LoRA over plain and quantised bases: exact where products are left out, small where others widen
or ask for gradients.
"""

import copy
import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn

import hfpatch
from hfpatch.layer.call import LayerCall
from hfpatch.layer.traced import Traced
from hfpatch.parts import unread as dead
from hfpatch.parts.quantised import base_of
from tests import tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))


def adapted(model: nn.Module, **settings) -> nn.Module:
    made = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **settings)
    )
    torch.manual_seed(1)
    for name, p in made.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.1)
    return made


@pytest.fixture(scope="module", params=["4bit", "8bit"])
def quantised(request, tmp_path_factory):
    """A tiny Llama loaded in few bits."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("model")
    tiny.llama(dtype=torch.bfloat16).save_pretrained(folder)
    kind = {f"load_in_{request.param}": True}
    config = BitsAndBytesConfig(**kind, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of a CPU without its compiled kernels
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16
        ).train()


def gradients(model: nn.Module) -> dict:
    model.zero_grad()
    model(**tiny.labelled()).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same_with_and_without_dead_products(model: nn.Module, monkeypatch) -> set:
    """Which Linear layers were left out, gradients being equal to the bit."""
    hfpatch.apply(model, checkpointing=tiny.TILED)
    left, forward = set(), dead._unread_forward
    monkeypatch.setattr(dead, "_unread_forward", lambda m, *args: left.add(m) or forward(m, *args))
    ours = gradients(model)
    monkeypatch.setattr(dead, "can_go_without", lambda module: False)
    computed = gradients(model)
    assert ours.keys() == computed.keys() and all("lora_" in n for n in ours)
    assert all(torch.equal(ours[n], computed[n]) for n in ours)
    return {
        name.removeprefix("base_model.model.") for name, m in model.named_modules() if m in left
    }


def test_a_base_under_lora_leaves_out_what_nobody_reads(monkeypatch):
    left = same_with_and_without_dead_products(adapted(tiny.llama()), monkeypatch)
    assert {n.partition("layers.0.")[2] for n in left if "layers.0." in n} == {
        "mlp.down_proj.base_layer", *(f"self_attn.{n}_proj.base_layer" for n in "qkv")
    }  # fmt: skip


def test_so_does_a_quantised_one(quantised, monkeypatch):
    left = same_with_and_without_dead_products(adapted(copy.deepcopy(quantised)), monkeypatch)
    assert any("down_proj" in n for n in left)


@pytest.mark.parametrize("first", ["adapters", "apply"])
def test_so_do_those_over_few_bits(quantised, first, monkeypatch):
    assert tiles_of(copy.deepcopy(quantised), first, monkeypatch) == 2 * 2 * 6


def tiles_of(model: nn.Module, first: str, monkeypatch) -> int:
    """Tiles that ran behind attention in a step, where `first` comes before the other."""
    run, count = Traced.after, []
    monkeypatch.setattr(
        Traced, "after", lambda *args, **kwargs: count.append(1) or run(*args, **kwargs)
    )
    settings = {"checkpointing": dataclasses.replace(tiny.TILED, plain=0)}
    if first == "apply":
        hfpatch.apply(model, **settings)
    model = adapted(model)
    if first == "adapters":
        hfpatch.apply(model, **settings)
    for _ in range(2):
        count.clear()
        assert all("lora_" in name for name in gradients(model))
    return len(count)


@pytest.fixture
def calls(monkeypatch) -> list:
    """Of each layer that ran in tiles: its index, and how many tiles."""
    found, forward = [], LayerCall.forward

    def counted(call, *args, **kwargs):
        outputs = forward(call, *args, **kwargs)
        found.append((call.layer._hfpatch.index, len(call.bounds)))
        return outputs

    monkeypatch.setattr(LayerCall, "forward", counted)
    return found


@pytest.mark.parametrize("order", ["peft, apply", "apply, peft"])
@pytest.mark.parametrize("base", ["plain", "4bit"])
def test_adapters_stay_in_tiles_in_both_orders(base, order, calls):
    """As stock over the same base, and every layer in as many tiles as without adapters."""
    import nf4

    stock = tiny.llama(dtype=torch.float64)
    if base == "4bit":
        nf4.quantise(stock)
    ours = copy.deepcopy(stock)
    if order == "apply, peft":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    ours, stock = adapted(ours), adapted(stock)
    if order == "peft, apply":
        hfpatch.apply(ours, checkpointing=tiny.TILED)
    calls.clear()  # of the small instance
    wanted, got = gradients(stock), gradients(ours)
    assert got.keys() == wanted.keys() and all("lora_" in n for n in got)
    for name, grad in got.items():  # 4-bit codes and norms have steps in float32
        assert (grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name
    tiles = 2 * tiny.TOKENS // tiny.TILED.tile
    assert calls == [(0, tiles), (1, tiles)]


def test_an_adapter_that_reads_the_output_keeps_it():
    dora = adapted(tiny.llama(), use_dora=True)
    assert base_of(dora.get_submodule("base_model.model.model.layers.0.mlp.down_proj")) is None
    tiny.assert_as_good(tiny.patched(dora), dora, tiny.labelled())


def test_a_preparation_that_widens_the_base_is_told(quantised):
    """get_peft_model freezes the base, and no more."""
    model = adapted(copy.deepcopy(quantised))
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())
    assert "float32 over" not in "".join(hfpatch.apply(model).notes)
    model = adapted(prepare_model_for_kbit_training(copy.deepcopy(quantised)))
    notes = "".join(hfpatch.apply(model).notes)
    assert "float32 over a quantised base" in notes and "leave that call out" in notes


def test_a_hook_of_ones_own_gets_the_gradient_of_what_is_embedded():
    model = adapted(tiny.llama())
    hfpatch.apply(model, checkpointing=tiny.TILED)
    plain, seen = gradients(model), []
    model.get_input_embeddings().register_forward_hook(
        lambda m, args, out: seen.append(out.requires_grad_(True))
    )
    assert all(torch.equal(found, plain[n]) for n, found in gradients(model).items())
    assert seen[0].grad is not None
