"""Host time of the tiled layer: one row a tree of this repository, the trees taking turns, the least of many steps of each.

    python profiles/host/measure.py before=/path/to/old/tree after=. > profiles/host/results.csv

A step of a Llama whose tensors are so small that only the host counts, and `apply` on a tiny model. Beside the microseconds of
one thread stand calls of functions, in Python and from it, which are the same on every machine.
"""

import csv
import os
import subprocess
import sys

LAYERS, TILES, ROUNDS = 4, 16, 3
STEP = f"""
import inspect, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
import hfpatch
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
def calls(run):
    count = [0]
    def counted(frame, event, _):
        count[0] += event in ("call", "c_call")
    sys.setprofile(counted)
    run()
    sys.setprofile(None)
    return count[0]
trust = {{"verdict": False}} if "verdict" in inspect.signature(hfpatch.apply).parameters else {{}}
ids = torch.zeros(1, 2 * {TILES}, dtype=torch.long)
def step(layers, tiles):
    ours = model(layers)
    kept = hfpatch.Checkpointing(tile=2 * {TILES} // tiles, offload="gpu", every=1, save_attention=True)
    hfpatch.apply(ours, checkpointing=kept, **trust)
    run = lambda: ours(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    run()
    return seconds(run, 12) * 1e6, calls(run)
rest, one, many = step(1, 1), step(1 + {LAYERS}, 1), step(1 + {LAYERS}, {TILES})
rest_of_many = step(1, {TILES})
tiny = model(2)
for i in (0, 1):
    print((one[i] - rest[i]) / {LAYERS}, (many[i] - rest_of_many[i]) / {LAYERS} / {TILES})
print(seconds(lambda: (hfpatch.undo(tiny), hfpatch.apply(tiny, **trust)), 9))
"""
FIELDS = ["tree", "us_a_layer_of_1_tile", f"us_a_tile_of_{TILES}", "calls_a_layer_of_1_tile", f"calls_a_tile_of_{TILES}",
          "s_apply_without_verdict"]  # fmt: skip


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
            found[name].append([float(x) for x in out.stdout.split()[-5:]])
    table = csv.writer(sys.stdout)
    table.writerow(FIELDS)
    for name, rows in found.items():
        *counts, apply = (min(column) for column in zip(*rows))
        table.writerow([name, *(f"{n:.0f}" for n in counts), f"{apply:.3f}"])


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
