"""LLaMA-Factory's own `run_exp`, with hfpatch's callback beside its own."""

import json
import os
import sys
import tempfile
from pathlib import Path

import host_runs
import pytest

import hfpatch

# torchaudio of the package index loads beside a torch for CUDA alone, and LLaMA-Factory imports it
# for audio: an empty package stands in for it.
STAND_IN = tempfile.mkdtemp()
try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):
    Path(STAND_IN, "torchaudio").mkdir()
    Path(STAND_IN, "torchaudio", "__init__.py").touch()
    sys.path.insert(0, STAND_IN)
PLACES = os.pathsep.join([STAND_IN, host_runs.PLACES])

tuner = pytest.importorskip("llamafactory.train.tuner")


class Keeps(hfpatch.Callback):
    """Also keeps the model that was trained."""

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.model, self.log = model, list(state.log_history)
        super().on_train_end(args, state, control, model=model, **kwargs)


def arguments(folder: Path, data: Path, out: Path, **more) -> dict:
    """Of four steps in float32 on a CPU."""
    (data.parent / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": data.name}}))
    return {
        "model_name_or_path": str(folder), "stage": "sft", "do_train": True,
        "finetuning_type": "full", "dataset": "rows", "dataset_dir": str(data.parent),
        "template": "empty", "cutoff_len": 64, "output_dir": str(out), "max_steps": 4,
        "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_gradient_checkpointing": True, "flash_attn": "sdpa", "seed": 1,
        "overwrite_output_dir": True, "disable_tqdm": True, "save_only_model": True,
        **more,
    }  # fmt: skip


def test_against_stock(tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    ours = Keeps(apply={"checkpointing": hfpatch.Checkpointing(tile=8)})
    stock = Keeps()
    for name, callback in (("ours", ours), ("stock", stock)):
        tuner.run_exp(arguments(folder, data, tmp_path / name), callbacks=[callback])
    host_runs.assert_tiled(ours.model)
    mine, theirs = host_runs.losses(ours.log), host_runs.losses(stock.log)
    assert len(theirs) == 4 and mine == pytest.approx(theirs, rel=1e-4)
    host_runs.assert_same_training(ours.model, stock.model)


@pytest.mark.parametrize("variables", [{}, {"FORCE_TORCHRUN": 1, "NPROC_PER_NODE": 1}])
def test_the_command_is_patched(variables, tmp_path):
    folder, data = host_runs.saved_llama(tmp_path / "model"), host_runs.alpaca_file(tmp_path)
    file = tmp_path / "train.yaml"
    words = arguments(folder, data, tmp_path / "out", max_steps=2)
    file.write_text(json.dumps(words))  # JSON is YAML
    host_runs.assert_command_is_patched(
        "llamafactory-cli", "train", file, places=PLACES, **variables
    )
