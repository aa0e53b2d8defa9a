"""Where kernels run without a GPU: in a process where Triton interprets, and there in place of the
plain version.
"""

from pathlib import Path

import pytest
import torch

from hfpatch import ops
from hfpatch.ops._library import INTERPRET

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"


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
        y = ops.rms_norm(x, w)
        ops.swiglu(ops.rms_norm(y, w), y).sum().backward()
        ops.rope(heads, heads, angles, angles)

    norms = kernels_started(monkeypatch, "rms_norm", run)
    assert norms == (["rms_norm_fwd_kernel"] * 2 + ["rms_norm_bwd_kernel"] * 2 if kernels else [])
    assert kernels_started(monkeypatch, "swiglu", run) == (
        ["swiglu_fwd_kernel", "swiglu_bwd_kernel"] if kernels else []
    )
    assert kernels_started(monkeypatch, "rope", run) == (["rope_kernel"] if kernels else [])
