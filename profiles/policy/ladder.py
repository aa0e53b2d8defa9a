"""Seconds of a step under the policy of the ladder (budget/measured.py), beside those of the search
over every field of a policy (budget/choice.py) that the run time made until 2026-11-28, by the step
model of `hfpatch plan`. Bytes by the closed forms stand in for what a run measures.

    python profiles/policy/ladder.py          the ladder beside the recorded search
    python profiles/policy/ladder.py --record searches again, into search.csv
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from hfpatch.lab.adapters import Adapters
from hfpatch.budget.choice import decide
from hfpatch.budget.first import first_policy
from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import ModelShape, step_memory
from hfpatch.budget.hardware import CONTEXT_BYTES, GPUS
from hfpatch.budget.measured import SURE, Call, Kind, Layers, climb
from hfpatch.budget.policy import Checkpointing, describe
from hfpatch.budget.seconds import step_time
from hfpatch.budget.sizes import Sizes, plain_bytes
from hfpatch.lab.presets import preset_config

TABLE, HOST = Path(__file__).with_name("search.csv"), 256 << 30
FIELDS = ("model", "card", "tokens", "weights", "seconds", "policy")
CELLS = [
    *(("llama-3.1-8b", card, 8192 << n, weights) for card in ("h100", "a100-80gb")
      for n in range(5) for weights in ("full", "lora")),
    *(("llama-3.1-8b", "rtx4090", 8192 << n, "lora") for n in range(4)),
    *(("qwen3-8b", "a100-80gb", 8192 << n, "full") for n in range(4)),
]  # fmt: skip


def setting(model: str, card: str, weights: str):
    """(shape, card, free bytes beside weights, gradients and 8-bit states)."""
    shape, gpu = ModelShape.from_config(preset_config(model)), GPUS[card]
    if weights == "lora":
        shape = replace(shape, adapters=Adapters(16))
    memory = step_memory(shape, first_policy(Checkpointing(), rows=8192, width=shape.hidden_size),
                         batch=1, tokens=8192)  # fmt: skip
    # two states of a byte for each two bytes of a gradient
    return shape, gpu, gpu.memory_bytes - CONTEXT_BYTES - memory.parameters - 2 * memory.gradients


def seconds(shape, gpu, policy, tokens: int) -> float:
    sizes = {"batch": 1, "tokens": tokens}
    taken = step_flops(shape, policy, **sizes), step_memory(shape, policy, **sizes)
    return step_time(gpu, *taken, policy, shape, **sizes)[0].total


def laddered(shape, gpu, free: int, tokens: int):
    """The policy on which a run settles."""
    settings, sizes = Checkpointing(), {"batch": 1, "tokens": tokens}
    n, width = shape.num_layers, shape.hidden_size
    most = lambda policy: max(m.beyond for m in step_memory(shape, policy, **sizes).moments)  # noqa: E731
    first = first_policy(
        settings, rows=tokens, width=width, layers=n, card=gpu.memory_bytes, free=free, host=HOST
    )
    least, more = (replace(first, tile=tile) for tile in (2048, 4096))
    tile = (most(more) - most(least)) / 2048
    kept = plain_bytes(Sizes(shape, 1, tokens, 2), n - 1)
    call, kind = Call(kinds=["layer"] * n), Kind(kept / tokens, {"all": [tile, 0.0]})
    call.tiled.put(tokens, most(first) - tile * min(first.tile, tokens))
    for line in (call.stands, call.after):
        line.put(tokens, 0)
    call.loss.put(tokens, max(0, most(replace(first, plain=n)) - n * kept))
    flops = step_flops(shape, first, **sizes)
    forward = (flops.model - flops.model_attention) / 3 / gpu.matmul_flops
    call.seconds.put(tokens, forward + flops.attention_forward / gpu.attention_forward)
    able = Layers(4 * shape.intermediate_size, 4 * width, HOST, gpu.link_rate)
    room = free - SURE * gpu.memory_bytes
    return climb(first, call, {"layer": kind}, settings, able, tokens, room).policy


def rows():
    """(cell, seconds of the search, seconds of the ladder, its policy) of each recorded cell."""
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            shape, gpu, free = setting(row["model"], row["card"], row["weights"])
            tokens = int(row["tokens"])
            policy = laddered(shape, gpu, free, tokens)
            yield row, float(row["seconds"]), seconds(shape, gpu, policy, tokens), policy


def record() -> None:
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        for model, card, tokens, weights in CELLS:
            shape, gpu, free = setting(model, card, weights)
            found = decide(Checkpointing(), shape, batch=1, tokens=tokens, gpu=gpu, gpu_free=free,
                           host_free=HOST)  # fmt: skip
            taken = seconds(shape, gpu, found.policy, tokens)
            words = describe(found.policy, shape.num_layers)
            table.writerow(dict(zip(FIELDS, (model, card, tokens, weights, f"{taken:.4f}", words))))


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    ratios = []
    for row, before, after, policy in rows():
        ratios.append(after / before)
        cell = " ".join(row[name] for name in FIELDS[:4])
        print(f"{cell:40} {before:8.2f} {after / before:6.3f}  {describe(policy)}")
    print(f"median {median(ratios):.3f}, at most {max(ratios):.3f}")
