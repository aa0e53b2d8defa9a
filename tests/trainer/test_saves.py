"""A model that loads and cannot be saved is found before it trains, and its weights are kept."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file

from hfpatch.trainer import loading


@pytest.fixture
def saved(tmp_path, saved_tokenizer):
    """saved(file, **values): a folder with a tiny Llama, these values in one of its files."""

    def make(file, **values):
        folder = tmp_path / "model"
        tiny.llama(vocab_size=300).save_pretrained(folder)
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        flags = {"model": folder, "config_overrides": None, "tokenizer": saved_tokenizer}
        return flags | {"max_steps": 2}

    return make


@pytest.mark.parametrize("name, value", [
    ("temperature", 0.6), ("top_p", 0.9), ("top_k", 20), ("typical_p", 0.5),
])  # fmt: skip
def test_sampling_settings_get_do_sample(run_train, saved, name, value):
    code, out, err, folder = run_train(**saved("generation_config.json", **{name: value}))
    assert code == 0 and "do_sample=True is set" in out, err
    written = json.loads((folder / "generation_config.json").read_text())
    assert written[name] == value and written["do_sample"] is True
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("file, values", [
    ("config.json", {"output_attentions": True}),
    ("generation_config.json", {"pad_token_id": -1}),
])  # fmt: skip
def test_other_flaws_are_refused_before_training(run_train, saved, file, values, monkeypatch):
    flags = saved(file, **values)
    monkeypatch.setattr(
        "hfpatch.trainer.trainer.Trainer.train", lambda *args, **kwargs: pytest.fail("trained")
    )
    code, _, err, folder = run_train(**flags)
    assert code == 2 and f"could not be saved: {file}: " in err, err
    assert not folder.exists()


def test_weights_are_written_where_the_rest_fails(run_train, monkeypatch):
    """Of a model whose flaw comes late: a tokenizer that cannot be written."""

    def fails(self, folder, *args, **kwargs):
        raise ValueError("hfpatch: no tokenizer today.")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fails)
    monkeypatch.setattr("transformers.PreTrainedConfig.save_pretrained", fails)
    code, _, err, folder = run_train(max_steps=2)
    assert code == 2 and "no tokenizer today" in err
    weights = load_file(folder / "model.safetensors")
    assert torch.isfinite(weights["model.norm.weight"]).all()


def test_a_model_without_settings_saves():
    said = []
    loading.expect_saves(tiny.llama(), said.append)
    assert not said
