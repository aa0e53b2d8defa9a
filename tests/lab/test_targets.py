"""Every kernel compiles for every target without a GPU, spills nothing, and is as profiles/kernels
says.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
TABLE = ROOT / "profiles" / "kernels" / "table.csv"
KEY = ("kernel", "variant", "dtype", "shape", "target")


def compiled(out: Path, *options: str) -> dict[tuple, dict]:
    # Another process, which has no TRITON_INTERPRET and whose compiler warnings are its own.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "profiles/kernels/targets.py", "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return rows(out)


def rows(path: Path) -> dict[tuple, dict]:
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    by_key = {tuple(line[k] for k in KEY): line for line in lines}
    assert len(by_key) == len(lines), "two rows of one name"
    return by_key


def shared_limit(target: str) -> int:
    """Bytes a program may take: sm_89 and sm_120 have the least of NVIDIA's; an MI300 has 64 KiB."""
    return (64 if target.startswith("gfx") else 99) * 1024


def spilling(lines: dict) -> list:
    """Rows that spill registers, but the norm's backward past 8,192 columns, which may."""
    return [key for key, line in lines.items() if line["stack"] != "0" and "[*,16384]" not in key]


def compare(new: dict, *, whole: bool) -> None:
    assert not spilling(new), f"registers spilled: {spilling(new)}"
    large = [key for key, line in new.items() if int(line["shared"]) > shared_limit(key[-1])]
    assert not large, f"more shared memory than fits: {large}"
    recorded = rows(TABLE)
    missing = (new.keys() ^ recorded.keys()) if whole else (new.keys() - recorded.keys())
    assert not missing, f"run `python profiles/kernels/targets.py`; rows differ: {sorted(missing)}"
    # Another compiler may give other figures; under the recorded one they are the table's.
    changed = [
        key
        for key in new
        if new[key]["triton"] == recorded[key]["triton"] and new[key] != recorded[key]
    ]
    assert not changed, (
        f"run `python profiles/kernels/targets.py` and look at the difference: {changed}"
    )


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiling is the plain run's part"
)
def test_llama_8b_rows_for_hopper(tmp_path):
    compare(compiled(tmp_path / "table.csv", "--short", "--target", "sm_90"), whole=False)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiling is the plain run's part"
)
def test_the_backward_of_swiglu_loads_all_before_it_stores(monkeypatch):
    """A load after a store waits for the arithmetic between them: the compiler may not move it
    up.
    """
    monkeypatch.syspath_prepend(str(TABLE.parent))
    import targets
    from rows import _swiglu_rows

    row = next(r for r in _swiglu_rows() if r.variant == "silu bwd" and r.dtype == "bf16")
    with targets.caught() as launches:
        row.call()
    ptx = targets.compiled(launches[0], targets.TARGETS["sm_90"]).asm["ptx"]
    assert ptx.count("ld.global") == 3 and ptx.rindex("ld.global") < ptx.index("st.global")


@pytest.mark.long
def test_every_row_for_every_target(tmp_path):
    compare(compiled(tmp_path / "table.csv"), whole=True)


def test_the_table_is_clean_and_covers_every_kernel():
    recorded = rows(TABLE)
    assert {key[-1] for key in recorded} == {
        "sm_80",
        "sm_89",
        "sm_90",
        "sm_100",
        "sm_120",
        "gfx942",
    }
    assert not spilling(recorded)
    assert all(int(line["shared"]) <= shared_limit(key[-1]) for key, line in recorded.items())
    assert all(
        int(line["num_warps"]) <= (16 if key[-1] == "gfx942" else 32)
        for key, line in recorded.items()
    )
    defined = set()
    for file in (ROOT / "hfpatch" / "kernels").glob("*.py"):
        lines = file.read_text().splitlines()
        defined |= {
            line.split("(")[0].removeprefix("def ")
            for before, line in zip(lines, lines[1:])
            if before.startswith("@triton.jit")
            and line.startswith("def ")
            and not line.startswith("def _")
        }
    assert defined == {key[0] for key in recorded}
