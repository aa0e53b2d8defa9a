"""gpt-oss' interleaved gate and up: loaded as whole 16 bytes, and right in several blocks."""

import re
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
from numerics import assert_close

from hfpatch.ops import experts as op
from hfpatch.ops._library import INTERPRET

triton = pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", tiny.longer(["sm_80", "sm_90", "sm_100"], "sm_90"))
@pytest.mark.parametrize("kind", [("silu", 0.0, 0.0, False), NUMBERS], ids=["silu", "clamped"])
def test_no_access_is_of_16_bits(kind, target, tmp_path, monkeypatch):
    """In the machine code; the routing weights have the dtype that the op hands to the kernels."""
    monkeypatch.syspath_prepend(str(ROOT / "profiles" / "kernels"))
    from targets import TARGETS, caught, compiled

    from hfpatch.kernels import experts as kernels

    S, E, F, seen = 64, 2, 96, []
    monkeypatch.setattr(op, "EXPERT_ACT", lambda gu, w, *_: seen.append(w) or gu[:, ::2])
    x, ids = torch.randn(S, 16, dtype=torch.bfloat16), torch.zeros(S, 1, dtype=torch.int64)
    weights = x.new_ones(S, 1), x.new_ones(E, 2 * F, 16), x.new_ones(E, 16, F)
    op.experts(x, ids, *weights, layout=op.Layout("silu"))

    gu, da, bias = (
        torch.empty(*n, F, dtype=x.dtype, device="meta") for n in ((S, 2), (S,), (E, 2))
    )
    given = gu.flatten(1), seen[0].to("meta"), bias.flatten(1), ids[:, 0].to("meta"), *kind
    with caught() as launches:
        kernels.expert_act(da, *given)
        kernels.expert_act_bwd((given[0], da, given[1]), da, *given, True)
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for launch in launches:
        file = tmp_path / "kernel.cubin"
        file.write_bytes(compiled(launch, TARGETS[target]).asm["cubin"])
        code = subprocess.run([nvdisasm, file], capture_output=True, text=True, check=True).stdout
        assert "LDG" in code and "STG" in code
        assert not [line for line in code.splitlines() if re.search(r"(LDG|STG)\S*\.[SU]16", line)]
