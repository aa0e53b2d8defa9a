"""A training step meets no more functions of ours than docs/internals/architecture.md says."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny

FILE = Path(__file__).parent.parent / "profiles" / "house" / "road.py"


# In 2026-11 the road grew by 10 functions: what is decided of a batch, and a layer's two passes, are
# numbered steps; one rule says which op runs its kernel; a loss may read padding.
LLAMA = ("llama", 251, 107, 158)


@pytest.mark.parametrize(
    "model, forward, inside, backward", tiny.longer([LLAMA, ("moe-lora", 254, 102, 164)], LLAMA)
)
def test_the_road_of_a_step_stays_short(model, forward, inside, backward):
    """One more function is one more thing to know: merge two, or say why it earns its place. In a
    process of its own: what other tests import (torchao) lengthens the road."""
    most = ["--forward", forward, "--inside", inside, "--backward", backward]
    command = [sys.executable, FILE, "--model", model, *map(str, most)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0 and "inside " in ran.stdout, ran.stdout + ran.stderr
