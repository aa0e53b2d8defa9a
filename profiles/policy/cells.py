"""Steps as people set them up, on the dry device: out-of-memory errors in four steps, and what the
last one took. Each row of cells.csv is a case; `training` has these words, with hyphens:

    full | lora | qlora         of all linear layers; -qv of q and v, -experts of q, v and experts
    -drop -dora -saved -32      dropout; DoRA; embedding and head train too; weights in float32
    -16 -amp                    adapters in bfloat16 (PEFT keeps float32); autocast
    -b4 -acc2 -packed -padded   rows of a batch; micro-steps; the batch's kind
    -8bit -inback -none         8-bit AdamW; the same in the backward; no optimizer (AdamW)
    -eval -gen -ref -hold       evaluation, rollouts, a reference model; 4 GiB taken before step 3
    -unfreeze -freeze           the lower half of the layers is frozen before step 3; in all steps
    -away                       frozen weights wait on the host
    -l8 -h200                   layers (all); GiB of host memory (64, 128 or 200, by the card)

    python profiles/policy/cells.py [WORD ...]    runs the rows that have all these words anew
"""

import csv
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.dry.conftest import Dry  # noqa: E402
from tests.dry.test_memory import ANNOUNCED  # noqa: E402

TABLE = Path(__file__).with_name("cells.csv")
GiB = 2**30
ALLOCATORS = {
    "segments that grow": "expandable_segments:True",
    "fixed segments": "",  # as the user's environment may have it
    "torch's default": None,  # apply() makes segments grow
}
ACTIONS = {
    "eval": "evaluate", "gen": "generate", "ref": "refer", "hold": "hold", "unfreeze": "unfreeze",
    "freeze": "freeze",
}  # fmt: skip
OPTIMIZERS = {"8bit": "adamw8bit", "inback": "in backward", "none": ""}


def numbers(words: list[str]) -> dict[str, int]:
    """Of words such as b4."""
    parts = ((word.rstrip("0123456789"), word) for word in words)
    return {name: int(word[len(name) :]) for name, word in parts if name and name != word}


def case_of(row: dict) -> dict:
    """The fields of steps.Case."""
    kind, *words = row["training"].split("-")
    number = numbers(words)
    steps = 6 if {"hold", "unfreeze"} & {*words} else 4
    case = {"model": row["model"], "rows": [(number.get("b", 1), int(row["tokens"]))] * steps}
    case |= {"layers": number.get("l", 0), "micro_steps": number.get("acc", 1)}
    if kind != "full":
        own = [w for w in ("qv", "experts", "dora", "saved") if w in words]
        own += ["dropout"] * ("drop" in words) + ["float32"] * ("16" not in words)
        case |= {"adapters": " ".join(["lora", *own]), "four_bits": kind == "qlora"}
    chosen = [OPTIMIZERS[w] for w in words if w in OPTIMIZERS]
    case["optimizer"] = chosen[0] if chosen else "adamw"
    case["before"] = ", ".join(ACTIONS[w] for w in words if w in ACTIONS)
    case["batch"] = next((w for w in words if w in ("packed", "padded")), "")
    case["autocast"] = "amp" in words
    case["checkpointing"] = {"frozen_weights": "host"} if "away" in words else "auto"
    case["dtype"] = "float32" if "32" in words else "bfloat16"
    return case


def filled(row: dict, dry: Dry) -> dict:
    usual = {24210: 64, 48676: 128}.get(int(row["card_mib"]), 200)
    host = numbers(row["training"].split("-")).get("h", usual)
    env = {"DRY_MEM_MIB": row["card_mib"], "PYTORCH_ALLOC_CONF": ALLOCATORS[row["allocator"]]}
    env |= {"HFPATCH_HOST_MEMORY": host * GiB}
    case = case_of(row)
    if case.get("four_bits"):  # made in bfloat16 first
        env |= {"DRY_MEM_MIB": 200000}
        case["card"] = int(row["card_mib"]) / 1024
    ran = dry.run(**case, env=env, alone=True)
    assert ran.end == "ok", ran.end
    last, said = ran.last, "".join(step["said"] for step in ran.steps)
    return row | {
        "errors_in_4_steps": sum("error" in step for step in ran.steps),
        "last_peak_gib": f"{last['allocated_peak'] / GiB:.1f}",
        "reserved_gib": f"{last['reserved_peak'] / GiB:.1f}",
        "retries": sum(step["retries"] for step in ran.steps),
        "announced_gib": (ANNOUNCED.findall(said) or [("", "")])[-1][1],  # without "at most"
    }


def main(words: list[str]) -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True)
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    with TemporaryDirectory() as folder:
        dry = Dry(Path(folder) / "stderr.txt")
        for at, row in enumerate(rows):
            if not {*words} <= {*row.values(), *row["training"].split("-")}:
                continue
            rows[at] = filled(row, dry) | {"commit": git.stdout.decode().strip()}
            print(*rows[at].values(), sep=", ", flush=True)
            with TABLE.open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                table.writeheader()
                table.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
