"""Properties that a family's code in transformers fixes and its config.json does not contain: one
row per model type. Standard library only; tests compare each row with the model itself, built
without memory.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The structure of a family's layers.

    Attributes:
        norms: norms of a layer.
        norm_bias: LayerNorm with a bias.
        norm_after: a norm reads down_proj's output.
        gated: the MLP has gate, up and down, not two matrices.
        joined: gate and up (with joined_qkv also q, k and v) are one Linear.
        parallel: attention and MLP read the same norm.
    """

    norms: int = 2
    norm_bias: bool = False
    norm_after: bool = False
    gated: bool = True
    joined: bool = False
    joined_qkv: bool = False
    parallel: bool = False
    sinks: bool = False
    # norm, attention, norm, MLP, each added unscaled; joined, parallel or other norms exclude it
    block: bool = True
    local_rope: bool = False  # layers with a window have another rotation
    # norms and rotations are unfused float32 operations, which keep their intermediates
    wide_norms: bool = False
    # q and k are normed in a heads-first layout, so kernels need copies of them
    heads_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Family(Layout):
    """A row of FAMILIES.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True, False, or the config key that holds it.
        qk_norm: "head" (one weight of head_dim for all heads), "full" (one a column), "" for none.
        qk_norm_key: the config key that switches it.
        experts: the config key of the number of experts.
        expert_size: the config key of their width.
        defaults: the config class's defaults, other than 0, False and None.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: str = ""
    qk_norm_key: str = ""
    latent: bool = False
    experts: str = ""
    expert_size: str = "moe_intermediate_size"
    expert_bias: bool = False
    windows: str = ""  # "": none; "all": sliding_window in every layer; "types": by layer_types
    defaults: dict = field(default_factory=dict)


_BIASED = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GEMMA = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES = {
    "llama": Family(**_BIASED, mlp_bias="mlp_bias"),
    "mistral": Family(windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(windows="types",
                        defaults={"num_key_value_heads": 8, "sliding_window": 4096,
                                  "max_window_layers": 0}),
    "qwen2": Family(qkv_bias=True, windows="types", defaults=_QWEN),
    "qwen3": Family(**_BIASED, qk_norm="head", windows="types",
                    defaults=_QWEN | {"head_dim": 128}),
    "qwen3_moe": Family(**_BIASED, qk_norm="head", windows="all", experts="num_experts",
                        defaults=_QWEN | {"num_key_value_heads": 4, "num_experts": 128,
                                          "num_experts_per_tok": 8,
                                          "moe_intermediate_size": 768, "decoder_sparse_step": 1}),
    "mixtral": Family(windows="all", experts="num_local_experts", expert_size="intermediate_size",
                      defaults={"num_key_value_heads": 8, "num_local_experts": 8,
                                "num_experts_per_tok": 2}),
    "gpt_oss": Family(**_BIASED, windows="types", experts="num_local_experts",
                      expert_size="intermediate_size",
                      expert_bias=True, sinks=True,
                      defaults={"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8,
                                "sliding_window": 128, "window_pattern": 2,
                                "num_local_experts": 128,
                                "num_experts_per_tok": 4}),
    "gemma": Family(**_BIASED, defaults=_GEMMA),
    "gemma2": Family(**_BIASED, norms=4, norm_after=True, windows="types",
                     defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "num_key_value_heads": 4,
                                        "sliding_window": 4096,
                                        "window_pattern": 2}),
    "gemma3_text": Family(**_BIASED, qk_norm="head", norms=4, norm_after=True, windows="types",
                          local_rope=True,
                          heads_first=True,
                          defaults=_GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096,
                                             "window_pattern": 6,
                                             "vocab_size": 262208, "num_attention_heads": 8}),
    "phi3": Family(joined=True, joined_qkv=True, windows="all"),
    "olmo2": Family(**_BIASED, qk_norm="full", norm_after=True),
    "olmo3": Family(**_BIASED, qk_norm="full", norm_after=True, windows="types",
                    defaults={"sliding_window": 4096, "window_pattern": 4}),
    "granite": Family(**_BIASED, mlp_bias="mlp_bias", block=False),
    "smollm3": Family(**_BIASED, mlp_bias="mlp_bias", windows="types", block=False,
                      defaults={"num_key_value_heads": 4, "tie_word_embeddings": True,
                                "use_sliding_window": False}),
    "seed_oss": Family(qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias",
                       defaults={"attention_bias": True, "num_key_value_heads": 8,
                                 "head_dim": 128}),
    "glm4": Family(qkv_bias="attention_bias", norms=4, norm_after=True, joined=True,
                   defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128}),
    "starcoder2": Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias",
                         norm_bias=True, gated=False,
                         windows="all",
                         defaults={"use_bias": True, "num_key_value_heads": 2,
                                   "tie_word_embeddings": True,
                                   "hidden_act": "gelu_pytorch_tanh"}),
    "cohere": Family(**_BIASED, qk_norm="full", qk_norm_key="use_qk_norm", norms=1, parallel=True,
                     wide_norms=True,
                     defaults={"tie_word_embeddings": True}),
    "deepseek_v3": Family(**_BIASED, latent=True, experts="n_routed_experts",
                          defaults={"num_key_value_heads": 128, "n_routed_experts": 256,
                                    "num_experts_per_tok": 8,
                                    "n_shared_experts": 1, "first_k_dense_replace": 3,
                                    "moe_intermediate_size": 2048,
                                    "q_lora_rank": 1536, "kv_lora_rank": 512,
                                    "qk_nope_head_dim": 128,
                                    "qk_rope_head_dim": 64, "v_head_dim": 128}),
}  # fmt: skip


class Values:
    """The fields of a transformers config, of a similar object or of a config.json's dict, with a
    family's defaults.
    """

    def __init__(self, config, family: Family | None = None):
        self.config, self.defaults = config, family.defaults if family else {}

    def get(self, name: str, default=None):
        """The value; the family's default if the config lacks the name, else `default`. A null in
        the config is a value.
        """
        if isinstance(self.config, dict):
            said, value = name in self.config, self.config.get(name)
        else:
            said, value = hasattr(self.config, name), getattr(self.config, name, None)
        return value if said else self.defaults.get(name, default)

    def number(self, name: str, default=None):
        """The value, or `default` if it is null or missing."""
        value = self.get(name)
        return default if value is None else value

    def flag(self, rule: bool | str) -> bool:
        """The value of a row's rule: the rule itself, or the config key that it names."""
        return bool(self.get(rule)) if isinstance(rule, str) else rule


def attention_windows(family: Family, values: Values, layers: int) -> tuple[int, ...]:
    """The number of tokens that each layer's attention sees, 0 for all; empty if no layer has a
    window.
    """
    window = values.get("sliding_window")
    if not family.windows or not window or values.get("use_sliding_window") is False:
        return ()
    if family.windows == "all":
        return (int(window),) * layers
    types = values.get("layer_types")
    if types is None:
        types = _types(values, layers)
    slides = tuple(int(window) if "sliding" in str(kind) else 0 for kind in types[:layers])
    return slides if any(slides) else ()


def _types(values: Values, layers: int) -> list[str]:
    """layer_types as the config class fills it in: windows from some layer on, or in all but each
    n-th layer.
    """
    pattern = values.number("sliding_window_pattern", values.get("window_pattern"))
    if pattern:
        slides = [(i + 1) % pattern != 0 for i in range(layers)]
    elif values.get("no_rope_layers"):
        slides = [not rope for rope in values.get("no_rope_layers")]
    else:
        slides = [i >= values.get("max_window_layers", layers) for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def dense_layers(values: Values, layers: int) -> tuple[int, ...]:
    """The layers of a mixture of experts that have one dense MLP."""
    named = set(values.number("mlp_only_layers", ()))
    step = values.number("decoder_sparse_step", 1)
    first = values.number("first_k_dense_replace", 0)
    kinds = values.get("mlp_layer_types")
    if kinds:
        return tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "dense")
    return tuple(i for i in range(layers) if i < first or i in named or (i + 1) % step)
