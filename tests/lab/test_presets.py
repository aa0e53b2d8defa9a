"""Presets have the sizes of the models that they are named after."""

import pytest
from tiny import LONG

from hfpatch.lab.presets import find_preset, preset_config
from hfpatch.lab.simulate.implementations import build

# Millions of parameters, as the cards have them.
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
FEW = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-12b")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=LONG) for n in CARDS])
def test_a_preset_has_the_parameters_of_its_card(name):
    parameters = build(preset_config(name)).parameters()
    assert round(sum(p.numel() for p in parameters) / 1e6) == CARDS[name]


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
