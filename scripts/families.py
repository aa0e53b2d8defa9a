"""The table of docs/models.md: what `apply` makes of each family's default config.

python scripts/families.py    # minutes
"""

import sys

from hfpatch.cli.check import Support, support_of

# Families of transformers that people fine-tune.
FAMILIES = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral",
    "gpt_oss", "gemma", "gemma2",
    "gemma3_text", "phi3", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "smollm3", "glm4",
    "glm4_moe", "cohere",
    "cohere2", "stablelm", "starcoder2", "seed_oss", "deepseek_v3", "llama4_text", "ernie4_5",
    "ernie4_5_moe", "gpt_neox",
    "gemma4_text", "qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "granitemoehybrid",
    "nemotron_h", "minimax", "qwen3_5_moe_text", "qwen4_exp_text", "glm5_next", "olmo_hybrid",
    "kimi_linear", "bailing_hybrid", "bamba", "mamba2", "zamba2", "lfm2_moe", "lfm3",
    "qwen2_5_vl", "qwen3_vl", "mistral3", "llava", "gemma3", "llama4",
)  # fmt: skip
# Additions to a family's default config, without which it lacks features of the family.
SHOWN = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}


def family_config(kind: str) -> dict:
    """The values of a family's default config."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **SHOWN.get(kind, {})).to_dict()


# The columns of the table, each with its usual cell.
COLUMNS = {
    "fused": "norms, RoPE, MLP, loss", "layers tiled": "all", "mixers over whole rows": "none",
    "packed rows": "isolated", "verdict": "agrees",
}  # fmt: skip


def table_row(support: Support) -> dict[str, str]:
    """A family's cells in the table, by column."""
    share = support.tiled / support.layers
    tiled = "all" if share == 1 else "no" if not share else f"{support.tiled} of {support.layers}"
    rows = f"{support.in_rows} of {support.layers}" if support.in_rows else "none"
    cells = (", ".join(support.fused), tiled, rows, support.packed, support.verdict)
    return dict(zip(COLUMNS, cells))


def families_text(found: list[Support]) -> str:
    """The names of families with the usual row, and a table of others: equal rows are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in found:
        row = table_row(one)
        fused = row.pop("fused")
        others = [f"{name}: {cell}" for name, cell in row.items() if cell != COLUMNS[name]]
        groups.setdefault((fused, "; ".join(others)), []).append(one.model)
    usual = groups.pop((COLUMNS["fused"], ""))
    lines = [["families", "fused", "what else differs"], ["---"] * 3]
    lines += [[", ".join(names), *cells] for cells, names in groups.items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        "All layers run in tiles, mixers through time, norms, RoPE, MLP and loss are fused, packed "
        f"rows are isolated, and the verdict agrees: {', '.join(usual)}.\n\nThe exceptions:\n\n{table}"
    )


def every_family() -> str:
    found = []
    for kind in FAMILIES:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        found.append(support_of(kind, family_config(kind)))
    return families_text(found)


if __name__ == "__main__":
    print(every_family())
