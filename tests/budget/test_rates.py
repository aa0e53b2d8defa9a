"""The step model beside steps that others measured: profiles/rates/rows.csv, and its page."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hfpatch.budget.pace import matmul_seconds, paced, slowdown
from hfpatch.budget.shape import ModelShape
from hfpatch.lab.stock import untiled

from hfpatch.budget import hardware
from hfpatch.budget.hardware import GPUS, MATMUL_SHARE, SECONDS_ERROR
from hfpatch.budget.policy import Policy
from hfpatch.lab.presets import preset_config

FOLDER = Path(__file__).parents[2] / "profiles/rates"
PAGE = (FOLDER / "README.md").read_text()
_spec = importlib.util.spec_from_file_location("rates", FOLDER / "rates.py")
rates = sys.modules["rates"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rates)
ROWS = rates.rows()


def test_the_constants_are_those_that_the_named_rows_fit():
    """Only rows marked so before may move a constant."""
    h100 = GPUS["h100"]
    ratio = h100.attention_backward / h100.attention_forward
    assert (MATMUL_SHARE, round(ratio, 2)) == rates.fitted()


def test_unseen_rows_are_within_the_error_that_plans_print():
    off = {row.row: rates.error(row) for row in ROWS if row.half == "unseen"}
    misses = sorted(name for name, error in off.items() if abs(error) > SECONDS_ERROR)
    assert len(off) == 19 and misses == [
        "automodel-gpt-oss",
        "automodel-qwen-lora",
        "llama-2024-32k",
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_the_page_has_the_row(row):
    assert rates.line(row) in PAGE
    assert (abs(rates.error(row)) > rates.MOST) == ("**miss**" in rates.line(row))


# Each bound by hand: FLOPs of full waves, weights that few rows read, blocks that rows do not fill.
def test_a_matmul_takes_the_longer_of_its_flops_and_its_bytes():
    gpu = GPUS["h100"]
    large = 2 * 16384**3 / gpu.matmul_flops
    assert large < matmul_seconds(gpu, 16384, 16384, 16384) < 1.01 * large
    read = 2 * 4096 * 14336 / gpu.memory_rate
    assert read < matmul_seconds(gpu, 16, 4096, 14336) < 1.06 * read
    half = matmul_seconds(gpu, 8192, 4096, 64) * gpu.matmul_flops / (2 * 8192 * 4096 * 64)
    assert half > 2
    assert matmul_seconds(gpu, 8192, 4096, 64, count=8) < 8 * matmul_seconds(gpu, 8192, 4096, 64)


def test_few_rows_an_expert_are_slow():
    shape = ModelShape.from_config(preset_config("Qwen/Qwen3-30B-A3B"))
    slow = [slowdown(GPUS["h100"], shape, rows) for rows in (1024, 4096, 32768)]
    assert slow[0] > 2 * slow[1] > 2 * slow[2] > 2
    sizes = {"batch": 1, "tokens": 32768}
    whole, tiled = (
        paced(GPUS["h100"], shape, policy, **sizes).matmul_flops
        for policy in (untiled(shape), Policy(tile=1024))
    )
    assert tiled < 0.5 * whole
    assert hardware.MATMUL_SHARE * 989.4e12 > whole


def test_short_rows_of_attention_are_slow():
    shape = ModelShape.from_config(preset_config("google/gemma-3-12b"))
    full = GPUS["h100"].attention_forward
    rows = [
        paced(GPUS["h100"], shape, untiled(shape), batch=1, tokens=T) for T in (512, 4096, 131072)
    ]
    forward = [gpu.attention_forward / full for gpu in rows]
    assert forward[0] < 0.6 < forward[1] < 0.9 and forward[2] > forward[1]
