"""Models by name, as the values of their config.json: what `--model NAME` means. Standard library only."""

# rope: (theta, llama3 scaling factor or None). Sources: the config.json that Meta published with each model;
# llama-tiny and llama-160m are our own small shapes for laptops and tests (160m: the sizes of JackFram/llama-160m).
#                  hidden  inter  layers heads kv  head_dim vocab   tied   max_pos  rope
_ROWS = {
    "llama-tiny":   (64,    176,   2,    4,   2,  16,      512,    False, 4096,    (10000.0, None)),
    "llama-160m":   (768,   3072,  12,   12,  12, 64,      32000,  False, 2048,    (10000.0, None)),
    "llama-3.2-1b": (2048,  8192,  16,   32,  8,  64,      128256, True,  131072,  (500000.0, 32.0)),
    "llama-3.2-3b": (3072,  8192,  28,   24,  8,  128,     128256, True,  131072,  (500000.0, 32.0)),
    "llama-3.1-8b": (4096,  14336, 32,   32,  8,  128,     128256, False, 131072,  (500000.0, 8.0)),
    "llama-3.1-70b": (8192, 28672, 80,   64,  8,  128,     128256, False, 131072,  (500000.0, 8.0)),
}  # fmt: skip

PRESETS = tuple(_ROWS)


def preset_config(name: str) -> dict:
    """The config.json of a preset as a dict, for `LlamaConfig(**preset_config(name))` or the planner.

    Raises ValueError for a name that is no preset.
    """
    if name not in _ROWS:
        raise ValueError(f"hfpatch: the presets are {', '.join(PRESETS)}, {name!r} came; or pass a config.json.")
    hidden, inter, layers, heads, kv, head_dim, vocab, tied, positions, (theta, factor) = _ROWS[name]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if factor:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config |= {"bos_token_id": 128000, "eos_token_id": 128001}
    else:
        config |= {"bos_token_id": 1, "eos_token_id": 2}
    return config
