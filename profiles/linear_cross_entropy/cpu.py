"""The loss stage on one CPU core: plain, torch's own chunked op and hfpatch; seconds (process time)
and allocator peak.

OMP_NUM_THREADS=1 python profiles/linear_cross_entropy/cpu.py
"""

import csv
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from hfpatch.ops import linear_cross_entropy

# Llama 3.1 8B's head at 1/8 of its width
TOKENS, HIDDEN, VOCAB, WORKSPACE = 2048, 512, 16032, 8 << 20


def plain(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def of_torch(hidden, weight, labels):
    return F.linear_cross_entropy(
        hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions()
    )


def of_hfpatch(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight, labels, workspace_bytes=WORKSPACE)


def peak_mib(step) -> float:
    """Most bytes that the CPU allocator had handed out inside step, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        step()
    events = [e for e in result.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def main():
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for ignored in (0.0, 0.5):
            for name, op in (("plain", plain), ("torch", of_torch), ("hfpatch", of_hfpatch)):
                if op is of_torch and not hasattr(F, "linear_cross_entropy"):
                    print(f"torch {torch.__version__} has no F.linear_cross_entropy: skipped")
                    continue
                torch.manual_seed(0)
                hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
                weight = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).to(dtype).requires_grad_()
                labels = torch.randint(0, VOCAB, (TOKENS,))
                labels[torch.rand(TOKENS) < ignored] = -100

                def step(op=op, hidden=hidden, weight=weight, labels=labels):
                    hidden.grad = weight.grad = None
                    op(hidden, weight, labels).backward()

                step()
                seconds = []
                for _ in range(3):
                    start = time.process_time()
                    step()
                    seconds.append(time.process_time() - start)
                hidden.grad = weight.grad = None
                row = [
                    str(dtype)[6:],
                    f"{ignored:.0%}",
                    name,
                    f"{statistics.median(seconds):.2f}",
                    f"{peak_mib(step):.1f}",
                ]
                rows.append(row)
                print(*row, flush=True)
    with open(Path(__file__).with_name("cpu.csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dtype", "ignored", "op", "seconds", "peak_MiB"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
