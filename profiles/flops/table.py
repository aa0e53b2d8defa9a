"""Matmul FLOPs of a step over the least there are, counted under a dispatch mode while the real code runs on fake tensors.

python profiles/flops/table.py            every row, on a CPU in about ten minutes; writes results.csv
python profiles/flops/table.py llama-3.1-8b 8192 auto
"""

import csv
import subprocess
import sys
from pathlib import Path

from hfpatch.memory.formula import ModelShape, step_flops
from hfpatch.memory.hardware import GPUS, GiB
from hfpatch.memory.policy import Checkpointing, decide, describe
from hfpatch.memory.presets import preset_config

MODELS = {
    "llama-3.1-8b": (8192, 16384, 32768, 131072), "Qwen/Qwen3-8B": (8192, 32768), "google/gemma-3-12b": (8192, 32768),
    "Qwen/Qwen3-30B-A3B": (8192, 32768),
}  # fmt: skip
DEVICE = 79 * GiB
FIELDS = ("model", "tokens", "aim", "matmul", "allowed", "attention_forwards", "device_gib", "host_gib", "policy")


def settled(name: str, tokens: int, aim: str):
    """(config, shape, the option chosen): bf16 parameters and gradients on a device of 79 GiB (all of it free where those
    alone are more), no optimizer."""
    config = preset_config(name)
    shape = ModelShape.from_config(config)
    resident = 4 * shape.parameters
    free = DEVICE - resident if resident < DEVICE else DEVICE
    sizes = {"batch": 1, "tokens": tokens, "gpu_free": free, "host_free": 480 * GiB, "gpu": GPUS["h100"]}
    return config, shape, decide(Checkpointing.of(aim), shape, **sizes)


def row(name: str, tokens: int, aim: str) -> dict:
    """matmul: counted, over 6 a weight and token; allowed: what the closed form says of this policy, which knows whose values
    nobody reads."""
    from hfpatch.simulate.rivals import build, prepare
    from hfpatch.simulate.simulator import simulate

    config, shape, option = settled(name, tokens, aim)
    found = simulate(prepare(build(config), "hfpatch"), 1, tokens, policy=option.policy)
    least = step_flops(shape, "off", batch=1, tokens=tokens).matmul
    allowed = step_flops(shape, option.policy, batch=1, tokens=tokens).matmul
    forwards = found.flops["attention"]["forward"] / step_flops(shape, "off", batch=1, tokens=tokens).attention_forward
    return {
        "model": name, "tokens": tokens, "aim": aim, "matmul": f"{sum(found.flops['matmul'].values()) / least:.3f}",
        "allowed": f"{allowed / least:.3f}", "attention_forwards": f"{forwards:.2f}",
        "device_gib": f"{found.most_beyond_bytes / GiB:.1f}", "host_gib": f"{found.host_peak_bytes / GiB:.1f}",
        "policy": describe(option.policy, shape.num_layers),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    if arguments:
        name, tokens, aim = arguments
        csv.DictWriter(sys.stdout, FIELDS).writerow(row(name, int(tokens), aim))
        return
    table = Path(__file__).with_name("results.csv")
    table.write_text(",".join(FIELDS) + "\n")
    for aim in ("auto", "least"):
        for name, lengths in MODELS.items():
            for tokens in lengths:
                command = [sys.executable, "-W", "ignore", __file__, name, str(tokens), aim]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                with table.open("a") as file:
                    file.write(done.stdout.splitlines()[-1] + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
