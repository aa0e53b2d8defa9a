"""gpt-oss' interleaved gate and up: loaded as whole 16 bytes, and right in several blocks."""

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from numerics import assert_close

from hfpatch.ops import experts as op
from hfpatch.ops._library import INTERPRET

triton = pytest.importorskip("triton")
PROFILES = Path(__file__).parents[2] / "profiles" / "kernels"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
NUMBERS = ("clamped", 1.702, 7.0, True)


def sass(binary, tmp_path: Path) -> str:
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, file], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_access_of_two_bytes(backward, target, monkeypatch, tmp_path):
    """16-bit gate and up at gpt-oss-20b's sizes. The routing weights, one number a row, are
    float32."""
    monkeypatch.syspath_prepend(str(PROFILES))
    import targets

    from hfpatch.kernels import experts as kernels

    S, E, F = 16384, 32, 2880
    meta = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    gu, bias, a = meta(S, 2 * F), meta(E, 2 * F), meta(S, F)
    w, ids = meta(S, dtype=torch.float32), meta(S, dtype=torch.int64)
    with targets.caught() as launches:
        if backward:
            kernels.expert_act_bwd(a, gu, w, bias, ids, *NUMBERS, True)
        else:
            kernels.expert_act(gu, w, bias, ids, *NUMBERS)
    found = sass(targets.compiled(launches[0], targets.TARGETS[target]), tmp_path)
    accesses = re.findall(r"\b((?:LDG|STG)[.\w]*)", found)
    assert len(accesses) >= 4
    assert not [access for access in accesses if "16" in access]


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
