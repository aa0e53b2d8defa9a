"""Clocked steps of one tree as rows of a CSV: python profiles/clock/measure.py after [MODEL]
(PYTHONPATH names the tree).
"""

import csv
import sys

from hfpatch.planner.clocked import clock

NAMES = ("when", "model", "gpu", "tokens", "policy", "step_s", "forward_exposed_s",
         "backward_exposed_s", "exposed_percent",
         "planned_s", "peak_gib")  # fmt: skip
CELLS = [(gpu, tokens) for gpu in ("a100-80gb", "h100") for tokens in (8192, 16384, 32768, 131072)]


def row(when: str, model: str, gpu: str, tokens: int) -> list:
    found = clock(model, seq_len=tokens, gpu=gpu)
    step, exposed = found.seconds["step"], found.exposed("turn")
    parts = [exposed.get((turn,), 0.0) for turn in ("forward", "backward")]
    numbers = [step, *parts, 100 * sum(parts) / step, found.planned, found.peak_bytes / 2**30]
    return [
        when,
        model,
        gpu,
        tokens,
        found.title.partition(": ")[2],
        *(f"{n:.3f}" for n in numbers),
    ]


if __name__ == "__main__":
    when, model = sys.argv[1], (sys.argv[2:] or ["llama-3.1-8b"])[0]
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(NAMES)
    for gpu, tokens in CELLS:
        out.writerow(row(when, model, gpu, tokens))
        sys.stdout.flush()
