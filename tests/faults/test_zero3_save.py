"""Two ranks under ZeRO-3 save a checkpoint in its staging folder, each its part; it is whole when
it has its name.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hfpatch.trainer import runs

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def launch(folder: Path, *flags) -> tuple[int, str]:
    """(exit code, output) of a run of two processes; one that stands still is killed with all of
    its group.
    """
    config = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
              "zero_force_ds_cpu_optimizer": False,
              "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto"}  # fmt: skip
    (folder / "zero3.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text(
        "\n".join(f"line {n} of a text that is long enough to be packed" for n in range(300))
    )
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(HERE.parent.parent),
    }
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2",
               "--num_machines", "1",
               "--use_deepspeed", "--deepspeed_config_file", folder / "zero3.json",
               "--mixed_precision", "no",
               "--dynamo_backend", "no",
               "--main_process_port", free_port(), "--zero3_init_flag", "false",
               HERE / "zero3_train.py", "--model", "llama-tiny",
               "--train_tokenizer", "300", "--data", folder / "text.txt", "--seq-len", "64",
               "--output_dir", folder / "run",
               "--use_cpu", "--save_steps", "1", "--save_total_limit", "2", "--report_to", "none",
               "--disable_tqdm", "True",
               *flags]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1, f"it stood still:\n{process.communicate()[0]}"
    return process.returncode, out


@pytest.mark.long
def test_both_ranks_parts_are_in_a_whole_checkpoint_and_training_goes_on_from_it(tmp_path):
    code, out = launch(tmp_path, "--max_steps", "3")
    assert code == 0, out[-3000:]
    saved = runs.checkpoints(tmp_path / "run")
    assert [p.name for p in saved] == ["checkpoint-3", "checkpoint-2"]
    parts = {p.name for p in saved[0].rglob("*optim_states.pt")}
    assert {name.split("_mp_rank")[0].removeprefix("bf16_") for name in parts} == {
        "zero_pp_rank_0",
        "zero_pp_rank_1",
    }
    (saved[0] / runs.STATE_FILE).unlink()
    code, out = launch(tmp_path, "--max_steps", "4", "--resume_from_checkpoint", "True")
    assert code == 0 and "checkpoint-2" in out, out[-3000:]
    assert [p.name for p in runs.checkpoints(tmp_path / "run")] == [
        "checkpoint-4",
        "checkpoint-3",
    ]
    states = [
        json.loads((p / runs.STATE_FILE).read_text())["global_step"]
        for p in runs.checkpoints(tmp_path / "run")
    ]
    assert states == [4, 3]


@pytest.mark.long
def test_the_last_weights_are_there_without_a_tokenizer(tmp_path, monkeypatch):
    """Trainer saves once more under DeepSpeed, without weights, after any ValueError."""
    monkeypatch.setenv("NO_TOKENIZER", "1")
    code, out = launch(tmp_path, "--max_steps", "2", "--save_strategy", "no")
    assert code and "no tokenizer today" in out, out[-3000:]
    assert load_file(tmp_path / "run" / "model.safetensors")["model.norm.weight"].isfinite().all()
