"""TRL's command, which trains in a child of accelerate's launcher. test_trl_trainers.py has its trainers,
test_run_module.py a script of one.
"""

import json

import host_runs
import pytest

pytest.importorskip("trl")


@pytest.mark.long  # a minute; test_run_commands.py plays the commands of other trainers
def test_the_command_is_patched(tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in host_runs.TEXTS]
    (data / "train.jsonl").write_text("".join(lines))
    flags = {
        "model_name_or_path": folder, "dataset_name": data, "output_dir": tmp_path / "out",
        "max_steps": 2, "max_length": 64, "per_device_train_batch_size": 2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        "learning_rate": 1e-3, "dtype": "float32",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    host_runs.assert_command_is_patched("trl", "sft", *words)
