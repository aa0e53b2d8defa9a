"""A training step meets no more functions of ours than the limits below."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

FILE = Path(__file__).parent.parent / "profiles" / "house" / "road.py"


# Every layer runs by its own forward: a Llama's road is that of all other families.
LLAMA = ("llama", 281, 144, 181)


@pytest.mark.parametrize(
    "model, forward, inside, backward", tiny.longer([LLAMA, ("moe-lora", 283, 137, 182)], LLAMA)
)
def test_the_road_of_a_step_stays_short(model, forward, inside, backward):
    """One more function is one more thing to know: merge two, or say why it earns its place. In a
    process of its own: what other tests import (torchao) lengthens the road."""
    most = ["--forward", forward, "--inside", inside, "--backward", backward]
    command = [sys.executable, FILE, "--model", model, *map(str, most)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0 and "inside " in ran.stdout, ran.stdout + ran.stderr
