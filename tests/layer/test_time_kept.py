"""Mixers in tiles through time beside frozen, quantised and streamed weights, and generation."""

import copy

import families
import pytest
import tiny
import torch
from numerics import lifted
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

import hfpatch
from hfpatch.decoder.find import find_decoder
from tests.decoder.test_families import batch, step
from tests.layer.test_time import (
    TILE,
    TOKENS,
    UNFUSED,
    assert_same,
    lengths,
    timed_mixers,
)

pytestmark = tiny.not_before_transformers((5, 16), "hands mixers their states by other ways")


@hfpatch.token_wise
class Packed(nn.Linear):
    """A Linear as a quantised one is: weights of 8 bits without a gradient, written out at each
    call.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> "Packed":
        made = cls(linear.in_features, linear.out_features, bias=False).requires_grad_(False)
        made.scale = nn.Buffer(linear.weight.detach().abs().max() / 127)
        steps = (linear.weight.detach() / made.scale).round().to(torch.int8)
        made.weight = nn.Parameter(steps, requires_grad=False)
        return made

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def adapted(name: str, packed: bool = False) -> nn.Module:
    """LoRA on every Linear of the mixers and the MLPs, the base packed or not."""
    model = families.small_model(name)
    if packed:
        for layer in find_decoder(model).layers:
            inner = [n for n, m in layer.named_modules() if type(m) is nn.Linear and m.bias is None]
            for path in inner:
                layer.set_submodule(path, Packed.of(layer.get_submodule(path)))
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["in_proj_qkv", "in_proj_z", "out_proj", "up_proj"],
                      init_lora_weights=False)  # fmt: skip
    return get_peft_model(model, lora).double()  # adapters of packed weights are float32


@pytest.mark.parametrize("packed", [False, True], ids=["frozen", "packed"])
def test_adapters_over_a_base_that_stays(packed):
    """LoRA, and LoRA over quantised weights (played: those of bitsandbytes know no float64)."""
    stock = adapted("qwen3_5_text", packed)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    runs = lengths(ours.base_model.model)
    with lifted():
        got, wanted = (step(m, batch(TOKENS))[2] for m in (ours, stock))
    assert any(".linear_attn." in name for name in wanted)
    assert_same(got, wanted, 1e-12)
    assert max(runs) == 64


def test_frozen_weights_come_from_the_host():
    """For each tile's backward too: the bits of weights that stay."""
    model = adapted("qwen3_5_text").float()
    found, calls = [], []
    for place in ("gpu", "host"):
        ours = copy.deepcopy(model)
        how = hfpatch.Checkpointing(offload="host", tile=64, frozen_weights=place)
        hfpatch.apply(ours, checkpointing=how, **UNFUSED)
        runs = lengths(ours.base_model.model)
        found.append(step(ours, batch(TOKENS))[2])
        calls.append(runs)
    assert_same(*found, 0.0)
    # of which a chain would need those of all its layers at once
    assert sorted(calls[0]) == sorted(calls[1]) and max(calls[0]) == 64


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_prompts_longer_than_a_tile_are_generated_from_as_ever(name):
    """A cache of transformers' own is not ours to cut: prefill runs as there."""
    stock = families.small_model(name).eval()
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=TILE, **UNFUSED)
    assert timed_mixers(ours)
    ids = batch(TOKENS)["input_ids"]
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    got, wanted = (m.generate(ids, **how) for m in (ours, stock))
    assert torch.equal(got, wanted) and got.shape[1] == TOKENS + 4
    with torch.no_grad():
        a, b = (m(ids, use_cache=True).logits for m in (ours, stock))
    assert (a - b).norm() <= 1e-5 * b.norm()
