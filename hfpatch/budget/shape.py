"""The sizes of a decoder that memory and time depend on. Standard library only."""

from collections import Counter
from dataclasses import dataclass, fields

from hfpatch.budget.adapters import Adapters, attention_linears, expert_tensors, layer_linears
from hfpatch.budget.families import FAMILIES, Layout, Values, attention_windows, dense_layers
from hfpatch.budget.limits import check_sizes
from hfpatch.budget.parameters import Parameters
from hfpatch.budget.policy import KEEPABLE


class UnknownFamily(ValueError):
    """A model that the closed forms cannot describe but the simulator can run: a model type without
    a row in families.py, or layers that run whole. what: the reason in a few words.
    """

    def __init__(self, what: str):
        self.what = what
        super().__init__(
            f"hfpatch: no closed form describes {what}: hfpatch.plan() "
            "runs its step on fake tensors."
        )


@dataclass(frozen=True)
class ModelShape(Layout, Parameters):
    """Sizes of a decoder of any family. Counts are of elements; nothing here is in bytes.

    Attributes:
        head_dim: columns of a query head.
        v_head_dim: columns of a value head, 0 for the same.
        q_rank, kv_rank: of latent attention (MLA), 0 without it.
        rope_dim: the shared rotary columns of latent attention.
        intermediate_size: of the dense MLP.
        expert_size, shared_size: of one expert, and of the shared experts together.
        dense_layers: layers with a dense MLP in place of experts.
        windows: tokens that each layer's attention sees, 0 for all; empty without any window.
        activation: as the config names it.
        adapters: the trained adapters of a frozen model; None if the model's own parameters train.
        ranks: ranks that share each row (budget/sequence.py). Lengths given with such a shape count
            one rank's tokens.

    Raises:
        ValueError: sizes that no model has.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    v_head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    expert_bias: bool = False
    dense_layers: tuple = ()
    windows: tuple = ()
    softcap: float = 0.0
    activation: str = "silu"
    adapters: Adapters | None = None
    ranks: int = 1

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(
                    f"hfpatch: {field.name} must be a whole number, got {value!r}. Check the "
                    "config."
                )
        names = {n for i in self.kinds for n in self.adaptable(i)}
        unknown = [n for n in (self.adapters.targets if self.adapters else ()) if n not in names]
        if unknown:
            raise ValueError(
                f"hfpatch: the layers to adapt must be among {', '.join(sorted(names))}, got "
                f"{unknown[0]!r}. Name some of those, or all-linear."
            )
        own = dict(
            num_hidden_layers="num_layers",
            num_attention_heads="num_heads",
            num_key_value_heads="num_kv_heads",
        )
        check_sizes(lambda name: getattr(self, own.get(name, name), None))

    def adaptable(self, layer: int) -> dict:
        """{name: (columns in, columns out)} of the weights in a layer that adapters can adapt."""
        every = self.adapters is not None and not self.adapters.targets
        # PEFT's "all-linear" finds gate_proj and the like, and adapts only the experts' ones.
        experts = every and self.experts and not self.expert_bias
        linears = attention_linears(self) if experts else layer_linears(self, layer)
        return linears | expert_tensors(self, layer, every)

    @classmethod
    def from_config(cls, config) -> "ModelShape":
        """From a transformers config, a similar object, or the dict of a config.json.

        Raises:
            UnknownFamily: a model type without a row in families.py.
            ValueError: values that do not fit their fields.
        """
        try:
            return cls._from_config(config)
        except (
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
            ZeroDivisionError,
        ) as error:
            if str(error).startswith("hfpatch:"):
                raise
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"hfpatch: config.json must hold a model's values, and does not ({reason}). Check "
                "the file."
            ) from error

    @classmethod
    def _from_config(cls, config) -> "ModelShape":
        kind = Values(config).number("model_type", "llama")
        family = FAMILIES.get(kind)
        if family is None:
            raise UnknownFamily(f"the model type {kind!r}")
        check_sizes(Values(config).get)
        values = Values(config, family)
        missing = [n for n in ("hidden_size", "intermediate_size", "num_hidden_layers",
                               "num_attention_heads",
                               "vocab_size") if values.get(n) is None]  # fmt: skip
        if missing:
            raise ValueError(
                f"hfpatch: the config lacks {', '.join(missing)}. Pass a model's whole config.json."
            )
        heads, layers = values.get("num_attention_heads"), values.get("num_hidden_layers")
        sizes = {
            "head_dim": values.number("head_dim", values.get("hidden_size") // max(1, heads)),
            "num_kv_heads": values.number("num_key_value_heads", heads),
        }
        if family.latent:
            rope = values.get("qk_rope_head_dim")
            sizes |= {
                "head_dim": values.get("qk_nope_head_dim") + rope,
                "v_head_dim": values.get("v_head_dim"),
                "num_kv_heads": heads, "q_rank": values.number("q_lora_rank", 0),
                "kv_rank": values.get("kv_lora_rank"),
                "rope_dim": rope,
            }  # fmt: skip
        experts = values.number(family.experts, 0) if family.experts else 0
        if experts:
            size = values.get(family.expert_size)
            sizes |= {
                "experts": experts, "experts_per_token": values.get("num_experts_per_tok"),
                "expert_size": size,
                "shared_size": size * values.number("n_shared_experts", 0),
                "expert_bias": family.expert_bias,
                "dense_layers": dense_layers(values, layers),
            }  # fmt: skip
        normed = not family.qk_norm_key or values.get(family.qk_norm_key)
        return cls(
            hidden_size=values.get("hidden_size"),
            intermediate_size=values.get("intermediate_size"),
            num_layers=layers, num_heads=heads, vocab_size=values.get("vocab_size"),
            tied=bool(values.number("tie_word_embeddings", False)),
            qkv_bias=values.flag(family.qkv_bias),
            o_bias=values.flag(family.o_bias), mlp_bias=values.flag(family.mlp_bias),
            qk_norm=family.qk_norm if normed else "", **{f.name: getattr(family, f.name)
                                                         for f in fields(Layout)},
            windows=attention_windows(family, values, layers),
            softcap=values.number("attn_logit_softcapping", 0.0),
            activation=values.number("hidden_activation", values.number("hidden_act", "silu")),
            **sizes,
        )  # fmt: skip

    # -- columns -----------------------------------------------------------------------------------
    @property
    def q_size(self) -> int:
        """Columns of the queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Columns of the values."""
        return self.num_kv_heads * (self.v_head_dim or self.head_dim)

    @property
    def out_size(self) -> int:
        """Columns of the attention output."""
        return self.num_heads * (self.v_head_dim or self.head_dim)

    def window(self, layer: int) -> int:
        """Tokens that a layer's attention sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    def window_counts(self, first: int = 0, last: int | None = None) -> dict[int, int]:
        """{window: number of layers} of layers first to last (not included); window 0 means all
        tokens."""
        return (
            Counter(self.windows[first:last])
            if self.windows
            else {0: len(range(self.num_layers)[first:last])}
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return bool(self.experts) and layer not in self.dense_layers

    @property
    def rotary_kinds(self) -> int:
        """The number of cos and sin tables that a step holds: Gemma 3 has one for layers with a
        window and one for the others.
        """
        return len(set(self.windows)) if self.local_rope and self.windows else 1

    @property
    def whole_because(self) -> str:
        """The reason why its layers run whole on a GPU, if no kernel known to run there has a
        backward for its attention; else "".
        """
        if self.softcap:
            return "no GPU kernel caps scores and has a backward of its own"
        width = max(self.head_dim, self.v_head_dim)
        return (
            f"no GPU kernel has a backward for heads of {width} columns"
            if width % 8 or width > 256
            else ""
        )

    @property
    def fused_mlp(self) -> bool:
        """Whether the MLP runs as one fused activation that keeps only gate and up."""
        return self.gated and (
            self.activation in ("silu", "swish") or self.activation.startswith("gelu")
        )

    @property
    def keepable(self) -> tuple[str, ...]:
        """The names in KEEPABLE that its layers have: the sum after attention in the common block
        (layer/block.py), gate and up of a dense gated MLP.
        """
        # An adapter's output is computed again, so keeping the sum that it adds to saves nothing.
        has = {"qkv": True, "mid": self.is_common and not self.adapted("o_proj")}
        gates = self.adapted("gate_proj", "up_proj", "gate_up_proj")
        has["gate_up"] = self.gated and not self.experts and not gates
        return tuple(name for name in KEEPABLE if has[name])

    def adapted(self, *names: str) -> bool:
        """Whether one of these Linear layers has an adapter."""
        return bool(
            self.adapters and (not self.adapters.targets or {*names} & {*self.adapters.targets})
        )

    @property
    def is_common(self) -> bool:
        """Whether a layer is the common block (layer/block.py)."""
        other = (
            self.parallel or self.norm_after or self.joined_qkv or self.kv_rank or self.norms != 2
        )
        return self.block and not other

    def last_unread(self, layer: int) -> bool:
        """Whether a layer's last sum, whose value is unread when the layer runs again, is skipped
        then.
        """
        return self.is_common and not self.is_sparse(layer) and not self.adapted("down_proj")
