"""The simulated rows of hybrids.csv: families' default configs, full fine-tuning of a few layers, what
"least" makes of them, before layers without attention ran as chains and since.

    python -W ignore profiles/plan/hybrids.py > profiles/plan/hybrids.csv
    python -W ignore profiles/plan/hybrids.py qwen3_5_text 131072 least
"""

import sys
from dataclasses import replace

import torch

from hfpatch.budget.ladder import unplanned
from hfpatch.budget.policy import Checkpointing
from hfpatch.cli.support import family_config
from hfpatch.decoder.find import find_decoder
from hfpatch.lab.simulate.rivals import build, prepare
from hfpatch.lab.simulate.simulator import simulate

LAYERS = {"qwen3_5_text": 4, "nemotron_h": 4, "granitemoehybrid": 4, "lfm2": 3}
LENGTHS = {8192: ("before", "least"), 32768: ("before", "least"), 131072: ("least",)}


def row(family: str, tokens: int, word: str) -> str:
    """word: "least", or "before", which is least without chains and without heads on the host."""
    config, layers = family_config(family), LAYERS[family]
    if of_layers := config.get("num_hidden_layers"):  # Nemotron-H's default has one of each kind
        lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == of_layers}
        config |= {k: v[:layers] for k, v in lists.items()} | {"num_hidden_layers": layers}
    model = build(config, torch.bfloat16)
    settings = Checkpointing(offload="host", aim="least")
    body = sum(p.numel() for layer in find_decoder(model).layers for p in layer.parameters())
    sums = 4 * body // len(find_decoder(model).layers)
    policy = unplanned(settings, tokens, False, config["hidden_size"], None, sums)
    if word == "before":
        policy = replace(policy, chain=0, by_group=False, stream_attention=False)
    found = simulate(prepare(model, "hfpatch"), 1, tokens, policy=policy)
    gib = (found.beyond_bytes, found.most_beyond_bytes, found.host_peak_bytes)
    matmul = sum(found.flops["matmul"].values())
    figures = [*(f"{x / 2**30:.2f}" for x in gib), f"{matmul:.4g}"]
    return ",".join([family, str(layers), word, str(tokens), *figures])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(row(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    else:
        print("family,layers,policy,tokens,beyond_gib,most_gib,host_gib,matmul_flops")
        for family in LAYERS:
            for tokens, words in LENGTHS.items():
                for word in words:
                    print(row(family, tokens, word), flush=True)
