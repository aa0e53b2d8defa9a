"""`hfpatch plan --optimizer`: the bytes of states that real optimizers make, and what is refused."""

import re
from pathlib import Path

import pytest
import tiny
import torch
from own_optimizers import made
from transformers import LlamaForCausalLM

from hfpatch.budget.shape import ModelShape
from hfpatch.cli import main as program
from hfpatch.lab.models import resolve
from hfpatch.planner import optimizers as planned
from hfpatch.planner.optimizers import OPTIMIZERS, state_numbers
from hfpatch.planner.placements import candidates, resident
from hfpatch.planner.plan import plan


# GaLore's and APOLLO's packages call what torch has retired.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"lomo"}))  # which keeps nothing
def test_states_are_those_of_the_optimizer(name, tied, monkeypatch):
    monkeypatch.setattr(planned, "RANK", 8)  # below the sides of a tiny matrix
    model = LlamaForCausalLM(tiny.config(tie_word_embeddings=tied))
    optimizers = made(name, model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()
        optimizer.step()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    values = [value for state in states for value in state.values()]
    # of a low rank, the projection
    values += [inner for value in values for inner in getattr(value, "__dict__", {}).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    found = sum(tensor.numel() for tensor in tensors if tensor.dim())  # no count of steps
    assert state_numbers(name, ModelShape.from_config(model.config)) == found


def test_a_plan_counts_them():
    shape = ModelShape.from_config(tiny.config())
    for name in OPTIMIZERS:
        for row in candidates(name, 1) if name != "adamw" else ("adamw", "adamw-fp32"):
            size = 4 if row.endswith("fp32") else 2
            stays = resident(row, shape, 1)
            assert stays.optimizer == size * state_numbers(name, shape)
            assert (stays.gradients is None) == (name != "lomo")
    names = ("schedule-free", "muon", "galore", "adafactor", "lomo")
    plans = [plan("llama-3.1-8b", seq_len=8192, placement=f"{name}-bf16") for name in names]
    sizes = [found.gpu_bytes["optimizer"] for found in plans]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_guides_bytes_a_parameter(name):
    page = (Path(__file__).parents[2] / "docs/guides/optimizers.md").read_text()
    [words] = re.findall(rf"^\| `{name}` \| [^|]* \| ([\w. ]+) \| [^|]* \|$", page, re.M)
    shape = resolve("llama-3.1-8b")[1]
    found = 2 * state_numbers(name, shape) / shape.parameters
    said = float(words.removeprefix("under "))
    assert found < said if words.startswith("under") else said == round(found, 1)


def test_command(capsys):
    line = ["plan", "--model", "llama-3.1-8b", "--seq-len", "8192"]
    assert program.main([*line, "--optimizer", "muon", "--gpu", "h200"]) == 0
    assert "(muon-fp32): fits" in capsys.readouterr().out
    for more, words in (
        (["--optimizer", "lion"], "the optimizers are adamw, muon"),
        (["--optimizer", "muon", "--placement", "gpu8bit"], "brings its optimizer"),
        (["--optimizer", "muon", "--gpus", "2"], "on one GPU"),
        (["--optimizer", "muon", "--lora-r", "8"], "adapters came"),
    ):
        assert program.main([*line, *more]) == 2
        assert words in capsys.readouterr().err
