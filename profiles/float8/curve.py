"""Learning curves of a tiny Llama on this repository's own text: bf16 beside torchao's float8,
emulated.

    python profiles/float8/curve.py     # on a CPU: minutes; writes losses.csv
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

from hfpatch.cli import train

HERE = Path(__file__).parent
STEPS = 40
RUNS = {
    "bf16": [],
    "rowwise": ["--fp8", "rowwise"],
    "rowwise_with_gw_hp": ["--fp8", "rowwise_with_gw_hp"],
}


def losses(folder: Path, flags: list[str]) -> list[float]:
    """The loss of each step."""
    code = train.main([
        "--model", "llama-tiny", "--train_tokenizer", "512", "--data", str(HERE.parents[1] / "hfpatch/loss"),
        "--data_glob", "**/*.py", "--packing", "True", "--seq_len", "96", "--checkpointing",
        "host,tile=32", "--per_device_train_batch_size", "2",
        "--max_steps", str(STEPS), "--learning_rate", "1e-2", "--logging_steps", "1",
        "--dtype", "bfloat16", "--save_strategy", "steps", "--save_steps", str(STEPS),
        "--report_to", "none", "--use_cpu", "True", "--seed", "0", "--cache_dir",
        str(folder.parent / "cache"), "--output_dir", str(folder), "--disable_tqdm", "True", *flags,
    ])  # fmt: skip
    if code:
        sys.exit(code)
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {name: losses(Path(folder, name), flags) for name, flags in RUNS.items()}
    with open(HERE / "losses.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *found])
        table.writerows([step, *row] for step, row in enumerate(zip(*found.values()), 1))
