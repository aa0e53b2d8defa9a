"""Models by name, as the values of their config.json, for `--model NAME`. Standard library only."""

from copy import deepcopy

_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu",
          "attention_bias": False,
          "mlp_bias": False}  # fmt: skip


def _llama3(factor: float) -> dict:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    return _LLAMA | {"rope_scaling": rope, "bos_token_id": 128000, "eos_token_id": 128001}


_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_OSS = {"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
# Keys are ids on the hub, without the owner for Llamas. Source: the config.json published there.
# llama-tiny and llama-160m are our own small shapes for laptops and tests; 160m has the sizes of
# JackFram/llama-160m. "(text)": only the language tower.
#   id                            type         hidden inter  layers heads kv head_dim vocab  tied   max_pos theta      more
_ROWS = {
    "llama-tiny":                 ("llama",     64,   176,   2,  4,  2, 16,  512,    False, 4096,
                                   1e4, _LLAMA),
    "llama-160m":                 ("llama",     768,  3072,  12, 12, 12, 64, 32000,  False, 2048,
                                   1e4, _LLAMA),
    "llama-3.2-1b":               ("llama",     2048, 8192,  16, 32, 8, 64,  128256, True,  131072,
                                   5e5, _llama3(32.0)),
    "llama-3.2-3b":               ("llama",     3072, 8192,  28, 24, 8, 128, 128256, True,  131072,
                                   5e5, _llama3(32.0)),
    "llama-3.1-8b":               ("llama",     4096, 14336, 32, 32, 8, 128, 128256, False, 131072,
                                   5e5, _llama3(8.0)),
    "llama-3.1-70b":              ("llama",     8192, 28672, 80, 64, 8, 128, 128256, False, 131072,
                                   5e5, _llama3(8.0)),
    "Qwen/Qwen3-0.6B":            ("qwen3",     1024, 3072,  28, 16, 8, 128, 151936, True,  40960,
                                   1e6, {}),
    "Qwen/Qwen3-1.7B":            ("qwen3",     2048, 6144,  28, 16, 8, 128, 151936, True,  40960,
                                   1e6, {}),
    "Qwen/Qwen3-4B":              ("qwen3",     2560, 9728,  36, 32, 8, 128, 151936, True,  40960,
                                   1e6, {}),
    "Qwen/Qwen3-8B":              ("qwen3",     4096, 12288, 36, 32, 8, 128, 151936, False, 40960,
                                   1e6, {}),
    "Qwen/Qwen3-14B":             ("qwen3",     5120, 17408, 40, 40, 8, 128, 151936, False, 40960,
                                   1e6, {}),
    "Qwen/Qwen3-32B":             ("qwen3",     5120, 25600, 64, 64, 8, 128, 151936, False, 40960,
                                   1e6, {}),
    "Qwen/Qwen3-30B-A3B":         ("qwen3_moe", 2048, 6144,  48, 32, 4, 128, 151936, False, 40960,
                                   1e6, _MOE),
    "Qwen/Qwen2.5-7B":            ("qwen2",     3584, 18944, 28, 28, 4, 128, 152064, False, 131072,
                                   1e6, {}),
    "Qwen/Qwen2.5-14B":           ("qwen2",     5120, 13824, 48, 40, 8, 128, 152064, False, 131072,
                                   1e6, {}),
    "Qwen/Qwen2.5-32B":           ("qwen2",     5120, 27648, 64, 40, 8, 128, 152064, False, 131072,
                                   1e6, {}),
    "Qwen/Qwen2.5-72B":           ("qwen2",     8192, 29568, 80, 64, 8, 128, 152064, False, 131072,
                                   1e6, {}),
    "mistralai/Mistral-7B-v0.3":  ("mistral",   4096, 14336, 32, 32, 8, 128, 32768,  False, 32768,
                                   1e6,
                                   {"sliding_window": None}),
    "mistralai/Mistral-Nemo-2407": ("mistral",  5120, 14336, 40, 32, 8, 128, 131072, False, 131072,
                                    1e6,
                                    {"sliding_window": None}),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral",  4096, 14336, 32, 32, 8, 128, 32000,  False, 32768,
                                    1e6,
                                    {"num_local_experts": 8, "num_experts_per_tok": 2,
                                     "sliding_window": None}),
    "google/gemma-2-9b":          ("gemma2",    3584, 14336, 42, 16, 8, 256, 256000, True,  8192,
                                   1e4,
                                   _GELU | {"sliding_window": 4096}),
    "google/gemma-3-4b":          ("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, True, 131072,
                                   1e6,
                                   _GELU | {"sliding_window": 1024, "text": True}),
    "google/gemma-3-12b":         ("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, True, 131072,
                                   1e6,
                                   _GELU | {"sliding_window": 1024, "text": True}),
    "google/gemma-3-27b":         ("gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, True,
                                   131072, 1e6,
                                   _GELU | {"sliding_window": 1024, "query_pre_attn_scalar": 168,
                                            "text": True}),
    "openai/gpt-oss-20b":         ("gpt_oss",   2880, 2880,  24, 64, 8, 64,  201088, False, 131072,
                                   1.5e5,
                                   _OSS | {"num_local_experts": 32}),
    "openai/gpt-oss-120b":        ("gpt_oss",   2880, 2880,  36, 64, 8, 64,  201088, False, 131072,
                                   1.5e5,
                                   _OSS | {"num_local_experts": 128}),
    "microsoft/phi-4":            ("phi3",      5120, 17920, 40, 40, 10, 128, 100352, False, 16384,
                                   2.5e5, {}),
    "allenai/OLMo-2-1124-7B":     ("olmo2",     4096, 11008, 32, 32, 32, 128, 100352, False, 4096,
                                   5e5, {}),
    "HuggingFaceTB/SmolLM3-3B":   ("smollm3",   2048, 11008, 36, 16, 4, 128, 128256, True,  65536,
                                   5e6, {}),
    "zai-org/GLM-4-9B-0414":      ("glm4",      4096, 13696, 40, 32, 2, 128, 151552, False, 32768,
                                   1e4, {}),
    "bigcode/starcoder2-7b":      ("starcoder2", 4608, 18432, 32, 36, 4, 128, 49152, True,  16384,
                                   1e6,
                                   {"sliding_window": 4096}),
    "CohereLabs/c4ai-command-r-v01": ("cohere", 8192, 22528, 40, 64, 64, 128, 256000, True, 131072,
                                      8e6, {}),
    "deepseek-ai/DeepSeek-V3":    ("deepseek_v3", 7168, 18432, 61, 128, 128, 64, 129280, False,
                                   163840, 1e4, {}),
}  # fmt: skip

PRESETS = tuple(name for name in _ROWS if "/" not in name)
MODELS = tuple(name for name in _ROWS if "/" in name)
# Endings of a name that change the weights but no size.
_SAME_SIZES = (
    "-2507",
    "-0324",
    "-bnb-4bit",
    "-unsloth",
    "-instruct",
    "-thinking",
    "-it",
    "-pt",
    "-base",
)


def _plain(name: str) -> str:
    """A name without its owner and without words that change no size:
    meta-llama/Llama-3.1-8B-Instruct, llama-3.1-8b.
    """
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for word in _SAME_SIZES:
        short = short.removesuffix(word).replace(f"{word}-", "-")
    return short


_PLAIN = {_plain(name): name for name in _ROWS}
_PLAIN |= {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
}
_PLAIN |= {"deepseek-r1": "deepseek-ai/DeepSeek-V3", "deepseek-v3.1": "deepseek-ai/DeepSeek-V3"}
# Allowed owners of a name on the hub: another owner's model of the same name may have other sizes.
_OWNERS = (
    "meta-llama",
    "unsloth",
    "CohereForAI",
    "THUDM",
    *(name.split("/")[0] for name in MODELS),
)


def find_preset(name: str) -> str | None:
    """The preset of a name: the name itself, a hub id of the same sizes, or one without its owner.
    None for no preset.
    """
    owner = name.split("/")[0].lower() if "/" in name else None
    if name.count("/") > 1 or (owner and owner not in [o.lower() for o in _OWNERS]):
        return None
    return _PLAIN.get(_plain(name))


def preset_config(name: str) -> dict:
    """The config.json of a preset as a dict, for `AutoConfig.for_model(**preset_config(name))` or
    the planner.

    Raises:
        ValueError: the name is no preset.
    """
    known = find_preset(name)
    if known is None:
        known_names = ", ".join((*PRESETS, *MODELS))
        raise ValueError(
            f"hfpatch: a preset must be one of {known_names}, got {name!r}. Pass one of them, or a "
            "config.json."
        )
    kind, hidden, inter, layers, heads, kv, head_dim, vocab, tied, positions, theta, more = _ROWS[
        known
    ]
    more = deepcopy(more)  # config classes write into their nested dicts
    text = " (text)" if more.pop("text", False) else ""
    own = {} if kind == "llama" else {"_name_or_path": known + text, "pad_token_id": None}
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": positions, "rope_theta": theta,
        "bos_token_id": 1, "eos_token_id": 2, **own, **more,
    }  # fmt: skip
