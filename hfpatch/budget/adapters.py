"""LoRA and QLoRA as sizes: the Linear layers of a decoder, the adapters over them, and the bytes of
a frozen base. Standard library only.
"""

from dataclasses import dataclass

# NF4: BLOCK weights share an 8-bit scale, NESTED scales share a float32 scale (double quantisation)
BLOCK, NESTED = 64, 256
# Bytes of one weight of a quantised Linear: codes and scales as bitsandbytes stores them. None: the
# model's dtype.
BASES = {"bf16": None, "8bit": 1.0, "4bit": 0.5 + 1 / BLOCK + 4 / (BLOCK * NESTED)}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters over a base whose own parameters are all frozen.

    Attributes:
        rank: LoRA's r.
        base: a key of BASES, the storage of the base's Linear weights. Embedding, head, norms,
            biases and experts (which are no Linear layers) stay in the model's dtype.
        targets: names of Linear layers; empty for all but the head.
        itemsize: bytes of an adapter's element; None for the model's (PEFT's default is float32).

    Raises:
        ValueError: a rank below 1, or an unknown base.
    """

    rank: int = 16
    base: str = "bf16"
    targets: tuple = ()
    itemsize: int | None = None

    def __post_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(
                f"hfpatch: LoRA's rank must be 1 or more, got {self.rank!r}. Pass 16, for example."
            )
        if self.base not in BASES:
            raise ValueError(
                f"hfpatch: base must be one of {', '.join(BASES)}, got {self.base!r}. Pass one of "
                "them."
            )
        object.__setattr__(self, "targets", tuple(self.targets))  # a list has no hash

    @classmethod
    def of(cls, rank: int, base: str = "bf16", targets=ALL_LINEAR) -> "Adapters":
        """From flags. targets: "all-linear", or names in a list or with commas. ValueError without
        a name.
        """
        names = targets.split(",") if isinstance(targets, str) else list(targets)
        named = tuple(n.strip() for n in names if n.strip())
        if not named:
            raise ValueError(
                f"hfpatch: targets must be names of Linear layers, got {targets!r}. Write "
                f"{ALL_LINEAR}."
            )
        return cls(rank, base, () if names == [ALL_LINEAR] else named)

    def chosen(self, linears: dict) -> dict:
        """The Linear layers among these, {name: (columns in, columns out)}, that get an adapter."""
        return {n: size for n, size in linears.items() if not self.targets or n in self.targets}

    def over(self, linears: dict) -> int:
        """The number of parameters of the adapters of these Linear layers."""
        return self.rank * sum(map(sum, self.chosen(linears).values()))

    def packed_bytes(self, linears: dict, itemsize: int) -> int:
        """Bytes of the base's weights in these Linear layers."""
        each = BASES[self.base] or itemsize
        # In 8 bits each row has a float32 scale.
        rows = 4 * sum(out for _, out in linears.values()) if self.base == "8bit" else 0
        return round(each * sum(i * o for i, o in linears.values())) + rows


def attention_linears(shape) -> dict:
    """{name: (columns in, columns out)} of the Linear layers in a ModelShape's attention."""
    D, heads, rope = shape.hidden_size, shape.num_heads, shape.rope_dim
    out = {"o_proj": (shape.out_size, D)}
    if shape.kv_rank:
        queries = {"q_a_proj": (D, shape.q_rank), "q_b_proj": (shape.q_rank, shape.q_size)}
        queries = queries if shape.q_rank else {"q_proj": (D, shape.q_size)}
        wide = shape.q_size - heads * rope + shape.v_size
        return (
            queries
            | {"kv_a_proj_with_mqa": (D, shape.kv_rank + rope), "kv_b_proj": (shape.kv_rank, wide)}
            | out
        )
    if shape.joined_qkv:
        return {"qkv_proj": (D, shape.q_size + shape.kv_size + shape.v_size)} | out
    return {
        "q_proj": (D, shape.q_size),
        "k_proj": (D, shape.kv_size),
        "v_proj": (D, shape.v_size),
    } | out


def mlp_linears(shape, layer: int) -> dict:
    """{name: (columns in, columns out)} of a layer's MLP. Of a mixture of experts only the shared
    ones count: routed experts are no Linear layers.
    """
    D, F = (
        shape.hidden_size,
        shape.shared_size if shape.is_sparse(layer) else shape.intermediate_size,
    )
    if not F:
        return {}
    if not shape.gated:
        return {"c_fc": (D, F), "c_proj": (F, D)}
    first = (
        {"gate_up_proj": (D, 2 * F)} if shape.joined else {"gate_proj": (D, F), "up_proj": (D, F)}
    )
    return first | {"down_proj": (F, D)}


def expert_tensors(shape, layer: int, every: bool) -> dict:
    """{name: (columns in, columns out)} that PEFT adapts of routed experts, whose tensors hold one
    matrix per expert: columns of all experts together. {} without any.

    every: for "all-linear", which adapts gate and up with twice the rank, adapts the router too,
    and skips experts with transposed storage (gpt-oss).
    """
    if not shape.is_sparse(layer) or every and shape.expert_bias:
        return {}
    E, D, F, wide = shape.experts, shape.hidden_size, shape.expert_size, 1 + every
    found = {"experts.gate_up_proj": (wide * E * D, wide * E * 2 * F),
             "experts.down_proj": (E * F, E * D)}  # fmt: skip
    return found | ({"gate": (D, E)} if every else {})


def layer_linears(shape, layer: int) -> dict:
    """{name: (columns in, columns out)} of a whole layer."""
    return attention_linears(shape) | mlp_linears(shape, layer)
