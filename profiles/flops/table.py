"""Matmul FLOPs of a step over the least there are, counted under a dispatch mode while the real
code runs on fake tensors.

python profiles/flops/table.py            what the policies allow, every row in about a minute of a CPU; writes results.csv
python profiles/flops/table.py llama-3.1-8b 8192 auto            counts one row too, and writes that into results.csv
"""

import csv
import sys
from pathlib import Path

from hfpatch.budget.choice import decide
from hfpatch.budget.formula import ModelShape
from hfpatch.budget.hardware import GPUS, GiB
from hfpatch.budget.policy import describe, parse_checkpointing
from hfpatch.lab.presets import preset_config
from hfpatch.lab.stock import UNTILED, flops_of

MODELS = ("llama-3.1-8b", "Qwen/Qwen3-8B", "google/gemma-3-12b", "Qwen/Qwen3-30B-A3B")
LENGTHS = (8192, 16384, 32768, 131072)
TABLE = Path(__file__).with_name("results.csv")
DEVICE = 79 * GiB
FIELDS = (
    "model",
    "tokens",
    "aim",
    "matmul",
    "allowed",
    "attention_forwards",
    "device_gib",
    "host_gib",
    "policy",
)


def settled(name: str, tokens: int, aim: str):
    """(config, shape, the option chosen): bf16 parameters and gradients on a device of 79 GiB (all
    of it free where those alone are more), no optimizer.
    """
    config = preset_config(name)
    shape = ModelShape.from_config(config)
    resident = 4 * shape.parameters
    free = DEVICE - resident if resident < DEVICE else DEVICE
    sizes = {
        "batch": 1,
        "tokens": tokens,
        "gpu_free": free,
        "host_free": 480 * GiB,
        "gpu": GPUS["h100"],
    }
    return config, shape, decide(parse_checkpointing(aim), shape, **sizes)


def planned(name: str, tokens: int, aim: str) -> dict:
    """allowed: matmul FLOPs over 6 a weight and token as the closed form has them of the policy
    that a run would choose, which knows whose values nobody reads; matmul and attention_forwards
    are still to be counted.
    """
    _, shape, option = settled(name, tokens, aim)
    sizes = {"batch": 1, "tokens": tokens}
    least, allowed = (flops_of(shape, policy, **sizes) for policy in (UNTILED, option.policy))
    return {
        "model": name, "tokens": tokens, "aim": aim, "matmul": "",
        "allowed": f"{allowed.matmul / least.matmul:.3f}",
        "attention_forwards": f"{allowed.attention_forward / least.attention_forward:.2f}",
        "device_gib": f"{option.device / GiB:.1f}", "host_gib": f"{option.host / GiB:.1f}",
        "policy": describe(option.policy, shape.num_layers),
    }  # fmt: skip


def counted(name: str, tokens: int, aim: str) -> dict:
    """The row with its matmuls, attention forwards and memory counted, on fewer tiled layers than
    the model has where more of them only repeat: a step of all of them takes, that many times over,
    what one period of their pattern adds.
    """
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate
    from hfpatch.planner.simulated import depths

    config, shape, option = settled(name, tokens, aim)
    model = build(config)
    fewer, more, times, _ = depths(
        model.model.layers, top=option.policy.plain + option.policy.again
    )

    def step(layers: int):
        cut = build(config)
        del cut.model.layers[layers:]
        found = simulate(prepare(cut, "hfpatch"), 1, tokens, policy=option.policy)
        matmul, attention = sum(found.flops["matmul"].values()), found.flops["attention"]["forward"]
        return matmul, attention, found.most_beyond_bytes, found.host_peak_bytes

    most = step(more)
    matmul, attention, device, host = (
        a + times * (a - b) for a, b in zip(most, step(fewer) if times else most)
    )
    # A tied weight's gradient, until it is whole, counts as an activation there.
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    device = {} if tied else {"device_gib": f"{device / GiB:.1f}"}
    least = flops_of(shape, UNTILED, batch=1, tokens=tokens)
    return planned(name, tokens, aim) | {
        "matmul": f"{matmul / least.matmul:.3f}",
        "attention_forwards": f"{attention / least.attention_forward:.2f}",
        "host_gib": f"{host / GiB:.1f}",
    } | device  # fmt: skip


def main(arguments: list[str]) -> None:
    key = lambda row: (row["model"], str(row["tokens"]), row["aim"])  # noqa: E731
    with TABLE.open() as file:
        before = {key(row): row for row in csv.DictReader(file)}
    if arguments:
        name, tokens, aim = arguments
        made = counted(name, int(tokens), aim)
        rows = before | {key(made): made}
    else:
        made = [
            planned(name, tokens, aim)
            for aim in ("auto", "least")
            for name in MODELS
            for tokens in LENGTHS
        ]
        # What was counted stands as long as a run would still choose that policy.
        same = lambda row: before.get(key(row), {}).get("policy") == row["policy"]  # noqa: E731
        rows = {key(row): before[key(row)] if same(row) else row for row in made}
    with TABLE.open("w") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows.values())


if __name__ == "__main__":
    main(sys.argv[1:])
