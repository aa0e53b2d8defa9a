"""Seconds of a step under the policy on which a run settles (budget/measured.py), as `hfpatch plan`
has them, beside those of the search over every field of a policy that the run time made until
2026-11-28, by the closed forms of that day. `seconds` and `policy` of search.csv were recorded then.

    python profiles/policy/ladder.py    prices every cell anew, into search.csv; minutes of a CPU
"""

import csv
from pathlib import Path
from statistics import median

from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GiB
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import evaluate

TABLE = Path(__file__).with_name("search.csv")
HOST = 256 * GiB


def rows() -> list[dict]:
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def ratios() -> list[float]:
    """Seconds of the ladder over those of the search."""
    return [float(row["ladder_seconds"]) / float(row["seconds"]) for row in rows()]


def priced(row: dict) -> dict:
    run = make_run(
        row["model"], seq_len=int(row["tokens"]), gpu=row["card"], host_ram=HOST,
        adapters=Adapters(16) if row["weights"] == "lora" else None,
    )  # fmt: skip
    found = evaluate(run, "gpu8bit")
    seconds = found.time.step_seconds - found.time.parts["optimizer"]
    return row | {"ladder_seconds": f"{seconds:.4f}", "ladder_policy": found.advice.keeps}


def main() -> None:
    found = rows()
    for at, row in enumerate(found):
        found[at] = priced(row)
        print(*found[at].values(), sep=", ", flush=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    print(f"median {median(ratios()):.3f}, at most {max(ratios()):.3f}")


if __name__ == "__main__":
    main()
