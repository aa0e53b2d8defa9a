"""What the tests of other trainers share: a tiny Llama in a folder, a few lines of text, and a
comparison of two runs.
"""

import json
from pathlib import Path

import pytest
import tiny
import torch

from hfpatch.context.classes import is_mixed
from hfpatch.trainer import tokenizer as byte_level

TEXTS = [f"Question {i}: what is {i} and {i}? The answer is {2 * i}, as ever." for i in range(16)]


def saved_llama(folder: Path, cls=None) -> Path:
    """A folder with a tiny Llama's weights and a byte-level tokenizer."""
    tokenizer = byte_level.train(TEXTS, 300)
    tokenizer.save_pretrained(folder)
    settings = {"vocab_size": len(tokenizer)} | ({} if cls is None else {"cls": cls})
    tiny.llama(**settings).save_pretrained(folder)
    return folder


def alpaca_file(folder: Path) -> Path:
    """Instructions and answers, as LLaMA-Factory, ms-swift and Axolotl read them."""
    file = folder / "rows.json"
    rows = [{"instruction": text, "input": "", "output": text[::-1]} for text in TEXTS]
    file.write_text(json.dumps(rows))
    return file


def losses(log_history: list[dict]) -> list[float]:
    """Of each step's log line."""
    return [entry["loss"] for entry in log_history if "loss" in entry]


def assert_tiled(model) -> None:
    """Every decoder layer is patched, and runs in tiles."""
    layers = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
    assert len(layers) == 2 and all(is_mixed(layer) for layer in layers)
    assert all(layer._hfpatch_condition.reason is None for layer in layers)


def assert_same_training(ours, stock) -> None:
    """The same weights after training, to float32's rounding."""
    mine, theirs = dict(ours.named_parameters()), dict(stock.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert not torch.isnan(weight).any()
        assert mine[name].detach().cpu() == pytest.approx(weight.detach().cpu(), rel=1e-3, abs=1e-5)
