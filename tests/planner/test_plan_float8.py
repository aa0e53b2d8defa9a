"""`hfpatch plan --fp8`: products faster, casts that take memory, and what is refused."""

from dataclasses import fields

import pytest

from hfpatch.cli import main as program
from hfpatch.planner.float8 import RECIPES
from hfpatch.planner.plan import plan
from hfpatch.trainer.flags import ModelArguments

ASKED = {"seq_len": 8192, "gpu": "h100", "placement": "gpu8bit", "checkpointing": "gpu,every=1"}


def test_products_are_faster_and_casts_take_memory():
    plain, float8 = (plan("llama-3.2-1b", **ASKED, fp8=fp8) for fp8 in (None, "rowwise"))
    assert plain.time.parts["matmul"] / float8.time.parts["matmul"] == pytest.approx(
        8532 / 6667, 2e-2
    )
    assert plain.time.parts["attention"] == float8.time.parts["attention"]
    # down_proj's input: 8,192 x 8,192 numbers, twice in float32, and both operands in float8
    more = float8.gpu.parts["parameters"] - plain.gpu.parts["parameters"]
    assert more == (8 + 1) * 8192 * 8192 + 8192 * 2048
    assert (
        float8.time.mfu > plain.time.mfu
        and "torchtitan" in float8.advice.why
        and "torchtitan" not in plain.advice.why
    )
    # of three products of a Linear the weight gradient's stays in bf16
    high = plan("llama-3.2-1b", **ASKED, fp8="rowwise_with_gw_hp").time.parts["matmul"]
    assert high == pytest.approx(
        (plain.time.parts["matmul"] + 2 * float8.time.parts["matmul"]) / 3, rel=1e-2
    )


def test_command(capsys):
    """Its recipes are those of train, which runs without an engine."""
    flag = {f.name: f for f in fields(ModelArguments)}["fp8"]
    assert flag.metadata["choices"] == list(RECIPES)
    line = ["plan", "--model", "llama-3.2-1b", "--seq-len", "8192", "--fp8"]
    assert program.main(line) == 0
    assert "were compiled; not measured here" in " ".join(capsys.readouterr().out.split())
    for more, words in (
        (["--gpu", "a100"], "a GPU that multiplies in float8"),
        (["--lora-r", "8"], "planned for all weights"),
        (["--gpus", "2"], "without an engine"),
        (["--placement", "zero3-offload"], "without an engine"),
        (["--fp8", "tensorwise"], "rowwise_with_gw_hp"),
    ):
        assert program.main([*line, *more]) == 2
        assert words in capsys.readouterr().err
