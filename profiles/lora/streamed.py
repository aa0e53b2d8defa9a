"""LoRA over a bf16 base that waits on the host, planned.

python profiles/lora/streamed.py > profiles/lora/streamed.csv
"""

import csv
import sys

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.planner.plan import plan

GiB = 1 << 30
# (model, the machine's memory in GiB, aim): for inputs and attention outputs, for inputs, for every
# few layers' inputs.
RUNS = [("llama-3.1-70b", n, "least") for n in (512, 336, 240)] + [
    ("Qwen/Qwen3-32B", n, "least") for n in (336, 192, 128)
]
RUNS += [("llama-3.1-70b", 512, "fastest"), ("Qwen/Qwen3-32B", 336, "fastest")]
FIELDS = ("model", "gpu", "host_ram_gib", "aim", "tokens", "fits", "gpu_gib", "beyond_gib",
          "host_gib", "step_seconds", "copy_wait", "every", "keep", "tile")  # fmt: skip


def main(gpu="rtx4090", tokens=131072) -> None:
    """A row a run: GiB of the device with slots, embeddings, head, adapters, 8-bit Adam and slack,
    without the CUDA context.
    """
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(FIELDS)
    for name, host, aim in RUNS:
        found = plan(
            name, seq_len=tokens, gpu=gpu, host_ram=host * GiB, adapters=Adapters(16),
            checkpointing=Checkpointing(aim=aim, frozen_weights="host"),
        )  # fmt: skip
        device = found.gpu.peak_bytes, found.gpu.parts["activations"], found.host.peak_bytes
        seconds = f"{found.time.step_seconds:.0f}", f"{found.time.parts['copy_wait']:.1f}"
        sizes = [f"{n / GiB:.1f}" for n in device]
        policy = [getattr(found.policy, n) for n in FIELDS[11:]]
        out.writerow([name, gpu, host, aim, tokens, found.fits, *sizes, *seconds, *policy])


if __name__ == "__main__":
    main()
