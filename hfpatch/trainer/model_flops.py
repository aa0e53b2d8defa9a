"""A model's own FLOPs, for the mfu of log lines, counted on the model itself."""

from collections import Counter
from dataclasses import dataclass

from hfpatch.budget.cuts import attended


def windows_of(config) -> dict[int, int]:
    """How many layers of a text config see how many tokens (0: all)."""
    config = config.get_text_config()
    wide = getattr(config, "sliding_window", None) or 0
    default = "sliding_attention" if wide else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    sees = {"full_attention": 0, "sliding_attention": wide}
    return dict(Counter(sees[kind] for kind in kinds if kind in sees))


@dataclass(frozen=True)
class Work:
    """weights: that one token meets in products, of experts those of its own. columns: of all
    query heads of a layer. windows: as of windows_of.
    """

    weights: float
    columns: int
    windows: dict

    @classmethod
    def of(cls, model) -> "Work | None":
        """None for a model whose config has no attention heads."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if not heads:
            return None
        experts = next((n for name in ("num_experts", "num_local_experts", "n_routed_experts")
                        if (n := getattr(config, name, None))), 1)  # fmt: skip
        share = (getattr(config, "num_experts_per_tok", None) or 1) / experts
        table = model.get_input_embeddings()
        head = model.get_output_embeddings()
        products = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
        count = lambda p: getattr(p, "ds_numel", p.numel())  # noqa: E731
        weights = sum(count(p) * (share if ".experts." in n else 1) for n, p in products)
        weights -= count(table.weight) * (head is None or head.weight is not table.weight)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(weights, heads * width, windows_of(config))

    def flops(self, batch: int, tokens: int, ranks=1, attention_share=1.0, trained=1.0) -> float:
        """FLOPs of forward and backward of a batch, without recomputation.

        attention_share: the share of a full row's causal attention that packed documents need.
        trained: the share of weights with a gradient; a frozen weight takes 4 FLOPs a token.
        """
        pairs = sum(k * attended(tokens * ranks, w) for w, k in self.windows.items()) / ranks
        attention = 3 * 4 * batch * self.columns * pairs
        return (4 + 2 * trained) * batch * tokens * self.weights + attention * attention_share
