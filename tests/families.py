"""Small models of many families, from transformers' own config classes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hfpatch.decoder.find import find_decoder
from hfpatch.decoder.small_instance import kind_of, scaled_config
from scripts.families import SHOWN

# What a default config lacks to show what the family does.
CHANGES = {
    **SHOWN,
    "smollm3": {"no_rope_layers": [1, 1, 1, 0] * 9},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "cohere": {"logit_scale": 0.0625},
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "jetmoe": {"output_router_logits": True, "aux_loss_coef": 0.1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 59},
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
}
DERIVED = ("zamba2",)  # whose config computes sizes from others as it is made
IMAGES = {"glm5_next": {"vision_config": {"hidden_size": 32, "depth": 1}}}
TILED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "gemma",
    "gemma2", "gemma3_text",
    "phi3", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "smollm3", "glm4", "glm4_moe",
    "cohere", "cohere2",
    "ministral3", "stablelm", "starcoder2", "seed_oss", "deepseek_v3", "llama4_text", "ernie4_5",
    "ernie4_5_moe", "gpt_neox",
    "gemma4_text", "falcon", "jetmoe", "apertus", "arcee", "exaone4", "nanochat", "hy_v3",
    "solar_open",
)  # fmt: skip
MORE = (
    "afmoe", "aria_text", "axk1", "axk2",
    "cohere2_moe", "dots3_note_text",
    "exaone_moe", "flex_olmo", "glm", "glm4_moe_lite", "granite_swa", "granitemoe_swa",
    "granitemoeshared", "helium",
    "internlm3", "iquestcoder", "jais2", "laguna", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "minimax_m3_vl_text",
    "olmo", "phi", "phimoe", "vaultgemma",
)  # fmt: skip


def small_model(name: str, dtype=torch.float64):
    """A causal language model in training mode, one layer of each kind at least, weights of
    ordinary size.
    """
    if name not in CONFIG_MAPPING:
        pytest.skip("unknown to this transformers")
    config = CONFIG_MAPPING[name](**CHANGES.get(name, IMAGES.get(name, {})))
    auto = AutoModelForImageTextToText if name in IMAGES else AutoModelForCausalLM
    with torch.device("meta"):
        real = auto.from_config(config)
    kinds = [kind_of(layer) for layer in find_decoder(real).layers]
    n_layers = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    small = scaled_config(config.get_text_config(), n_layers)
    if name in DERIVED:
        small.__post_init__()
    if name in IMAGES:
        config.text_config, config.vision_config.out_hidden_size = small, small.hidden_size
        small = config
    torch.manual_seed(0)
    model = auto.from_config(small, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.dim() < 2 else p.copy_(
                torch.randn_like(p) * min(p.shape[-2:]) ** -0.5
            )
    return model.to(dtype).train()
