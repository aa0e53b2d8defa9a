"""Where kernels run without a GPU: in a process where Triton interprets, and there in place of the
plain version.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfpatch import ops
from hfpatch.ops._library import INTERPRET

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"


@pytest.mark.long
@pytest.mark.skipif(INTERPRET, reason="this is the process in which everything is interpreted")
def test_a_part_of_the_ops_tests_pass_in_the_interpreter():
    # scripts/test.sh runs all of them so; this part is for whoever runs pytest alone. Triton reads
    # the variable when a kernel is defined, so a process in which kernels are compiled cannot
    # change over.
    chosen = "(test_values_and_gradients and (shape1 or shape2)) or test_layouts or (every_gradient and spread) or by_expert"
    files = [f"tests/ops/test_{op}.py" for op in ("rms_norm", "rope", "swiglu", "experts")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:]


def kernels_started(monkeypatch, module, function):
    """The names of the kernels of hfpatch.kernels.<module> that function() starts."""
    file, started = pytest.importorskip(f"hfpatch.kernels.{module}"), []
    launch = file.launch
    monkeypatch.setattr(
        file, "launch", lambda k, *a, **kw: (started.append(k.fn.__name__), launch(k, *a, **kw))
    )
    function()
    return started


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_which_version_runs(monkeypatch, dtype):
    kernels = (INTERPRET or DEVICE == "cuda") and dtype != torch.float64
    x, w = (
        torch.randn(3, 64, dtype=dtype, device=DEVICE).requires_grad_(),
        torch.randn(64, dtype=dtype, device=DEVICE),
    )
    heads, angles = (
        torch.randn(1, 2, 3, 64, dtype=dtype, device=DEVICE),
        torch.randn(1, 3, 64, dtype=dtype, device=DEVICE),
    )

    def run():
        y, total = ops.add_rms_norm(ops.rms_norm(x, w), x, w)
        (ops.swiglu(y, total)).sum().backward()
        ops.rope(heads, heads, angles, angles)

    norms = kernels_started(monkeypatch, "rms_norm", run)
    assert norms == (["rms_norm_fwd_kernel"] * 2 + ["rms_norm_bwd_kernel"] * 2 if kernels else [])
    assert kernels_started(monkeypatch, "swiglu", run) == (
        ["swiglu_fwd_kernel", "swiglu_bwd_kernel"] if kernels else []
    )
    assert kernels_started(monkeypatch, "rope", run) == (["rope_kernel"] if kernels else [])


def test_the_ops_work_where_triton_is_not_installed():
    code = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from hfpatch import ops
from hfpatch.ops._library import HAS_TRITON
x = torch.randn(3, 8, requires_grad=True)
y, total = ops.add_rms_norm(x, x, torch.ones(8))
ops.swiglu(y, total).sum().backward()
q, k = ops.rope(torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.ones(1, 3, 8), torch.ones(1, 3, 8))
assert not HAS_TRITON and x.grad.isfinite().all() and not any(m.startswith("hfpatch.kernels.") for m in sys.modules)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
