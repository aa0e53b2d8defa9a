"""Names that users give the attention: all of transformers' own are ours to run, and others are
told of.
"""

import copy
import sys
from functools import partial

import pytest
import tiny
import torch
from transformers import EvollaConfig, EvollaForProteinText2Text
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hfpatch
from hfpatch.compat import attention_row, put

TILED = hfpatch.Checkpointing(offload="host", tile=16)


def named(model, name: str, monkeypatch, function):
    """The model as it is loaded with this attention, whose package is not installed here."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, function)
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._global_mapping, name, masks["flash_attention_2"])
    put(*attention_row(model.config, name))
    return model


def gradients(model) -> list:
    ids = tiny.ids()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2@main"]
)
def test_every_flash_attention_is_ours_to_run(name, monkeypatch):
    """Theirs would raise here: where flash_attn is missing transformers takes a kernel of the hub,
    under its repository's name.
    """
    model = tiny.llama(dtype=torch.float64)
    plain = copy.deepcopy(model)
    hfpatch.apply(plain, checkpointing=TILED)
    wanted = gradients(plain)
    ours = named(model, name, monkeypatch, flash_attention_forward)
    hfpatch.apply(ours, checkpointing=TILED)
    for got, want in zip(gradients(ours), wanted, strict=True):
        assert torch.equal(got, want)


def test_another_librarys_attention_is_told_of(monkeypatch, capsys):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def theirs(*args, **kwargs):
        return sdpa(*args, **kwargs)

    theirs.__module__ = "another.library"
    model = named(tiny.llama(), "theirs", monkeypatch, theirs)
    hfpatch.apply(model, checkpointing=TILED)
    for _ in range(2):
        gradients(model)
    said = (
        "the layers of LlamaModel run untiled, their inputs offloaded: attention of another library "
        "(theirs)."
    )
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_beside_a_mask_function_of_ones_own(family, monkeypatch):
    """Layers with such a mask run untiled, in the family's own eager attention."""
    from families import small_model

    stock = small_model(family)
    stock.set_attn_implementation("eager")
    for module in stock.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 1.0  # so that it shows
    ours, batch = tiny.patched(stock), {"input_ids": torch.arange(3, 51).view(2, 24)}
    file = sys.modules[type(stock).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        make, seen = getattr(file, name), lambda b, h, q, kv: (kv < 3) | (q - kv < 2)
        monkeypatch.setattr(file, name, partial(make, and_mask_function=seen))
    batch["labels"] = batch["input_ids"]
    got, wanted = tiny.step(ours, batch), tiny.step(stock, batch)
    for name, gradient in wanted.items():
        # what a family computes in float32
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-3), name


@pytest.mark.parametrize("proteins", [12, tiny.TOKENS])
def test_an_encoder_inside_the_stack_keeps_its_own_attention(proteins):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "mask_token_id": 4}
    stock = EvollaForProteinText2Text(EvollaConfig(
        **small | {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": tiny.VOCAB},
        protein_encoder_config=small | none | {"vocab_size": 40, "num_hidden_layers": 1},
        aligner_num_add_layers=1, aligner_attention_probs_dropout_prob=0.0,
        resampler_depth=1, resampler_num_latents=5,
    )).train()  # fmt: skip
    batch = tiny.labelled() | {
        "protein_input_ids": torch.randint(5, 30, (2, proteins)),
        "protein_attention_mask": torch.ones(2, proteins, dtype=torch.long),
    }
    tiny.assert_as_good(tiny.patched(stock), stock, batch)
