"""accelerate's offloading and device maps are refused with a sentence."""

import accelerate
import pytest
import torch

import hfpatch
from tests.layer.deep import tiny_llama, tokens

PARTS = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.norm": "cpu",
    "lm_head": "cpu",
}
LAYERS = {"model.layers.0": "cpu", "model.layers.1": "cpu", "model.layers.2": "disk"}


def lay_out(model, how, directory):
    if how == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if how == "disk_offload":
        return accelerate.disk_offload(model, directory, execution_device=torch.device("cpu"))
    return accelerate.dispatch_model(
        model, {**PARTS, **LAYERS}, offload_dir=directory, main_device="cpu"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_an_offloaded_model_is_not_patched(how, tmp_path):
    model = tiny_llama(torch.float32).eval()
    ids = tokens()
    lay_out(model, how, tmp_path)
    with torch.no_grad():
        before, classes = model(ids).logits, [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="hfpatch: .* must be on one device.*without device_map"):
        hfpatch.apply(model)
    assert [type(module) for module in model.modules()] == classes
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.filterwarnings("ignore")
def test_a_model_spread_over_devices_is_not_patched():
    model = tiny_llama(torch.float32)
    for layer, place in zip(model.model.layers, ("cpu", "meta")):
        hook = accelerate.hooks.AlignDevicesHook(execution_device=place)
        accelerate.hooks.add_hook_to_module(layer, hook)
    with pytest.raises(ValueError, match="hfpatch: .* got a device_map that spreads it"):
        hfpatch.apply(model)


def test_a_device_map_of_one_device_trains():
    """bitsandbytes models come with hooks for their one device (QLoRA)."""
    model = tiny_llama(torch.float32)
    hfpatch.apply(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
