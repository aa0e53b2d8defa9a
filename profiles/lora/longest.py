"""The longest QLoRA context of Llama-3.1-8B by `hfpatch plan`: `python profiles/lora/longest.py >
profiles/lora/results.csv`.
"""

import csv
import sys
from dataclasses import replace

from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GPUS
from hfpatch.planner.plan import plan

GiB = 1 << 30
CARDS = {f"{n} GiB": replace(GPUS["rtx4090"], memory_bytes=n * GiB) for n in (12, 24, 48)}
CARDS |= {name: GPUS[name] for name in ("rtx5090", "l40s", "a100-80gb", "h100")}
FIELDS = ("card", "host_gib", "inputs_alone", "tokens", "gpu_gib", "host_taken_gib", "step_seconds",
          "every", "tile",
          "keep", "frozen_weights")  # fmt: skip


def main() -> None:
    """One row a card and host memory, the policy chosen by the plan; slack of the allocator and 1
    GiB of context included.
    """
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(FIELDS)
    asks = [(card, None, alone) for card in CARDS for alone in (False, True)]
    asks += [("24 GiB", host, False) for host in (72, 128)]
    for card, host, alone in asks:
        settings = Checkpointing(keep="input") if alone else Checkpointing()
        run = {"gpu": CARDS[card], "adapters": Adapters(16, "4bit"), "checkpointing": settings}
        run["host_ram"] = (1 << 14 if host is None else host) * GiB
        tokens = plan("llama-3.1-8b", seq_len=8192, max_seq_len=True, **run).advice.max_seq_len
        found = plan("llama-3.1-8b", seq_len=tokens, **run)
        peak, taken = (f"{n / GiB:.1f}" for n in (found.gpu.peak_bytes, found.host.peak_bytes))
        seconds = f"{found.time.step_seconds:.0f}"
        policy = [getattr(found.policy, name) for name in FIELDS[7:]]
        out.writerow([card, host or "", alone, tokens, peak, taken, seconds, *policy])


if __name__ == "__main__":
    main()
