"""The block whose derivatives are written out: bit for bit what modules and autograd give, and it steps aside for who looks on."""

import pytest
import tiny
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import hfpatch
from hfpatch.models import ask
from hfpatch.models.direct import Direct


def qwen3():
    torch.manual_seed(0)
    settings = {k: v for k, v in tiny.config().to_dict().items() if k in vars(Qwen3Config()) and k != "model_type"}
    return Qwen3ForCausalLM(Qwen3Config(**settings | {"head_dim": 16})).to(torch.bfloat16).train()


MODELS = {
    "llama": lambda: tiny.llama(dtype=torch.bfloat16),
    "biases": lambda: tiny.llama(dtype=torch.bfloat16, attention_bias=True, mlp_bias=True),
    "norms of heads": qwen3,
}
FROZEN = {"all trained": (), "inputs frozen": ("embed",), "some frozen": ("q_proj", "down_proj", "norm", "v_proj.bias")}
KEPT = {"one tile": {"tile": 64}, "tiles": {"tile": 8}, "known": {"tile": 8, "keep": ("mid", "gate_up")}}


@pytest.fixture
def used(monkeypatch):
    """Tiles that ran behind attention without a module's call."""
    calls, post = [], Direct.post
    monkeypatch.setattr(Direct, "post", lambda *args: calls.append(1) or post(*args))
    return calls


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
    monkeypatch.setattr(ask, "can_be_direct", lambda *args: False)
    # What is known changes no bit either: of a sum its two gradients are added in the norm's pass, as where it is not known.
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
