"""Layers that take keys and values of earlier ones (Gemma 3n, Gemma 4): tiled, exact, nothing of
them lost or counted twice.
"""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hfpatch
from hfpatch.budget.policy import ALL, LEAST
from hfpatch.layer.shared_keys import SharedKeys
from hfpatch.layer.why_whole import why
from tests.decoder.test_families import batch, step

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 64, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING,
                                               FULL],
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "gemma4_text": {"global_head_dim": 16},
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 5},
}
OF_GEMMA_3N = tiny.not_before_transformers((5, 6), "keeps Gemma 3n's keys in its cache")
NAMES = ["gemma4_text", pytest.param("gemma3n_text", marks=OF_GEMMA_3N)]
UNFUSED = {"rms_norm": False, "rope": False, "mlp": False, "loss": False}
TILES = hfpatch.Checkpointing(offload="host", tile=16)
POLICIES = [
    replace(LEAST, tile=16), replace(LEAST, tile=4096), replace(LEAST, offload="gpu", tile=16, keep=ALL),
    replace(LEAST, offload="gpu", keep=ALL),
    replace(LEAST, tile=14, keep=ALL), replace(LEAST, tile=16, keep="input"),
    replace(LEAST, every=3, tile=14),
    replace(LEAST, every=2, tile=4096), replace(LEAST, tile=16, keep=3),
    replace(LEAST, tile=14, plain=2), replace(LEAST, tile=14, plain=5),
]  # fmt: skip


def small(name="gemma4_text", **more):
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[name](**{**SIZES, **FAMILIES[name], **more})
        )
        .double()
        .train()
    )


def patched(stock, policy=None, **options):
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=TILES, **(UNFUSED | options))
    if policy is not None:
        ours.model._hfpatch.runtime._resolve = lambda *a: policy
    return ours, str(report)


def check(ours, stock, given, accuracy=1e-6):
    _, wanted_loss, wanted = step(stock, given)
    _, loss, got = step(ours, given)
    assert abs(loss - wanted_loss) <= accuracy * abs(wanted_loss)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] - value).norm() <= accuracy * value.norm().clamp_min(1e-3), name


@pytest.mark.parametrize("policy", tiny.longer(POLICIES, POLICIES[4], POLICIES[6], POLICIES[9]))
@pytest.mark.parametrize("name", NAMES)
def test_tiled_layers_give_later_ones_their_keys_and_take_back_the_gradients(name, policy):
    """Gemma 3n's hidden states have four streams, which are rows of four times the width to
    tiles.
    """
    stock = small(name)
    ours, report = patched(stock, policy)
    assert "untiled" not in report and "7 x Gemma" in report
    for _ in range(2):  # the second knows what the first found out
        check(ours, stock, batch())


def masked():
    visible = torch.ones(2, 40, dtype=torch.long)
    visible[0, :9], visible[1, 13:15] = 0, 0
    return batch() | {"attention_mask": visible}


def packed():
    given = {name: x[:1] for name, x in batch().items()}
    return given | {"position_ids": torch.cat([torch.arange(17), torch.arange(23)])[None]}


@pytest.mark.parametrize("given", [masked, packed])
@pytest.mark.parametrize("policy", POLICIES[:3])
@pytest.mark.parametrize("name", NAMES)
def test_under_masks_and_in_packed_rows(name, given, policy):
    stock = small(name)
    ours, _ = patched(stock, policy)
    check(ours, stock, given())


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_two_backwards_through_one_graph(policy):
    stock = small()
    ours, _ = patched(stock, policy)
    grads = []
    for model in (stock, ours):
        loss = model(**batch(), use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for value, got in zip(*grads):
        assert (got - value).norm() <= 1e-6 * value.norm().clamp_min(1e-3)


def test_where_only_what_later_layers_took_is_trained():
    """The keys' own layers may have no gradient of their own to ask for but through later ones."""
    stock = small()
    for name, p in stock.named_parameters():
        p.requires_grad_("k_proj" in name or "v_proj" in name)
    ours, _ = patched(stock)
    check(ours, stock, batch())


def test_with_adapters():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    stock = get_peft_model(small(), config)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILES, **UNFUSED)
    check(ours, stock, batch())


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_and_logits_are_transformers_own(name):
    stock = small(name).eval()
    ours, _ = patched(stock)
    ids = batch()["input_ids"]
    assert torch.equal(stock.generate(ids, max_new_tokens=5), ours.generate(ids, max_new_tokens=5))
    with torch.no_grad():
        wanted, got = (m(input_ids=ids, use_cache=False).logits for m in (stock, ours))
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_layers_run_again_with_the_keys_they_had(name):
    """They keep no more than their inputs all the same."""
    stock = small(name)
    ours, _ = patched(stock)
    for layer in ours.model.layers:
        layer._hfpatch.traits = replace(layer._hfpatch.traits, reason=why("untried", "asked for"))
    check(ours, stock, batch())


@pytest.mark.parametrize("policy", POLICIES[:4])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_outlives_a_step(policy, backward, monkeypatch):
    """No cycle through the graph holds what a step made: the dict of its keys goes with it, garbage
    collector or not.
    """
    made, init = [], SharedKeys.__init__
    monkeypatch.setattr(
        SharedKeys, "__init__", lambda self, *a: (init(self, *a), made.append(weakref.ref(self)))[0]
    )
    ours, _ = patched(small(), policy)
    gc.collect()
    gc.disable()
    try:
        loss = ours(**batch(), use_cache=False).loss
        if backward:
            loss.backward()
        del loss
        assert made and not any(ref() is not None for ref in made)
    finally:
        gc.enable()


@OF_GEMMA_3N
@pytest.mark.parametrize("policy", POLICIES[:2])
def test_the_gradient_of_hidden_states_in_streams(policy):
    """Of what a caller, or a hook, holds of a layer's output: the next layer took the rows behind
    its back.
    """
    stock = small("gemma3n_text")
    ours, _ = patched(stock, policy)
    given, found = batch() | {"use_cache": False, "output_hidden_states": True}, []
    for model in (stock, ours):
        out = model(**given)
        found.append(torch.autograd.grad(out.loss, out.hidden_states[:-1]))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()
