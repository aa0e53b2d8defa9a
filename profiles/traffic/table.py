"""Bytes that one layer moves beside its matmuls and attention, counted under a dispatch mode while
the real code runs on fake tensors: two layers less one, in units of one [tokens, hidden] tensor.

    python profiles/traffic/table.py before=/path/to/old/tree after=. > profiles/traffic/results.csv

A tree whose simulator has no account of traffic yet cannot stand in it.
"""

import csv
import os
import subprocess
import sys
from dataclasses import replace

TOKENS = 8192
ROWS = [  # implementation, tile, what is kept
    ("hf", 0, ""), ("hf-ckpt", 0, ""), ("hfpatch-off", 0, ""),
    ("hfpatch", 8192, ""), ("hfpatch", 8192, "qkv gate_up"), ("hfpatch", 2048, ""),
    ("hfpatch", 2048, "qkv mid gate_up"),
]  # fmt: skip
FIELDS = ("tree", "implementation", "tile", "kept", "forward", "backward")


def count(implementation: str, layers: int, policy) -> dict:
    from hfpatch.lab.presets import preset_config
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    config = preset_config("llama-3.1-8b") | {"num_hidden_layers": layers, "vocab_size": 512}
    return simulate(prepare(build(config), implementation), 1, TOKENS, policy=policy).ledger.traffic


def row(implementation: str, tile: str, kept: str) -> None:
    from hfpatch.budget.policy import LEAST

    policy = (
        replace(LEAST, offload="gpu", tile=int(tile), again=0 if kept else None)
        if int(tile)
        else None
    )
    one, two = (count(implementation, layers, policy) for layers in (1, 2))
    unit = TOKENS * 4096 * 2
    print(*(f"{(two[phase] - one[phase]) / unit:.1f}" for phase in ("forward", "backward")))


def main(trees: dict[str, str]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(FIELDS)
    for name, tree in trees.items():
        for implementation, tile, kept in ROWS:
            if not implementation.startswith("hfpatch") and tree != list(trees.values())[-1]:
                continue  # the others are the same beside any tree
            env = os.environ | {"PYTHONPATH": os.path.abspath(tree)}
            command = [sys.executable, "-W", "ignore", __file__, implementation, str(tile), kept]
            out = subprocess.run(command, env=env, capture_output=True, text=True)
            if out.returncode:
                raise SystemExit(out.stderr)
            table.writerow([name, implementation, tile or "", kept, *out.stdout.split()[-2:]])


if __name__ == "__main__":
    if "=" in sys.argv[1]:
        main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
    else:
        row(*sys.argv[1:])
