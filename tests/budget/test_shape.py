"""The description of a model against the model itself, built without memory from the same
config.
"""

import json
from functools import cache

import pytest
import tiny

from hfpatch.budget.families import FAMILIES
from hfpatch.budget.limits import check_sizes
from hfpatch.budget.shape import ModelShape, UnknownFamily
from hfpatch.lab.presets import MODELS, find_preset, preset_config

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 64,
        "pad_token_id": None}  # fmt: skip
# What a family's tiny config needs beside it, and the switches that its code reads.
TURNED = {
    "llama": [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}],
    "mistral": [{"sliding_window": None}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 2}],
    "qwen3": [{"attention_bias": True}],
    "qwen3_moe": [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}],
    "mixtral": [{"sliding_window": 128}],
    "gpt_oss": [{"attention_bias": False}],
    "gemma3_text": [{"attention_bias": True}],
    "phi3": [{"sliding_window": 64}],
    "smollm3": [{"use_sliding_window": True, "sliding_window": 64}, {"mlp_bias": True}],
    "glm4": [{"attention_bias": False}],
    "starcoder2": [{"use_bias": False}],
    "cohere": [{"use_qk_norm": True}],
    "deepseek_v3": [{"q_lora_rank": None}, {"attention_bias": True}, {"first_k_dense_replace": 1}],
}
MORE = {
    "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 16,
                    "q_lora_rank": 24,
                    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                    "v_head_dim": 20},
    "qwen3_moe": {"moe_intermediate_size": 32}, "phi3": {"head_dim": 16},
    "cohere": {"head_dim": 16},
    "starcoder2": {"head_dim": 16}, "qwen2": {"head_dim": 16}, "olmo2": {"head_dim": 16},
    "olmo3": {"head_dim": 16},
    "granite": {"head_dim": 16}, "smollm3": {"head_dim": 16},
}  # fmt: skip
CASES = [(kind, turned) for kind in FAMILIES for turned in ({}, *TURNED.get(kind, ()))]


@cache
def built(kind: str, values: str):
    """(config, model on the meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **json.loads(values))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # transformers 5.0 does not on this device
    return config, model


def check(config, model):
    shape = ModelShape.from_config(config)
    base = model.model
    layers = [sum(p.numel() for p in layer.parameters()) for layer in base.layers]
    assert [shape.layer_parameters_of(i) for i in range(shape.num_layers)] == layers
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.body_parameters == sum(layers)
    linears = {n: m for n, m in base.layers[0].named_modules() if type(m).__name__ == "Linear"}
    o = next(m for n, m in linears.items() if n.endswith("o_proj"))
    assert (o.in_features, o.in_features * o.out_features) == (shape.out_size, shape.o_weights)
    before = [m for n, m in linears.items() if "attn" in n and not n.endswith("o_proj")]
    assert sum(m.weight.numel() for m in before) == shape.qkv_weights
    wanted = getattr(config, "sliding_window", None) or 0
    for i in range(shape.num_layers):
        slides = (getattr(config, "layer_types", None) or ["sliding" if wanted else "full"] * 99)[i]
        assert shape.window(i) == (wanted if "sliding" in slides else 0)


# Every row of the table, tiny, as it is and with each switch that its code reads turned.
@pytest.mark.parametrize("kind, turned", CASES)
def test_each_family_has_the_parameters_of_its_model(kind, turned):
    values = TINY | MORE.get(kind, {}) | turned
    check(*built(kind, json.dumps(values)))


# config.json may leave out what the config class assumes: the class's own defaults, in few layers,
# said by nothing else.
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_what_its_class_assumes(kind):
    from transformers import AutoConfig

    whole = AutoConfig.for_model(kind)
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    bare = {"model_type": kind} | {name: getattr(whole, name) for name in sizes}
    if FAMILIES[kind].defaults.get("num_key_value_heads") is None:
        bare["num_key_value_heads"] = whole.num_key_value_heads
    assert (
        ModelShape.from_config(bare)
        == ModelShape.from_config(whole)
        == ModelShape.from_config(whole.to_dict())
    )


def test_real_sizes_of_latent_attention_and_experts():
    for kind, layers in (("deepseek_v3", 4), ("gpt_oss", 2), ("qwen3_moe", 2), ("gemma3_text", 6)):
        check(*built(kind, json.dumps({"num_hidden_layers": layers, "pad_token_id": None})))


def test_a_window_of_no_tokens_is_none():
    """As the config of Qwen2-MoE says it, and as it is saved."""
    from transformers import AutoConfig

    values = AutoConfig.for_model("qwen2_moe").to_dict()
    assert values["sliding_window"] == 0
    check_sizes({name: value for name, value in values.items() if not isinstance(value, list)}.get)


@pytest.mark.parametrize(
    "kind",
    ["gemma3", pytest.param("gemma4_text", marks=tiny.not_with_transformers_5_0("has no Gemma 4"))],
)
def test_models_without_closed_forms_are_refused_with_a_way_out(kind):
    """Also such whose sizes differ from layer to layer, which raise when they are read."""
    from transformers import AutoConfig

    with pytest.raises(UnknownFamily, match=rf"no closed form describes the model type '{kind}'"):
        ModelShape.from_config(AutoConfig.for_model(kind))


# In millions, as the model cards count them (Gemma 3: without its vision tower).
CARDS = {
    "Qwen/Qwen3-0.6B": 596, "Qwen/Qwen3-4B": 4022, "Qwen/Qwen3-8B": 8191, "Qwen/Qwen3-14B": 14768,
    "Qwen/Qwen3-32B": 32762, "Qwen/Qwen3-30B-A3B": 30532, "Qwen/Qwen2.5-7B": 7616,
    "Qwen/Qwen2.5-72B": 72706,
    "mistralai/Mistral-7B-v0.3": 7248, "mistralai/Mistral-Nemo-2407": 12248,
    "mistralai/Mixtral-8x7B-v0.1": 46703,
    "google/gemma-2-9b": 9242, "google/gemma-3-12b": 11766, "openai/gpt-oss-20b": 20915,
    "openai/gpt-oss-120b": 116829, "microsoft/phi-4": 14660, "allenai/OLMo-2-1124-7B": 7299,
    "HuggingFaceTB/SmolLM3-3B": 3075, "zai-org/GLM-4-9B-0414": 9400, "bigcode/starcoder2-7b": 7174,
    "CohereLabs/c4ai-command-r-v01": 34981, "deepseek-ai/DeepSeek-V3": 671026,
}  # fmt: skip


def test_presets_have_the_parameters_of_their_cards():
    counts = {
        name: round(ModelShape.from_config(preset_config(name)).parameters / 1e6) for name in CARDS
    }
    assert counts == CARDS


# Two layers of each preset, built: what the row says is what transformers makes of it.
@pytest.mark.parametrize("name", MODELS)
def test_presets_build(name):
    values = preset_config(name) | {"num_hidden_layers": 2}
    check(*built(values.pop("model_type"), json.dumps(values)))


@pytest.mark.parametrize("name, preset", [
    ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("qwen3-8b", "Qwen/Qwen3-8B"),
    ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
    ("google/gemma-3-12b-it", "google/gemma-3-12b"),
    ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B"), ("unsloth/Qwen3-8B-unsloth-bnb-4bit",
                                                       "Qwen/Qwen3-8B"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"),
    ("THUDM/GLM-4-9B-0414", "zai-org/GLM-4-9B-0414"),
    ("somebody/Qwen3-8B", None), ("Qwen/Qwen4-8B", None), ("a/b/qwen3-8b", None),
])  # fmt: skip
def test_names_that_mean_a_preset(name, preset):
    assert find_preset(name) == preset
