"""Where Triton is not installed (macOS, Windows, plain CPU), hfpatch imports and trains on its
plain path.
"""

import os
import subprocess
import sys
from pathlib import Path

CODE = '''
import sys

class Without:
    """A finder that does not find Triton."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import tiny, torch, hfpatch
from hfpatch import ops

stock = tiny.llama()
ours = tiny.patched(stock)
tiny.assert_as_good(ours, stock, tiny.labelled())
ours.eval().generate(tiny.ids()[:, :5], max_new_tokens=3, do_sample=False)
x = torch.randn(3, 8, requires_grad=True)
ops.swiglu(x, x).sum().backward()
ops.rms_norm(x, torch.ones(8)).sum().backward()
ops.linear_cross_entropy(x, torch.randn(5, 8), torch.tensor([1, 2, -100])).backward()
assert "triton" not in sys.modules
print(hfpatch.apply(tiny.llama()))
'''


def test_trains_without_triton():
    tests = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    env.pop("TRITON_INTERPRET", None)
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "fused ops run as plain PyTorch: Triton is not installed" in out.stdout, (
        "the report says which path is in use"
    )
