"""Whole programs run on the dry device: `hfpatch train`, TRL's trainers, the scripts for a GPU."""

import json
import re
import subprocess

import pytest

from tests.dry.conftest import HERE, ROOT, command, environment

CARD = 81008 / 1024  # GiB
NINE = "scripts/gpu/nine.py --worker --seconds 3000 --out OUT --parts "
PROGRAMS = {
    # As scripts/gpu/engines.py starts it, in a process of its own where answers are not true.
    "hfpatch train": (
        "-m hfpatch train --placement gpu8bit --packing --per_device_train_batch_size 1 --model "
        "llama-3.2-1b --config_overrides num_hidden_layers=2 --data DATA --train_tokenizer 1000 "
        "--seq-len 4096 --max_steps 2 --bf16 True --save_strategy no --report_to none "
        "--nan_steps 0 --output_dir OUT"
    ),
    "verify, weights on the host": "tests/dry/trainers_worker.py verified OUT",
    "TRL SFT": "tests/dry/trainers_worker.py sft OUT",
    "TRL GRPO": "tests/dry/trainers_worker.py grpo OUT",
    "Trainer, twice": "tests/dry/trainers_worker.py twice OUT",
    "tests that need a GPU": "-m pytest -q -W ignore -p no:cacheprovider -m gpu tests/lab/test_step.py",
    "memory runs out, the next start fits": "tests/dry/trainers_worker.py again OUT",
    "nine.py": NINE + "first second",
}
USED = {"Trainer, twice": 0.85}  # of the card's 79.1 GiB, at least


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program, table, tmp_path):
    words = PROGRAMS[program].replace("OUT", str(tmp_path)).replace("DATA", str(ROOT / "docs"))
    run = subprocess.run(
        command(str(HERE / "program.py"), *words.split()), env=environment(), cwd=ROOT,
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 0, said[-3000:]
    assert not re.findall("^dry: (?!.* is not modelled$).*", said, re.M)  # refused, or dead
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"')]
    assert not [row for row in rows if row.keys() & {"failed", "error", "died"}]
    table("programs", program, "rows", len(rows))
    peaks = [row["peak_gib"] for row in rows if "peak_gib" in row]
    if peaks:
        table("programs", program, "highest peak, GiB", max(peaks), CARD)
        assert max(peaks) >= USED.get(program, 0) * CARD
