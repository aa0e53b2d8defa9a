"""ms-swift's own `swift sft` under `hfpatch run`."""

import host_runs
import pytest

pytest.importorskip("swift.pipelines")


def arguments(folder, data, out, *more, steps=4):
    """Of `swift sft`."""
    return [
        "--model", str(folder), "--model_type", "llama", "--template", "dummy",
        "--dataset", str(data), "--tuner_type", "full", "--torch_dtype", "float32",
        "--max_steps", str(steps), "--logging_steps", "1", "--per_device_train_batch_size", "2",
        "--gradient_accumulation_steps", "1", "--learning_rate", "1e-3", "--save_strategy", "no",
        "--use_cpu", "true", "--report_to", "none", "--max_length", "256", "--seed", "1",
        "--output_dir", str(out), "--dataset_num_proc", "1", "--attn_impl", "sdpa",
        "--split_dataset_ratio", "0", "--check_model", "false", *more,
    ]  # fmt: skip


def test_the_command_is_patched(tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    words = arguments(folder, data, tmp_path / "out", steps=2)
    host_runs.assert_command_is_patched("swift", "sft", *words)
