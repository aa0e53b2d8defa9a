"""LoRA on fused experts: layers in tiles, gradients of stock, and no adapted weight."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import families
import peft
import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.budget.policy import LEAST
from hfpatch.lab.models import config_of
from hfpatch.lab.simulate.implementations import build
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.layer.traced import Traced
from hfpatch.layer.traits import layers_in
from tests import tiny
from tests.layer.test_peft import assert_as_good
from tests.numerics import lifted

BY_NAME = {"target_modules": ["q_proj", "v_proj"],
           "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}  # fmt: skip
ALL = {"target_modules": "all-linear", "use_rslora": True}
PAST_WRAPPERS = tiny.not_before_transformers((5, 16), "reads its routers' bias past PEFT's wrapper")


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
    ran, after = [], Traced.after

    def counted(self, *args, **kwargs):
        ran.append(self)
        return after(self, *args, **kwargs)

    monkeypatch.setattr(Traced, "after", counted)
    return ran


# gpt-oss stores its experts the other way round and has biases; Mixtral and GLM are told by their
# routers and shared experts.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family, settings", [
    ("qwen3_moe", BY_NAME), ("gpt_oss", BY_NAME), ("qwen3_moe", ALL), ("mixtral", ALL),
    pytest.param("glm4_moe", ALL, marks=PAST_WRAPPERS),
])  # fmt: skip
def test_every_gradient_is_that_of_stock_in_tiles(family, settings, tiles):
    stock = adapted(family, settings)
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=tiny.TILED)
    assert "untiled" not in str(report)
    tiles.clear()  # those of the small instance
    got = tiny.step(ours, batch())
    ran = len(tiles)
    assert_as_good(got, tiny.step(stock, batch()), tiny.step(tiny.exact(stock), batch()))
    assert ran == 2 * 6 * len(layers_in(ours))  # six tiles, forward and backward


def test_the_adapted_weight_is_never_made(monkeypatch):
    """Not in training; a wrapper that runs untiled makes it, as PEFT does."""
    made, wrapper = [], peft.tuners.lora.layer.ParamWrapper
    real = wrapper.get_delta_factors
    monkeypatch.setattr(
        wrapper, "get_delta_factors", lambda self, name: made.append(name) or real(self, name)
    )
    ours = tiny.patched(adapted("qwen3_moe", BY_NAME))
    tiny.step(ours, batch())
    assert not made
    hfpatch.undo(ours)
    tiny.step(ours, batch())
    assert made


def test_undo_gives_back_peft_s_forward():
    stock = adapted("qwen3_moe", BY_NAME)
    ours = tiny.patched(stock)
    tiny.step(ours, batch())
    hfpatch.undo(ours)
    theirs, plain = tiny.step(ours, batch()), tiny.step(stock, batch())
    assert all(torch.equal(theirs[n], plain[n]) for n in plain)
    assert ours.config._experts_implementation == stock.config._experts_implementation


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_adapters_and_ranks_that_no_eight_divides(dtype):
    """Their sum, beside each other in one product; exact in float64 too, which has no grouped one."""
    stock = families.small_model("qwen3_moe", dtype)
    settings = dict(target_parameters=BY_NAME["target_parameters"], target_modules=["q_proj"])
    stock = peft.get_peft_model(stock, peft.LoraConfig(r=3, **settings), adapter_name="a")
    stock.add_adapter("b", peft.LoraConfig(r=5, use_rslora=True, **settings))
    stock.base_model.set_adapter(["a", "b"])
    randomised(stock)
    ours = tiny.patched(stock)
    with lifted() if dtype == torch.float64 else nullcontext():  # norms, routers, rotations
        got, plain = tiny.step(ours, batch()), tiny.step(stock, batch())
    assert len([n for n in got if "experts" in n]) == 2 * 2 * 4
    if dtype == torch.float32:
        return assert_as_good(got, plain, tiny.step(tiny.exact(stock), batch()))
    for name, value in plain.items():
        assert (got[name] - value).abs().max() <= 1e-12 * value.abs().max(), name


@pytest.mark.filterwarnings("ignore")
def test_adapters_switched_off_between_passes():
    """Backward runs with the adapters that forward had; one merged meanwhile is refused."""
    stock = adapted("qwen3_moe", BY_NAME)
    ours, plain = tiny.patched(stock), tiny.step(stock, batch())
    adapters = {p for p in ours.parameters() if p.requires_grad}
    loss = ours(**batch()).loss
    ours.base_model.disable_adapter_layers()
    for p in ours.parameters():  # PEFT freezes them meanwhile
        p.requires_grad_(p in adapters)
    loss.backward()
    ours.base_model.enable_adapter_layers()
    got = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(got) == len(adapters)
    kept = lambda found: {n: found[n] for n in got}  # noqa: E731
    assert_as_good(got, kept(plain), kept(tiny.step(tiny.exact(stock), batch())))
    with ours.disable_adapter(), stock.disable_adapter():
        assert torch.allclose(ours(**batch()).loss, stock(**batch()).loss)
    loss = ours(**batch()).loss
    ours.merge_adapter()
    with pytest.raises(RuntimeError, match="merged adapters of a"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_frozen_experts_wait_on_the_host():
    stock = adapted("qwen3_moe", BY_NAME)
    ours = copy.deepcopy(stock)
    hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=8, frozen_weights="host"))
    assert_as_good(*(tiny.step(m, batch()) for m in (ours, stock, tiny.exact(stock))))


@pytest.mark.filterwarnings("ignore")
def test_experts_of_four_bits_run_in_tiles(tiles):
    bnb = pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import parametrize

    def packed(model):
        for module in list(model.modules()):
            if type(module).__name__ == "Qwen3MoeExperts":
                for name in ("gate_up_proj", "down_proj"):
                    parametrize.replace_parameter_4bit(module, name, quant_type="nf4")
        return model

    assert bnb
    stock = packed(families.small_model("qwen3_moe", torch.float32))
    stock = randomised(peft.get_peft_model(stock, peft.LoraConfig(r=4, **BY_NAME)))
    dense = copy.deepcopy(stock)  # of the weights that four bits hold
    for module in list(dense.modules()):
        if "parametrizations" in module._modules:
            weights = {n: getattr(module, n) for n in ("gate_up_proj", "down_proj")}
            module.__class__ = type(module).__mro__[1]
            del module._modules["parametrizations"]
            for name, weight in weights.items():
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
    ours = copy.deepcopy(stock)
    report = hfpatch.apply(ours, checkpointing=hfpatch.Checkpointing(tile=8))
    assert "untiled" not in str(report)
    plain = tiny.step(stock, batch())
    tiles.clear()
    got = tiny.step(ours, batch())
    assert len(tiles) == 2 * 6 * len(layers_in(ours))
    assert_as_good(got, plain, tiny.step(tiny.exact(dense), batch()))


@pytest.mark.filterwarnings("ignore")
def test_torchao_s_experts_run_as_they_are_named(tiles):
    """Its tensors know no product of ours; in tiles all the same."""
    pytest.importorskip("torchao")
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    stock = families.small_model("qwen3_moe", torch.float32).requires_grad_(False)
    names = "re:.*experts\\.(gate_up|down)_proj"
    quantize_(stock, FqnToConfig({names: Int8WeightOnlyConfig(version=2)}), filter_fn=None)
    kind = type(stock.model.layers[0].mlp.experts.down_proj)
    assert kind.__module__.startswith("torchao.")
    stock.set_experts_implementation("eager")
    stock = randomised(peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=["q_proj"])))
    ours = tiny.patched(stock)
    tiles.clear()
    got, plain = tiny.step(ours, batch()), tiny.step(stock, batch())
    assert len(tiles) == 2 * 6 * 2
    dense = copy.deepcopy(stock)
    for module in dense.modules():
        for name in ("gate_up_proj", "down_proj"):
            if type(getattr(module, name, None)) is kind:
                weight = nn.Parameter(getattr(module, name).dequantize(), requires_grad=False)
                setattr(module, name, weight)
    assert_as_good(got, plain, tiny.step(tiny.exact(dense), batch()))


@pytest.mark.filterwarnings("ignore")
def test_memory_of_adapted_experts_at_true_size():
    """Qwen3-30B-A3B's layers, rank 16, 32,768 tokens: 1.4 GiB beyond parameters and gradients; 3.7
    where PEFT makes the adapted weight. Attention's forward runs once a layer.
    """
    config = config_of("Qwen/Qwen3-30B-A3B")[1] | {"num_hidden_layers": 2}
    with torch.device("meta"):
        settings = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"],
                                   target_parameters=BY_NAME["target_parameters"])  # fmt: skip
        model = peft.get_peft_model(build(config), settings, autocast_adapter_dtype=False)
    hfpatch.apply(model)
    found = simulate(model, 1, 32768, policy=replace(LEAST, tile=4096))
    assert found.whole == {} and found.attention_calls["forward"] == 2
    assert found.beyond_bytes <= 2.0 * 2**30
