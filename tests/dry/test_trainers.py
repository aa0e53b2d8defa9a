"""TRL's SFTTrainer trains on the dry device."""

import json
import subprocess

import pytest

from tests.dry.conftest import HERE, command, environment


@pytest.mark.long
def test_trl_trains(tmp_path, table):
    words = command(str(HERE / "trainers_worker.py"), str(tmp_path))
    run = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["steps"] == 3
    case = "TRL SFT, its default LoRA, 2 layers, 4096 tokens"
    table("trainers", case, "peak, GiB", found["peak_gib"])
