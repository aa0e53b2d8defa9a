"""Cross-compilation of every kernel without a GPU: `python profiles/kernels/targets.py`.

Each row (rows.py) calls a launcher with tensors on the meta device. The start of the kernel
is intercepted and compiled for each target, so the table describes exactly the arguments, tiles and
warps that a GPU gets. Registers, stack (spilled registers; 0 means none) and shared memory are read
from the compiled binary."""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from rows import NAMES, ROWS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hfpatch.kernels._launch import warps_for

# A100; L4, L40S, RTX 4090; H100, H200; B200; RTX 5090; MI300.
TARGETS = {f"sm_{sm}": GPUTarget("cuda", sm, 32) for sm in (80, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
TABLE = Path(__file__).with_name("table.csv")
COLUMNS = (
    "kernel",
    "variant",
    "dtype",
    "shape",
    "target",
    "num_warps",
    "registers",
    "stack",
    "shared",
    "triton",
)


class Launch(NamedTuple):
    """An intercepted start of a kernel, in the form that triton.compile takes."""

    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    attrs: dict[tuple[int], list]
    options: dict[str, int]


@contextmanager
def caught():
    """Intercepts kernel starts within the context. Yields the list of their Launches."""
    launches, run = [], JITFunction.run

    def catch(self, *args, grid, warmup, **kwargs):
        launches.append(_specialize(self, args, kwargs))

    JITFunction.run = catch
    try:
        yield launches
    finally:
        JITFunction.run = run


def _specialize(kernel, args, kwargs) -> Launch:
    """The types and specialisations that Triton's launcher would find: multiples of 16, ones."""
    values = dict(zip(kernel.arg_names, args)) | {
        k: v for k, v in kwargs.items() if k in kernel.arg_names
    }
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    signature, constexprs, attrs = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + NAMES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return Launch(kernel, signature, constexprs, attrs, options)


def compile_launch(launch: Launch, target: GPUTarget) -> dict[str, int]:
    """num_warps, registers and stack bytes per thread, and shared bytes per program, on one
    target."""
    binary = compiled(launch, target)
    usage = _amd_usage(binary) if target.backend == "hip" else _nvidia_usage(binary)
    return {"num_warps": binary.metadata.num_warps, **usage, "shared": binary.metadata.shared}


def compiled(launch: Launch, target: GPUTarget):
    """The kernel as Triton compiles it for target: its `asm` and `metadata`."""
    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    num_warps = warps_for(launch.options["num_warps"], target.warp_size)
    options = launch.options | {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def _nvidia_usage(binary) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}
    return {"registers": found["REG"], "stack": found["STACK"] + found["LOCAL"]}


def _amd_usage(binary) -> dict[str, int]:
    keys = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = {key: int(re.search(rf"\.{key}:\s*(\d+)", binary.asm["amdgcn"])[1]) for key in keys}
    spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    return {
        "registers": found["vgpr_count"],
        "stack": found["private_segment_fixed_size"] + 4 * spilled,
    }


def table(targets=tuple(TARGETS), *, short: bool = False) -> list[dict[str, str]]:
    """Compiles every row and returns the table's lines, all values as text.

    short: only the rows of the quick test.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("hfpatch: TRITON_INTERPRET must be unset to compile, got 1. Unset it.")
    lines = []
    for row in (row for rows in ROWS for row in rows() if row.short or not short):
        with caught() as launches:
            row.call()
        assert launches, row
        for launch in launches:
            for name in targets:
                line = dict(
                    kernel=launch.kernel.__name__,
                    variant=row.variant,
                    dtype=row.dtype,
                    shape=row.shape,
                )
                line |= {"target": name, "triton": triton.__version__} | compile_launch(
                    launch, TARGETS[name]
                )
                lines.append({column: str(line[column]) for column in COLUMNS})
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="targets.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=TABLE, help="the CSV to write")
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=tuple(TARGETS), help="what to compile for"
    )
    parser.add_argument("--short", action="store_true", help="only the rows of the quick test")
    args = parser.parse_args()
    lines = table(args.target, short=args.short)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    spilled = [line for line in lines if line["stack"] != "0"]
    print(
        f"{len(lines)} kernels for {', '.join(args.target)}, {len(spilled)} with spills -> "
        f"{args.out}"
    )
    for line in spilled:
        print("spills:", *(line[column] for column in COLUMNS), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
