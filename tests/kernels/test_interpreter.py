"""The kernels themselves, without a GPU: the ops' own tests once more, in a process where Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
# Triton reads the variable when a kernel is defined, so this process, where kernels are compiled, cannot change over.
FILES = ("test_rms_norm.py", "test_rope.py", "test_swiglu.py")


@pytest.mark.parametrize("file", FILES)
def test_the_ops_tests_pass_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/ops/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "error" not in done.stdout
