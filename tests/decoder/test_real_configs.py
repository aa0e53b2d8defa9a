"""The sizes of the decoders that are downloaded most, as their config.json has them: each builds a
small instance, and its layers are tiled.
"""

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hfpatch


def long_rope(pairs: int, **more) -> dict:
    factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0 + i / 4 for i in range(pairs)]}
    scaling = {"type": "longrope", **factors, **more.pop("scaling", {})}
    return {"rope_scaling": scaling, "rope_theta": 10000.0, **more}


def sizes(vocab, hidden, intermediate, layers, heads, kv_heads, **more) -> dict:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 131072, **more,
    }  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_YARN.pop("truncate")
OLMO3 = {
    "rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MSCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
FOURTH_FULL = ["linear_attention"] * 3 + ["full_attention"]
MROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
}  # fmt: skip
DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip

# model -> (model_type, its config.json)
REAL = {
    "Llama-3.1-8B": ("llama", sizes(
        128256, 4096, 14336, 32, 32, 8, rope_theta=500000.0, rope_scaling=LLAMA3)),
    "Llama-3.2-1B": ("llama", sizes(
        128256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True,
        rope_theta=500000.0, rope_scaling={**LLAMA3, "factor": 32.0})),
    "TinyLlama-1.1B": ("llama", sizes(32000, 2048, 5632, 22, 32, 4)),
    "Qwen2.5-7B": ("qwen2", sizes(
        152064, 3584, 18944, 28, 28, 4, max_window_layers=28, use_sliding_window=False,
        sliding_window=131072, rope_theta=1e6)),
    "Qwen3-8B": ("qwen3", sizes(
        151936, 4096, 12288, 36, 32, 8, head_dim=128, max_window_layers=36, rope_theta=1e6)),
    "Qwen3-30B-A3B": ("qwen3_moe", sizes(
        151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1)),
    "Qwen3.5-9B": ("qwen3_5_text", sizes(
        248320, 4096, 12288, 32, 16, 4, head_dim=256, layer_types=FOURTH_FULL * 8,
        rope_parameters=MROPE, **DELTA_NET)),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", sizes(
        248320, 2048, 512, 40, 16, 2, head_dim=256, layer_types=FOURTH_FULL * 10,
        rope_parameters=MROPE, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, **DELTA_NET)),
    "Phi-4-mini": ("phi3", long_rope(48, partial_rotary_factor=0.75, **sizes(
        200064, 3072, 8192, 32, 24, 8, original_max_position_embeddings=4096,
        sliding_window=262144, tie_word_embeddings=True, pad_token_id=199999))),
    "Phi-3.5-mini": ("phi3", long_rope(48, **sizes(
        32064, 3072, 8192, 32, 32, 32, original_max_position_embeddings=4096,
        sliding_window=262144, pad_token_id=32000))),
    "Phi-3.5-MoE": ("phimoe", long_rope(64, scaling=MSCALES, **sizes(
        32064, 4096, 6400, 32, 32, 8, original_max_position_embeddings=4096,
        num_local_experts=16, num_experts_per_tok=2))),
    "Phi-4": ("phi3", sizes(
        100352, 5120, 17920, 40, 40, 10, rope_theta=250000.0, pad_token_id=100349)),
    "gemma-2-9b": ("gemma2", sizes(
        256000, 3584, 14336, 42, 16, 8, head_dim=256, sliding_window=4096,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)),
    "gemma-3-4b": ("gemma3_text", sizes(
        262208, 2560, 10240, 34, 8, 4, head_dim=256, sliding_window=1024,
        rope_theta=1e6, rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "gemma-4-E4B": ("gemma4_text", sizes(
        262144, 2560, 10240, 42, 8, 2, head_dim=256, global_head_dim=512, sliding_window=512,
        num_kv_shared_layers=18, hidden_size_per_layer_input=256)),
    "Mistral-7B-v0.3": ("mistral", sizes(
        32768, 4096, 14336, 32, 32, 8, rope_theta=1e6, sliding_window=None)),
    "Mistral-Nemo": ("mistral", sizes(
        131072, 5120, 14336, 40, 32, 8, head_dim=128, rope_theta=1e6, sliding_window=None)),
    "Mixtral-8x7B": ("mixtral", sizes(
        32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2,
        rope_theta=1e6, sliding_window=None)),
    "gpt-oss-20b": ("gpt_oss", sizes(
        201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, rope_theta=150000, rope_scaling=YARN,
        layer_types=["sliding_attention", "full_attention"] * 12)),
    "DeepSeek-V3": ("deepseek_v3", sizes(
        129280, 7168, 18432, 61, 128, 128, q_lora_rank=1536, moe_intermediate_size=2048,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
        first_k_dense_replace=3, rope_scaling=DEEPSEEK_YARN, **LATENT)),
    "DeepSeek-V2-Lite": ("deepseek_v2", sizes(
        102400, 2048, 10944, 27, 16, 16, q_lora_rank=None, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
        rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, **LATENT)),
    "GLM-4-9B": ("glm4", sizes(
        151552, 4096, 13696, 40, 32, 2, head_dim=128, partial_rotary_factor=0.5,
        pad_token_id=151329)),
    "GLM-4.5-Air": ("glm4_moe", sizes(
        151552, 4096, 10944, 46, 96, 8, head_dim=128, partial_rotary_factor=0.5,
        moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=1, attention_bias=True)),
    "SmolLM3-3B": ("smollm3", sizes(
        128256, 2048, 11008, 36, 16, 4, no_rope_layer_interval=4, rope_theta=5e6,
        no_rope_layers=[1, 1, 1, 0] * 9, tie_word_embeddings=True)),
    "OLMo-2-7B": ("olmo2", sizes(100352, 4096, 11008, 32, 32, 32, rope_theta=500000)),
    "Olmo-3-7B": ("olmo3", sizes(
        100278, 4096, 11008, 32, 32, 32, sliding_window=4096, rope_scaling=OLMO3,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8)),
    "granite-3.3-8b": ("granite", sizes(
        49159, 4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, embedding_multiplier=12.0,
        logits_scaling=16.0, residual_multiplier=0.22, rope_theta=1e7)),
    "falcon-7b": ("falcon", {
        "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
        "num_hidden_layers": 32, "multi_query": True, "parallel_attn": True, "bias": False,
        "new_decoder_architecture": False, "alibi": False}),
    "starcoder2-7b": ("starcoder2", sizes(
        49152, 4608, 18432, 32, 36, 4, sliding_window=4096, use_bias=True, rope_theta=1e6)),
    "c4ai-command-r7b": ("cohere2", sizes(
        256000, 4096, 14336, 32, 32, 8, head_dim=128, sliding_window=4096, logit_scale=0.25,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8)),
    "phi-2": ("phi", sizes(51200, 2560, 10240, 32, 32, 32, partial_rotary_factor=0.4)),
    "MiMo-V2-Flash": ("mimo_v2_flash", {}),  # rotates 0.334 of a head
    "stablelm-2-1_6b": ("stablelm", sizes(
        100352, 2048, 5632, 24, 32, 32, partial_rotary_factor=0.25)),
}  # fmt: skip


SHORT = ("Llama-3.1-8B", "Qwen3.5-9B", "gemma-3-4b", "gpt-oss-20b", "DeepSeek-V3")


@pytest.mark.parametrize("name", tiny.longer(list(REAL), *SHORT))
def test_real_sizes_build_a_small_instance_and_are_tiled(name):
    kind, config = REAL[name]
    if kind not in CONFIG_MAPPING:
        pytest.skip("unknown to this transformers")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config))
    report = hfpatch.apply(model)
    whole = [line for line in report.notes if "run untiled" in line]
    assert not whole and report.count("checkpointing") == model.config.num_hidden_layers
