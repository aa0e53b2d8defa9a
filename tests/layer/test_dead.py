"""Values that no gradient reads are not computed where a layer runs again, and every gradient stays
as it is, to the bit.
"""

from dataclasses import replace

import peft
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfpatch.layer.layer import TiledLayer


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products, and the elements that rotations write."""

    def __init__(self):
        super().__init__()
        self.multiplications = self.rotated = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        if function is torch.ops.hfpatch.rope.default:
            self.rotated += sum(x.numel() for x in out)
        return out


def models(lora: bool):
    """A patched model, and the same with every value computed."""
    ours, all_values = tiny.llama(dtype=torch.bfloat16), tiny.llama(dtype=torch.bfloat16)
    found = []
    for model in (ours, all_values):
        parts_of = tiny.patched(model)
        if lora:
            settings = peft.LoraConfig(
                r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
            )
            torch.manual_seed(3)
            parts_of = peft.get_peft_model(parts_of, settings)
            for name, p in parts_of.named_parameters():
                if "lora_B" in name:
                    p.data.normal_()  # zeros would hide a difference
        found.append(parts_of)
    for module in found[1].modules():
        if isinstance(module, TiledLayer):
            module._hfpatch.traits = replace(
                module._hfpatch.traits, unread_after=(), unread_before=()
            )
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_gradients_stay_to_the_bit_with_fewer_products(lora):
    ours, all_values = models(lora)
    batch = tiny.labelled()
    with Products() as few:
        got = tiny.step(ours, batch)
    with Products() as all_of_them:
        wanted = tiny.step(all_values, batch)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
    config, rows, layers = ours.config, 2 * tiny.TOKENS, 2
    D, H = config.hidden_size, config.num_attention_heads
    q_and_k = D + config.num_key_value_heads * D // H
    # Both of a tile's runs spare q, k, v, the one behind attention the last projection too.
    qkv = D * (q_and_k + config.num_key_value_heads * D // H)
    saved = 2 * qkv + config.intermediate_size * D
    assert all_of_them.multiplications - few.multiplications == layers * rows * saved
    # An adapter's sum is a value of its own.
    assert all_of_them.rotated - few.rotated == (0 if lora else 2 * layers * rows * q_and_k)
