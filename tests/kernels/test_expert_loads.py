"""gpt-oss' interleaved gate and up: loaded as whole 16 bytes, and right in several blocks."""

import pytest
import torch
from numerics import assert_close

from hfpatch.ops import experts as op
from hfpatch.ops._library import INTERPRET

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
NUMBERS = ("clamped", 1.702, 7.0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_blocks_of_columns(dtype):
    """1,032 pairs are two blocks and 8 columns; the last rows' expert is another rank's."""
    S, E, F = 7, 3, 1032
    g = torch.Generator().manual_seed(0)
    shapes = (S, 2 * F), (S,), (E, 2 * F), (S, F)
    gu, w, bias, da = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    gu *= 4  # reaches the clamps
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 3])

    def run(dtype, device):
        args = [x.to(device, dtype) for x in (gu, w, bias)]
        args += [ids.to(device), *NUMBERS]
        a = op.EXPERT_ACT(*args)
        dgu, again, dw = op.EXPERT_ACT_BACK(da.to(device, dtype), *args, True)
        return {"a": a, "a in backward": again, "dgu": dgu, "dw": dw.to(dtype)}

    got, exact = run(dtype, DEVICE), run(torch.float64, "cpu")
    for name in got:
        assert_close(got[name].cpu(), exact[name].to(dtype), exact[name], name)
