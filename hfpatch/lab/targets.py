"""Cross-compilation of every kernel without a GPU: `python -m hfpatch.lab.targets`.

Each row calls a launcher with tensors on the meta device, at a real shape. The start of the kernel
is intercepted and compiled for each target, so the table describes exactly the arguments, tiles and
warps that a GPU gets. Registers, stack (spilled registers; 0 means none) and shared memory are read
from the compiled binary. A new kernel adds its rows to ROWS.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hfpatch.kernels import cross_entropy, experts, rms_norm, rope, swiglu
from hfpatch.kernels._launch import warps_for

# A100; L4, L40S, RTX 4090; H100, H200; B200; RTX 5090; MI300.
TARGETS = {f"sm_{sm}": GPUTarget("cuda", sm, 32) for sm in (80, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
TABLE = Path(__file__).parents[2] / "profiles" / "kernels" / "table.csv"
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

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
}
NAMES |= {torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64


class Row(NamedTuple):
    """One compilation.

    call: a launcher with its arguments. variant, shape: labels for the table.
    """

    variant: str
    dtype: str
    shape: str
    call: Callable[[], object]
    short: bool = False  # also in the quick test


class Launch(NamedTuple):
    """An intercepted start of a kernel, in the form that triton.compile takes."""

    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    attrs: dict[tuple[int], list]
    options: dict[str, int]


def meta(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What families do: (name, weight, offset, rstd rounded, x_hat rounded), as ops/rms_norm.py has it.
NORMS = (
    ("", True, 0.0, False, True),
    (" gemma", True, 1.0, False, False),
    (" olmo2", True, 0.0, False, False),
    (" no weight", False, 0.0, True, True),
)


def _rms_norm_rows():
    # Hidden sizes of Llama 3.2 1B and 3B, 8B, Llama 2 13B, 70B, 405B; 128 is a norm over one head
    # (Qwen3).
    for D in (128, 2048, 3072, 4096, 5120, 8192, 16384):
        for x_dtype, w_dtype in ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)):
            if D != 4096 and x_dtype != BF16:
                continue
            x, w, rstd = (
                meta(8192, D, dtype=x_dtype),
                meta(D, dtype=w_dtype),
                meta(8192, dtype=FP32),
            )
            label, short = NAMES[x_dtype], D == 4096 and x_dtype is w_dtype is BF16
            if x_dtype != w_dtype:
                label += "+" + NAMES[w_dtype]
            for order, has_weight, offset, round_rstd, round_x_hat in (
                NORMS if D == 4096 else NORMS[:1]
            ):
                if order in (" olmo2", " no weight") and not short:
                    continue
                y_dtype = torch.promote_types(x_dtype, w_dtype) if round_x_hat else x_dtype
                dy, weight = meta(8192, D, dtype=y_dtype), w if has_weight else None
                options = offset, round_rstd, x_dtype if round_x_hat else FP32, y_dtype
                for residual in (None, x):
                    name = ("rms_norm" if residual is None else "add_rms_norm") + order
                    yield Row(
                        f"{name} fwd",
                        label,
                        f"[*,{D}]",
                        lambda x=x, r=residual, w=weight, o=options: rms_norm.rms_norm_fwd(
                            x, r, w, 1e-6, *o
                        ),
                        short,
                    )
                    yield Row(
                        f"{name} bwd",
                        label,
                        f"[*,{D}]",
                        lambda dy=dy, s=residual, x=x, w=weight, r=rstd, o=offset: (
                            rms_norm.rms_norm_bwd(dy, s, x, w, r, o, True, w is not None)
                        ),
                        short,
                    )


def _swiglu_rows():
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        for dtype in (BF16, FP16, FP32):
            whole, both = meta(8192, 14336, dtype=dtype), meta(8192, 28672, dtype=dtype)
            for layout, gate, up in (("", whole, whole), (" halves", *both.chunk(2, -1))):
                shape, short = f"[*,14336]{layout}", dtype == BF16 and activation == "silu"
                yield Row(
                    f"{activation} fwd",
                    NAMES[dtype],
                    shape,
                    lambda g=gate, u=up, a=activation, d=dtype: swiglu.swiglu_fwd(g, u, a, d),
                    short,
                )
                yield Row(
                    f"{activation} bwd",
                    NAMES[dtype],
                    shape,
                    lambda y=whole, g=gate, u=up, a=activation: swiglu.swiglu_bwd(
                        y, g, u, a, True, True
                    ),
                    short,
                )


def _experts_rows():
    # Qwen3-30B-A3B's experts and gpt-oss-20b's, 4,096 tokens.
    for name, E, K, D, F, bias in (("silu", 128, 8, 2048, 768, False),
                                   ("clamped", 32, 4, 2880, 2880, True)):  # fmt: skip
        for dtype in (BF16, FP32):
            S, short, label = 4096 * K, dtype == BF16, NAMES[dtype]
            gu, a, z = (meta(S, n, dtype=dtype) for n in (2 * F, F, D))
            ids, at, offs = meta(S, dtype=I64), meta(4096, K, dtype=I64), meta(E, dtype=I32)
            b, w = meta(E, 2 * F, dtype=dtype) if bias else None, meta(S, dtype=dtype)
            kind, out = (name, 1.702, 7.0, bias), meta(E, D, F, dtype=FP32)
            calls = {
                "act": partial(experts.expert_act, gu, w, b, ids, *kind),
                "act bwd": partial(experts.expert_act_bwd, a, gu, w, b, ids, *kind, True),
                "combine": partial(experts.expert_combine, z, at),
                "sums": partial(experts.expert_sums, out, z, a, offs, False),
            }
            for part, call in calls.items():
                yield Row(f"experts {name} {part}", label, f"[{S},{F}]", call, short)


def _rope_rows():
    # Heads of 8B, 70B, 405B (128) and of Llama 3.2 1B (64); a projection's view [B, T, H, E] and a
    # contiguous q.
    for heads, kv_heads, width in ((32, 8, 128), (64, 8, 128), (128, 8, 128), (32, 8, 64)):
        for dtype in (BF16, FP16, FP32) if heads == 32 and width == 128 else (BF16,):
            cos = meta(1, 8192, width, dtype=dtype)
            for layout in ("BTHE", "BHTE"):
                if layout == "BTHE":
                    qk = [
                        meta(1, 8192, h, width, dtype=dtype).transpose(1, 2)
                        for h in (heads, kv_heads)
                    ]
                else:
                    qk = [meta(1, h, 8192, width, dtype=dtype) for h in (heads, kv_heads)]
                for transpose in (False, True):
                    yield Row(
                        "rope bwd" if transpose else "rope fwd",
                        NAMES[dtype],
                        f"{heads}+{kv_heads} x {width} {layout}",
                        lambda qk=qk, c=cos, t=transpose: rope.rope(qk, qk, c, c, t),
                        dtype == BF16 and heads == 32 and width == 128,
                    )


def _cross_entropy_rows():
    # Vocabularies of Llama 3 and Llama 2. Each kind: its name, (inner, outer), smoothing, z-loss,
    # factors of the backward.
    cap = (1 / 30.0, 30.0)
    kinds = (
        ("", (0.0, 1.0), 0.0, 0.0, 3),
        (" smoothing softcap z", cap, 0.1, 1e-4, 4),
        (" weights", cap, 0.1, 1e-4, 4),
    )
    fwd, bwd = cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd
    for V in (128256, 32000):
        for dtype in (BF16, FP16, FP32):
            x, y, scalar = (
                meta(4096, V, dtype=dtype),
                meta(4096, dtype=torch.int64),
                meta(dtype=FP32),
            )
            row, lse, stats, best = (
                meta(4096, dtype=FP32),
                meta(2, 4096, dtype=FP32),
                meta(3, 4096, dtype=FP32),
                meta(4096, dtype=torch.int32),
            )
            name, shape, short = NAMES[dtype], f"V={V}", dtype == BF16 and V == 128256
            for kind, z, smoothing, z_loss, K in kinds:
                b, weight = (
                    best if kind else None,
                    meta(V, dtype=FP32) if kind == " weights" else None,
                )
                for grad in (True, False):
                    call = partial(
                        fwd,
                        x,
                        y,
                        scalar,
                        weight,
                        row,
                        lse,
                        b,
                        None,
                        -100,
                        smoothing,
                        *z,
                        z_loss,
                        grad,
                    )
                    yield Row(
                        f"{'loss+grad' if grad else 'loss'}{kind}",
                        name,
                        shape,
                        call,
                        short and grad,
                    )
                call = partial(bwd, x, x, y, meta(K, 4096, dtype=FP32), weight, -100, *z)
                yield Row(f"loss bwd{kind}", name, shape, call, short)
            for kind, z in (("", (0.0, 1.0)), (" softcap", cap)):
                call = partial(
                    fwd, x, y, scalar, None, row, lse, best, stats, -100, 0.0, *z, 0.0, False
                )
                yield Row(f"log prob{kind}", name, shape, call, short)
                call = partial(bwd, x, x, y, meta(7, 4096, dtype=FP32), None, -100, *z)
                yield Row(f"log prob bwd{kind}", name, shape, call, short)
    for dtype in (BF16, FP16, FP32):
        yield Row(
            "scale",
            NAMES[dtype],
            "[128256,4096]",
            lambda d=dtype: cross_entropy.scale_(meta(128256, 4096, dtype=d), meta(dtype=FP32)),
        )


ROWS = (_rms_norm_rows, _swiglu_rows, _experts_rows, _rope_rows, _cross_entropy_rows)


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
        raise ValueError(
            "hfpatch: compiling needs a process without TRITON_INTERPRET, came 1; unset it."
        )
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
    parser = argparse.ArgumentParser(
        prog="python -m hfpatch.lab.targets", description=__doc__.split("\n")[0]
    )
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
