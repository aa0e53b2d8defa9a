"""The planner beside steps that others measured: profiles/rates/rows.csv, and its page."""

import importlib.util
import sys
from pathlib import Path

import pytest
from tiny import LONG

from hfpatch.lab.hardware import GPUS, MATMUL_SHARE, SECONDS_ERROR
from hfpatch.lab.rates import attention_ramp

FOLDER = Path(__file__).parents[2] / "profiles/rates"
PAGE = (FOLDER / "README.md").read_text()
_spec = importlib.util.spec_from_file_location("rates", FOLDER / "rates.py")
rates = sys.modules["rates"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rates)
ROWS = rates.rows()
FEW = ("automodel-llama-lora",)


@LONG
def test_the_constants_are_those_that_the_named_rows_fit():
    """Only rows marked so before may move a constant."""
    h100 = GPUS["h100"]
    ratio = h100.attention_backward / h100.attention_forward
    assert (MATMUL_SHARE, round(ratio, 2)) == rates.fitted()


def test_unseen_rows_are_within_the_error_that_plans_print():
    lines = (line.split("|")[1:6] for line in PAGE.splitlines() if line.startswith("| unseen |"))
    off = {row.strip(): float(error.split("%")[0]) / 100 for _, row, _, _, error in lines}
    misses = sorted(name for name, error in off.items() if abs(error) > SECONDS_ERROR)
    assert len(off) == 19 and misses == MISSES


MISSES = ["automodel-30b-a3b-pretraining", "automodel-gpt-oss", "llama-2024-32k"]


@pytest.mark.parametrize(
    "row", [r if r.row in FEW else pytest.param(r, marks=LONG) for r in ROWS], ids=lambda r: r.row
)
def test_the_page_has_the_row(row):
    assert rates.line(row) in PAGE
    assert (abs(rates.error(row)) > rates.MOST) == ("**miss**" in rates.line(row))


def test_short_rows_of_attention_are_slow():
    assert attention_ramp(512) > 1.6 > attention_ramp(4096) > 1.1 > attention_ramp(131072)
