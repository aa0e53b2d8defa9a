"""LoRA over a bf16 base that waits on the host, planned; with --simulate each plan's policy also
runs a step on fake tensors.

python profiles/lora/streamed.py [--simulate] > profiles/lora/streamed.csv
"""

import csv
import sys

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.models import config_of
from hfpatch.planner.plan import plan

GiB = 1 << 30
# The machine's memory: for inputs and attention outputs, for inputs, for every few layers' inputs.
RUNS = [("llama-3.1-70b", n, "least") for n in (512, 336, 240)] + [
    ("Qwen/Qwen3-32B", n, "least") for n in (336, 192, 128)
]
RUNS += [("llama-3.1-70b", 512, "fastest"), ("Qwen/Qwen3-32B", 336, "fastest")]
FIELDS = ("model", "gpu", "host_ram_gib", "aim", "tokens", "fits", "gpu_gib", "beyond_gib",
          "simulated_gib", "host_gib",
          "step_seconds", "copy_wait", "every", "keep", "tile")  # fmt: skip


def simulated(name: str, found) -> str:
    """GiB beyond parameters and gradients of a step under the plan's policy, on fake tensors: of
    two segments of layers, since what more there are waits on the host.
    """
    from hfpatch.lab.simulate.implementations import build, prepare
    from hfpatch.lab.simulate.simulator import simulate

    config = config_of(name)[1] | {"num_hidden_layers": max(3, 2 * found.policy.every)}
    model = prepare(build(config, adapters=Adapters(16)), "hfpatch")
    step = simulate(model, 1, found.run.seq_len, policy=found.policy)
    return f"{step.most_beyond_bytes / GiB:.1f}"


def main(gpu="rtx4090", tokens=131072) -> None:
    """A row a run: GiB of the device with slots, embeddings, head, adapters, 8-bit Adam and slack,
    without the CUDA context.
    """
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(FIELDS)
    for name, host, aim in RUNS:
        settings = Checkpointing(aim=aim, frozen_weights="host")
        found = plan(
            name,
            seq_len=tokens,
            gpu=gpu,
            host_ram=host * GiB,
            adapters=Adapters(16),
            checkpointing=settings,
        )
        sizes = [f"{n / GiB:.1f}" for n in (found.gpu.peak_bytes, found.gpu.parts["activations"])]
        sizes += [
            simulated(name, found) if "--simulate" in sys.argv else "",
            f"{found.host.peak_bytes / GiB:.1f}",
        ]
        seconds = f"{found.time.step_seconds:.0f}", f"{found.time.parts['copy_wait']:.1f}"
        out.writerow(
            [
                name,
                gpu,
                host,
                aim,
                tokens,
                found.fits,
                *sizes,
                *seconds,
                *(getattr(found.policy, n) for n in FIELDS[12:]),
            ]
        )


if __name__ == "__main__":
    main()
