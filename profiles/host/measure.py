"""Host time of the tiled layer: one row a tree of this repository, the trees taking turns, the least of many steps of each.

    python profiles/host/measure.py before=/path/to/old/tree after=. > profiles/host/results.csv

A step of a Llama whose tensors are so small that only the host counts: 8 layers, 32 tiles a layer; and `apply` on a tiny model.
"""

import csv
import os
import subprocess
import sys

LAYERS, TILES, ROUNDS = 8, 32, 7
STEP = f"""
import time, torch
from transformers import LlamaConfig, LlamaForCausalLM
import hfpatch, inspect
torch.set_num_threads(1)
def model(layers):
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512)).train()
def seconds(run, times):
    least = float("inf")
    for _ in range(times):
        began = time.thread_time()
        run()
        least = min(least, time.thread_time() - began)
    return least
trust = {{"verdict": False}} if "verdict" in inspect.signature(hfpatch.apply).parameters else {{}}
ids = torch.zeros(1, 2 * {TILES}, dtype=torch.long)
def step(tiles):
    ours = model({LAYERS})
    kept = hfpatch.Checkpointing(tile=2 * {TILES} // tiles, offload="gpu", every=1, save_attention=True)
    hfpatch.apply(ours, checkpointing=kept, **trust)
    run = lambda: ours(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    run()
    return seconds(run, 15) / {LAYERS} * 1e6
one, many = step(2), step({TILES})
tiny = model(2)
print(one, (many - one) / ({TILES} - 2), seconds(lambda: hfpatch.apply(tiny, **trust), 9))
"""


def main(trees: dict[str, str]) -> None:
    found = {name: [] for name in trees}
    for _ in range(ROUNDS):
        for name, tree in trees.items():
            env = os.environ | {"PYTHONPATH": os.path.abspath(tree), "OMP_NUM_THREADS": "1"}
            out = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", STEP], env=env, cwd=tree, capture_output=True, text=True
            )
            if out.returncode:
                raise SystemExit(out.stderr)
            found[name].append([float(x) for x in out.stdout.split()[-3:]])
    table = csv.writer(sys.stdout)
    table.writerow(["tree", "us_a_layer_of_2_tiles", "us_a_further_tile", "s_apply_without_verdict"])
    for name, rows in found.items():
        layer, tile, apply = (min(column) for column in zip(*rows))
        table.writerow([name, f"{layer:.0f}", f"{tile:.0f}", f"{apply:.3f}"])


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
