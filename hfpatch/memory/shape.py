"""The sizes of a decoder that memory and time depend on, and the resolved policy. Standard library only."""

from dataclasses import dataclass

from hfpatch.memory.limits import check_sizes

# Families whose layers are Llama's: norm, q/k/v/o, norm, gated MLP. The closed form describes these alone.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")

GiB = 1 << 30


def _read(config, name, default=None):
    value = config.get(name, None) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like decoder. Counts are of elements; nothing here is in bytes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if int(getattr(self, name)) < 1:
                raise ValueError(f"hfpatch: {name} must be at least 1, {getattr(self, name)} came; check the config.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hfpatch: the number of heads must be a multiple of the key-value heads, {self.num_heads} and "
                f"{self.num_kv_heads} came; check the config."
            )

    @classmethod
    def from_config(cls, config) -> "ModelShape":
        """From a transformers config, an object with its fields, or the dict of a config.json.

        Raises ValueError for a model type whose layers are not Llama's.
        """
        check_sizes(lambda name: _read(config, name))
        kind = _read(config, "model_type", "llama")
        if kind not in LLAMA_LIKE:
            raise ValueError(
                f"hfpatch: the plan knows the model types {', '.join(LLAMA_LIKE)}, {kind!r} came; "
                "run it with --simulate, which executes the model itself."
            )
        missing = [n for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                               "vocab_size") if _read(config, n) is None]  # fmt: skip
        if missing:
            raise ValueError(f"hfpatch: the config lacks {', '.join(missing)}; pass a model's whole config.json.")
        heads = _read(config, "num_attention_heads")
        return cls(
            hidden_size=_read(config, "hidden_size"),
            intermediate_size=_read(config, "intermediate_size"),
            num_layers=_read(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_read(config, "num_key_value_heads", heads),
            head_dim=_read(config, "head_dim", _read(config, "hidden_size") // heads),
            vocab_size=_read(config, "vocab_size"),
            tied=bool(_read(config, "tie_word_embeddings", False)),
            attention_bias=bool(_read(config, "attention_bias", kind == "qwen2")),
            mlp_bias=bool(_read(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )

    @property
    def q_size(self) -> int:
        """Columns of the query projection's output, and of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's q, k, v and o projections."""
        weights = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        # transformers: attention_bias puts a bias on o_proj too for llama; qwen2 has none there (6 KiB a layer).
        biases = (self.q_size + 2 * self.kv_size + self.hidden_size) if self.attention_bias else 0
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's gate, up and down projections."""
        biases = (2 * self.intermediate_size + self.hidden_size) if self.mlp_bias else 0
        return 3 * self.hidden_size * self.intermediate_size + biases

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, its two norms included."""
        return self.attention_parameters + self.mlp_parameters + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, which are the head's too where they are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size
        return self.num_layers * self.layer_parameters + ends


@dataclass(frozen=True)
class Policy:
    """What the tiled layer keeps, and where: `hfpatch.Checkpointing` with every "auto" resolved for one shape.

    offload: where layer inputs (and attention outputs) wait for backward: "gpu", "host" or "disk".
    every: a checkpoint at every k-th layer; the layers between are run again from it.
    save_attention: keep out and lse, so that the attention forward runs once.
    stream_attention: fetch out and dout per KV group in the attention backward rather than hold them whole.
    tile: tokens a tile.
    """

    offload: str = "host"
    every: int = 1
    save_attention: bool = True
    stream_attention: bool = False
    tile: int = 8192
