"""What the tests of other trainers share: a tiny Llama in a folder, a few lines of text, and a
comparison of two runs.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import tiny
import torch
from trainer.workbench import PLACES, WHOLE, execute

from hfpatch.context.classes import is_patched
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
    assert len(layers) == 2 and all(is_patched(layer) for layer in layers)
    assert all(layer._hfpatch.condition.reason is None for layer in layers)


def assert_same_training(ours, stock) -> None:
    """The same trained weights, to their dtype's rounding."""
    mine, theirs = (dict(model.named_parameters()) for model in (ours, stock))
    trained = {name for name, weight in theirs.items() if weight.requires_grad}
    assert mine.keys() == theirs.keys() and trained
    assert_same_weights(*({n: weights[n].detach() for n in trained} for weights in (mine, theirs)))


def assert_same_weights(mine: dict, theirs: dict) -> None:
    """The same numbers under the same names, to their dtype's rounding."""
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert not torch.isnan(weight).any()
        near = max(1e-3, torch.finfo(weight.dtype).eps)
        found, wanted = (w.float().cpu() for w in (mine[name], weight))
        assert found == pytest.approx(wanted, rel=near, abs=1e-5), name


def assert_command_is_patched(*command, places=PLACES, **variables) -> None:
    """`hfpatch run` reaches the process in which this command trains, with stock's losses.

    Its layers run in tiles of 8 tokens, none whole. Without the hook the same command trains stock
    and succeeds, which `--require` reports.

    Args:
        command: it trains two steps of a model that saved_llama saved, and logs each.
        places: its PYTHONPATH.
        variables: of its environment.
    """
    tiles = ("--checkpointing", "tile=8")
    run, found = (sys.executable, "-m", "hfpatch", "run", "--require", *tiles), []
    for before, code in (((), 0), (("env", f"PYTHONPATH={places}"), 3)):
        done, out, err = execute(*run, *before, *command, PYTHONPATH=places, **variables)
        assert done == code, err[-4000:]
        assert not WHOLE.search(out + err), err[-4000:]
        said = "checkpointing 2 x LlamaDecoderLayer" in out + err  # a host may print the model too
        assert said == (code == 0), err[-4000:]
        assert ("no process of this run trained" in err) == (code == 3)
        words = re.findall(r"'loss': '?([0-9.]+)", out + err)
        found.append([float(loss) for loss in words])
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=2e-3)
