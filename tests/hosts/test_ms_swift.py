"""ms-swift's own `sft`, with the plugin as its documentation says to load one."""

import json
from pathlib import Path

import host_runs
import pytest

from hfpatch.trainer import plugins

swift = pytest.importorskip("swift.pipelines")
PLUGIN = Path(plugins.__path__[0]) / "ms_swift.py"


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


def trained(*places):
    """The SwiftSft object after training."""
    pipeline = swift.SwiftSft(arguments(*places))
    pipeline.run()
    return pipeline


def losses(out: Path) -> list[float]:
    [log] = out.glob("**/logging.jsonl")
    return host_runs.losses([json.loads(line) for line in log.read_text().splitlines()])


def test_against_stock(tmp_path):
    folder = host_runs.saved_llama(tmp_path / "model")
    data = host_runs.alpaca_file(tmp_path)
    plugin = ("--external_plugins", str(PLUGIN), "--callbacks", "hfpatch")
    ours = trained(folder, data, tmp_path / "ours", *plugin)
    stock = trained(folder, data, tmp_path / "stock")
    host_runs.assert_tiled(ours.model)
    mine, theirs = losses(tmp_path / "ours"), losses(tmp_path / "stock")
    assert len(theirs) >= 4 and mine == pytest.approx(theirs, rel=1e-4)
    host_runs.assert_same_training(ours.model, stock.model)


def test_the_command_is_patched(tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    words = arguments(folder, data, tmp_path / "out", steps=2)
    host_runs.assert_command_is_patched("swift", "sft", *words)
