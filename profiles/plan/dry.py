"""Plans of the cells of dry.csv, beside what the same steps took on the dry device (tests/dry): the
policy on which the run settled, and the most bytes of torch's allocator in its last step (torch 2.11,
AdamW, six steps, expandable segments).

    python profiles/plan/dry.py    plans every cell anew, into dry.csv
"""

import csv
from dataclasses import replace
from pathlib import Path

from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import CONTEXT_BYTES, GPUS, GiB
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import evaluate

TABLE = Path(__file__).with_name("dry.csv")
DRY_CONTEXT = 520 << 20
ADAPTERS = {"lora-all16": Adapters(16), "lora-all": Adapters(16, itemsize=4), "full": None}
ADAPTERS["qlora-all"] = Adapters(16, "4bit", itemsize=4)


def planned(row: dict) -> dict:
    memory = (int(row["card_mib"]) << 20) - DRY_CONTEXT + CONTEXT_BYTES
    run = make_run(
        row["model"], seq_len=int(row["tokens"]), gpu=replace(GPUS["h100"], memory_bytes=memory),
        host_ram=int(row["host_gib"]) * GiB, adapters=ADAPTERS[row["kind"]],
    )  # fmt: skip
    found = evaluate(run, "adamw")
    peak = found.gpu.peak_bytes - found.gpu.parts["slack"]
    plain, keep = found.policy.plain, found.policy.keep
    gates = max(0, min(keep, run.shape.num_layers - plain))
    return row | {
        "plan_untiled": plain, "plan_tile": found.policy.tile,
        "plan_gate_up": gates, "plan_gib": f"{peak / GiB:.1f}",
    }  # fmt: skip


def main() -> None:
    with TABLE.open() as file:
        rows = [planned(row) for row in csv.DictReader(file)]
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        off = float(row["plan_gib"]) / float(row["run_gib"]) - 1
        print(*row.values(), f"{off:+.1%}", sep=",")


if __name__ == "__main__":
    main()
