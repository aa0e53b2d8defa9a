"""A training step meets no more functions of ours than docs/internals/architecture.md says."""

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent.parent / "profiles" / "house" / "road.py"
MOST = ("--forward", "190", "--inside", "60", "--backward", "110")


def test_the_road_of_a_step_stays_short():
    """One more function is one more thing to know: merge two, or say why it earns its place. In a
    process of its own: what other tests import (torchao) lengthens the road."""
    ran = subprocess.run([sys.executable, FILE, *MOST], capture_output=True, text=True)
    assert ran.returncode == 0 and "inside " in ran.stdout, ran.stdout + ran.stderr
