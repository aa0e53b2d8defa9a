"""LoRA over a bf16 base that waits on the host, planned and simulated.

python profiles/lora/streamed.py > profiles/lora/streamed.csv
"""

import csv
import sys
from dataclasses import replace

from hfpatch.memory.adapters import Adapters
from hfpatch.memory.policy import Checkpointing
from hfpatch.memory.shape import ModelShape, Policy
from hfpatch.planner.models import config_of
from hfpatch.planner.placements import resident
from hfpatch.planner.plan import plan
from hfpatch.planner.simulated import simulated_bytes

GiB = 1 << 30
LEAST = Checkpointing(aim="least", weights="host")
RUNS = [
    ("llama-3.1-70b", "rtx4090", LEAST), ("llama-3.1-70b", "rtx4090", Checkpointing()),
    ("Qwen/Qwen3-32B", "rtx4090", LEAST), ("Qwen/Qwen3-32B", "rtx4090", Checkpointing()),
]  # fmt: skip
FIELDS = ("model", "gpu", "asked", "tokens", "gpu_gib", "simulated_gpu_gib", "base_on_host_gib", "simulated_rest_on_host_gib",
          "step_seconds", "copy_wait", "save_attention", "stream_attention", "park", "tile")  # fmt: skip


def main(host="512GiB", tokens=131072) -> None:
    """A row a run; GiB on the device with parameters, gradients, 8-bit Adam's states and slack, without the CUDA context."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(FIELDS)
    for name, gpu, settings in RUNS:
        found = plan(name, seq_len=tokens, gpu=gpu, host_ram=host, adapters=Adapters(16), checkpointing=settings)
        beyond, on_host = simulated_bytes(config_of(name)[1], found, at_peak=True)
        more = beyond - found.gpu_bytes["activations"]
        shape = replace(ModelShape.from_config(config_of(name)[1]), adapters=Adapters(16))
        base = resident(found.placement, shape, 1, Policy(**found.policy)).host
        sizes = (found.gpu_peak_bytes, found.gpu_peak_bytes + more, base, on_host)
        policy = [found.policy[n] for n in FIELDS[10:]]
        seconds = f"{found.step_seconds:.0f}", f"{found.seconds['copy_wait']:.1f}"
        out.writerow([name, gpu, settings.aim, tokens, *(f"{n / GiB:.1f}" for n in sizes), *seconds, *policy])


if __name__ == "__main__":
    main()
