"""LoRA on fused experts: layers in tiles, gradients of stock, and no adapted weight."""

import copy

import families
import peft
import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.layer.parts import LayerParts
from tests import tiny
from tests.layer.test_peft import assert_as_good

BY_NAME = {"target_modules": ["q_proj", "v_proj"],
           "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}  # fmt: skip
ALL = {"target_modules": "all-linear", "use_rslora": True}


def randomised(model: nn.Module) -> nn.Module:
    """Adapters that change something: PEFT's are zero in one factor."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.1)
    return model


def adapted(family: str, settings: dict, dtype=torch.float32) -> nn.Module:
    made = families.small_model(family, dtype)
    return randomised(peft.get_peft_model(made, peft.LoraConfig(r=4, lora_alpha=6, **settings)))


def batch() -> dict:
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def tiles(monkeypatch):
    """How many tiles went behind attention."""
    ran, post = [], LayerParts.post

    def counted(self, *args, **kwargs):
        ran.append(self)
        return post(self, *args, **kwargs)

    monkeypatch.setattr(LayerParts, "post", counted)
    return ran


# gpt-oss stores its experts the other way round and has biases; Mixtral and GLM are told by their
# routers and shared experts.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family, settings", [
    ("qwen3_moe", BY_NAME), ("gpt_oss", BY_NAME), ("qwen3_moe", ALL), ("mixtral", ALL),
    ("glm4_moe", ALL),
])  # fmt: skip
def test_every_gradient_is_that_of_stock_in_tiles(family, settings, tiles):
    stock = adapted(family, settings)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert "whole" not in str(report)
    tiles.clear()  # those of the small instance
    got = tiny.step(ours, batch())
    ran = len(tiles)
    assert_as_good(got, tiny.step(stock, batch()), tiny.step(tiny.exact(stock), batch()))
    layers = len([m for m in ours.modules() if "_hfpatch_index" in vars(m)])
    assert ran == 2 * 6 * layers  # six tiles, forward and backward
