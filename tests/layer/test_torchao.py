"""Training with torchao's float8 and quantisation-aware projections, emulated on a CPU: what scales
each token alone is tiled, and the same as stock; what scales several tokens by one number runs
whole, with a reason.
"""

from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import tiny
import torch
from torch import nn

import hfpatch
from hfpatch.layer.condition import look
from hfpatch.parts.quantised import scales_over_tokens

float8 = pytest.importorskip("torchao.float8")
pytestmark = [
    # torchao's extension libraries and pytree registration complain at import on a CPU machine
    pytest.mark.filterwarnings("ignore::UserWarning:torchao"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils._pytree"),
]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
TILE = hfpatch.Checkpointing(tile=16)  # three of 48 tokens; MX formats scale blocks of 32 channels


def trained_in_float8(recipe: str):
    """The layers' projections as torchao trains them by a recipe of its own."""

    def convert(model):
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        float8.convert_to_float8_training(model.model.layers, config=config)

    return convert


def fake_quantised(activation, weight):
    """The layers' projections prepared for quantisation-aware training; functions of torchao's
    `quantization.qat` that give the two configs.
    """

    def prepare(model):
        from torchao.quantization import qat, quantize_

        made = qat.QATConfig(
            activation_config=activation(qat), weight_config=weight(qat), step="prepare"
        )
        quantize_(model.model.layers, made)

    return prepare


def trained_in_mx(**settings):
    """The layers' projections in MXFP8, which scales blocks of 32 channels; of the weight's
    gradient, blocks of 32 tokens.
    """

    def convert(model):
        from torchao.prototype.moe_training import mxfp8_linear as mx

        emulated = mx.KernelPreference.EMULATED
        for layer in model.model.layers:
            for block in (layer.self_attn, layer.mlp):
                for name, linear in list(block.named_children()):
                    if type(linear) is nn.Linear:
                        made = mx.MXFP8Linear(
                            linear.in_features, linear.out_features, bias=False,
                            kernel_preference=emulated, **settings,
                        )  # fmt: skip
                        made.weight = linear.weight
                        setattr(block, name, made)

    return convert


def of_groups(qat):
    return qat.IntxFakeQuantizeConfig(torch.int4, group_size=16)


# (recipe, how, a part of the reason why its layers run untiled or None where they are tiled)
RECIPES = {
    "rowwise": (trained_in_float8("rowwise"), None),
    "rowwise_with_gw_hp": (trained_in_float8("rowwise_with_gw_hp"), None),
    "tensorwise": (trained_in_float8("tensorwise"), "one scale"),
    "qat per token": (
        fake_quantised(
            lambda qat: qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
            of_groups,
        ),
        "one scale",
    ),
    "qat of weights": (fake_quantised(lambda qat: None, of_groups), "one scale"),
    "mx": (trained_in_mx(), "one scale"),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("order", ["apply after", "apply before"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe, order, batch, capsys):
    """Tiled layers give the gradients of stock to float32's rounding, which moves no value over a
    boundary between two numbers of float8 here; whole ones to the bit.
    """
    convert, reason = RECIPES[recipe]
    stock, ours = tiny.llama(**SIZES), tiny.llama(**SIZES)
    convert(stock)
    options = {"checkpointing": TILE, "rms_norm": False, "mlp": False, "rope": False, "loss": False}
    if order == "apply before":
        hfpatch.apply(ours, **options)
        convert(ours)
    else:
        convert(ours)
        report = hfpatch.apply(ours, **options)
        assert reason is None or reason in str(report)
    rows = tiny.labelled(batch, 64 if recipe == "mx" else 48)  # it takes whole blocks of tokens
    got, usual = tiny.step(ours, rows), tiny.step(stock, rows)
    reasons = {look(layer).reason for layer in ours.model.layers}
    assert len(reasons) == 1 and got.keys() == usual.keys()
    if reason is None:
        assert reasons == {None}
    else:
        assert reason in reasons.pop()
        assert order == "apply after" or reason in capsys.readouterr().err
    for name, value in usual.items():
        error, size = (got[name] - value).norm(), value.norm()
        assert error <= 2e-6 * size, f"{name}: {error:.1e} of {size:.1e}"


def test_a_scale_under_an_adapter():
    """Whose base is torchao's: found inside the adapter."""
    peft = pytest.importorskip("peft")
    model = tiny.llama(**SIZES)
    float8.convert_to_float8_training(
        model.model.layers, module_filter_fn=lambda module, name: name.endswith("down_proj")
    )
    config = peft.LoraConfig(r=4, target_modules=["down_proj"], task_type="CAUSAL_LM")
    lora = peft.get_peft_model(model, config)
    report = hfpatch.apply(lora, checkpointing=TILE)
    assert "mlp.down_proj.base_layer: it rounds several tokens by one scale" in str(report)


def played(name: str, module: str, sizes=(4, 4), **own) -> nn.Linear:
    """A Linear of a class that another library has, or may have some day."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    theirs = FunctionType(forward.__code__, {"__name__": module, "nn": nn})  # as of their file
    kind = type(name, (nn.Linear,), {"__module__": module, "forward": theirs})
    linear = kind(*sizes, bias=False)
    vars(linear).update(own)
    return linear


def test_transformer_engine_runs_whole():
    """Its modules keep scales of their own from call to call: a layer with one runs untiled, and says
    so.
    """
    model, stock = tiny.llama(**SIZES), tiny.llama(**SIZES)
    hfpatch.apply(model, checkpointing=TILE)
    for each in (model, stock):
        for layer in each.model.layers:
            te = played("Linear", "transformer_engine.pytorch.module.linear", sizes=(128, 64))
            te.load_state_dict(layer.mlp.down_proj.state_dict())
            layer.mlp.down_proj = te
    got, usual = (tiny.step(each, tiny.labelled(2, 48)) for each in (model, stock))
    reason = look(model.model.layers[0]).reason
    assert "transformer_engine.pytorch.module.linear.Linear that hfpatch does not know" in reason
    for name, value in usual.items():
        assert (got[name] - value).norm() <= 2e-6 * value.norm(), name


def test_a_frozen_base_with_one_scale_for_its_input():
    """torchao's float8 weights that round their input by one scale, as LoRA finds them."""
    linear = nn.Linear(4, 4).requires_grad_(False)
    from torchao.quantization.granularity import PerRow, PerTensor

    for granularity, one in ((PerTensor(), True), (PerRow(), False)):
        linear.weight.act_quant_kwargs = SimpleNamespace(granularity=granularity)
        assert (scales_over_tokens(linear) is not None) == one
