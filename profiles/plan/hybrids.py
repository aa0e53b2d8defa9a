"""The simulated rows of hybrids.csv: families' default configs, full fine-tuning of a few layers, what
"least" makes of them; and those of families.csv, with mixers over whole rows and through time.

    python -W ignore profiles/plan/hybrids.py > profiles/plan/hybrids.csv
    python -W ignore profiles/plan/hybrids.py families > profiles/plan/families.csv
    python -W ignore profiles/plan/hybrids.py qwen3_5_text 131072 least
    python -W ignore profiles/plan/hybrids.py qwen3_5_text 1048576 least 8

The last says what one of eight GPUs takes that share each row.
"""

import sys
from pathlib import Path
from unittest import mock

import torch

from hfpatch.budget.first import first_policy
from hfpatch.budget.policy import Checkpointing
from hfpatch.decoder import verdict
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.simulator import simulate

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for scripts

from scripts.families import family_config

LAYERS = {"qwen3_5_text": 4, "nemotron_h": 4, "granitemoehybrid": 4, "lfm2": 3}
LENGTHS = 8192, 32768, 131072
# layers that hold one of each kind
FAMILIES = LAYERS | {
    "qwen3_next": 4, "qwen3_5_moe_text": 4, "olmo_hybrid": 4, "falcon_h1": 2, "bamba": 2, "mamba2": 2,
    "zamba2": 8, "lfm2_moe": 3, "lfm3": 4, "kimi_linear": 4, "bailing_hybrid": 8,
}  # fmt: skip
HEADER = "family,layers,policy,tokens,beyond_gib,most_gib,host_gib,matmul_flops"


def stock(family: str):
    """A model of the family's first layers on the meta device, and its text's config values."""
    config, layers = family_config(family), FAMILIES[family]
    text = config.get("text_config", config)
    if of_layers := text.get("num_hidden_layers"):  # Nemotron-H's default has one of each kind
        lists = {k: v for k, v in text.items() if isinstance(v, list) and len(v) == of_layers}
        text |= {k: v[:layers] for k, v in lists.items()} | {"num_hidden_layers": layers}
    return build(config, torch.bfloat16), text


def row(family: str, tokens: int, word: str, ranks: int = 1) -> str:
    """word: "least", or "whole": mixers over whole rows."""
    model, config = stock(family)
    settings = Checkpointing(offload="host", aim="least")
    sizes = {"rows": tokens // ranks, "width": config["hidden_size"]}
    policy = first_policy(settings, **sizes, chains=True)
    if word == "whole":
        verdict._verdict.cache_clear()
        with mock.patch.object(verdict, "ask_in_time", lambda stack, layer, traits: traits):
            model = prepare(model, "hfpatch")
        verdict._verdict.cache_clear()
    else:
        model = prepare(model, "hfpatch")
    found = simulate(model, 1, tokens // ranks, policy=policy, ranks=ranks)
    gib = (found.beyond_bytes, found.most_beyond_bytes, found.host_peak_bytes)
    matmul = sum(found.flops["matmul"].values())
    figures = [*(f"{x / 2**30:.2f}" for x in gib), f"{matmul:.4g}"]
    return ",".join([family, str(FAMILIES[family]), word, str(tokens), *figures])


def main(asked: list[str]) -> None:
    if len(asked) >= 3:
        return print(row(asked[0], int(asked[1]), asked[2], *map(int, asked[3:])))
    print(HEADER)
    if asked:
        rows = [(family, 32768, word) for family in FAMILIES for word in ("whole", "least")]
    else:
        rows = [(f, n, "least") for f in LAYERS for n in LENGTHS]
    for one in rows:
        print(row(*one), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
