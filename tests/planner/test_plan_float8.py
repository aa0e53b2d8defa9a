"""`hfpatch plan --fp8`: products faster, casts that take memory, and what is refused."""

import pytest

from hfpatch.budget.hardware import FLOAT8_SPEED
from hfpatch.cli import main as program
from hfpatch.planner.plan import plan

ASKED = {"seq_len": 8192, "gpu": "h100", "placement": "gpu8bit", "checkpointing": "gpu,every=1"}


def test_products_are_faster_and_casts_take_memory():
    plain, float8 = (plan("llama-3.1-8b", **ASKED, fp8=fp8) for fp8 in (False, True))
    assert plain.seconds["matmul"] / float8.seconds["matmul"] == pytest.approx(FLOAT8_SPEED, 1e-6)
    assert plain.seconds["attention"] == float8.seconds["attention"]
    # down_proj's input: 8,192 x 14,336 numbers, twice in float32, and both operands in float8
    more = float8.gpu_bytes["parameters"] - plain.gpu_bytes["parameters"]
    assert more == (8 + 1) * 8192 * 14336 + 14336 * 4096
    assert float8.mfu > plain.mfu and "torchtitan" in float8.why and "torchtitan" not in plain.why


def test_command(capsys):
    line = ["plan", "--model", "llama-3.1-8b", "--seq-len", "8192", "--fp8"]
    assert program.main(line) == 0
    assert "were compiled; not measured here" in " ".join(capsys.readouterr().out.split())
    for more, words in (
        (["--gpu", "a100"], "a GPU that multiplies in float8, a100-80gb came"),
        (["--lora-r", "8"], "all weights of a model"),
    ):
        assert program.main([*line, *more]) == 2
        assert words in capsys.readouterr().err
