"""`hfpatch bench`: compares every op with stock transformers and with this machine's limits.

The limits (yardsticks) are measured in the same run: a large copy for the ops that move memory, a
large matmul for the loss. Bytes and FLOPs are the least that the op needs (each tensor read or
written once), so the share of the yardstick shows how much is left to gain.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hfpatch import ops
from hfpatch.budget.limits import parse_length
from hfpatch.lab.presets import PRESETS, preset_config
from hfpatch.ops._library import use_kernel
from hfpatch.planner.limits import flag

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MiB = 1 << 20


class Case(NamedTuple):
    """One op at one shape.

    Attributes:
        fused, stock: hfpatch's op, and HF's formula.
        bytes: those of a forward and of a backward.
        flops: those of forward and backward together, if matmuls bound the op, else 0.
    """

    op: str
    fused: Callable
    stock: Callable
    inputs: list[torch.Tensor]
    bytes: tuple[int, int]
    flops: int = 0


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stock_rms_norm(x, weight):
    wide = _wide(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def _stock_add_rms_norm(x, residual, weight):
    total = residual + x
    return _stock_rms_norm(total, weight), total


def cases(config: dict, tokens: int, dtype: torch.dtype, device: str):
    """Yields (name, a function that makes the Case), so that tensors live only while their op is
    measured.
    """
    D, inner, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H, K, E = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    size = torch.finfo(dtype).bits // 8

    def new(*shape, grad=True):
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_(grad)

    def rms_norm():
        moved = tokens * D * size
        fused = lambda x, w: ops.rms_norm(x, w, 1e-5)  # noqa: E731
        return Case(
            "rms_norm", fused, _stock_rms_norm, [new(1, tokens, D), new(D)], (2 * moved, 3 * moved)
        )

    def add_rms_norm():
        moved = tokens * D * size
        fused = lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5)  # noqa: E731
        inputs = [new(1, tokens, D), new(1, tokens, D), new(D)]
        return Case("add_rms_norm", fused, _stock_add_rms_norm, inputs, (4 * moved, 4 * moved))

    def rope():
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        moved = 2 * tokens * (H + K) * E * size
        cos, sin = new(1, tokens, E, grad=False), new(1, tokens, E, grad=False)
        heads = lambda q, k: (q.transpose(1, 2), k.transpose(1, 2), cos, sin)  # noqa: E731
        inputs = [new(1, tokens, H, E), new(1, tokens, K, E)]
        fused, stock = (lambda q, k, f=f: f(*heads(q, k)) for f in (ops.rope, apply_rotary_pos_emb))
        return Case("rope", fused, stock, inputs, (moved, moved))

    def swiglu():
        moved = tokens * inner * size
        inputs = [new(1, tokens, inner), new(1, tokens, inner)]
        return Case(
            "swiglu", ops.swiglu, lambda g, u: F.silu(g) * u, inputs, (3 * moved, 5 * moved)
        )

    def linear_cross_entropy():
        labels = torch.randint(V, (tokens,), device=device)
        fused = lambda h, w: ops.linear_cross_entropy(h, w, labels, num_valid=tokens)  # noqa: E731
        stock = lambda h, w: F.cross_entropy(_wide(F.linear(h, w)), labels)  # noqa: E731
        return Case(
            "linear_cross_entropy",
            fused,
            stock,
            [new(tokens, D), new(V, D)],
            (0, 0),
            6 * tokens * D * V,
        )

    return [
        (make.__name__, make)
        for make in (rms_norm, add_rms_norm, rope, swiglu, linear_cross_entropy)
    ]


OPS = ("rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy")


def median_seconds(run: Callable, device: str, seconds: float) -> float:
    """The median time of run() over about `seconds`, at least 3 runs, after 2 that are not
    counted.
    """
    cuda = device.startswith("cuda")
    # Larger than any L2, so that no run reads the last run's tensors from L2.
    flush = torch.empty(256 * MiB, dtype=torch.int8, device=device) if cuda else None
    times, began = [], None
    while (
        began is None
        or len(times) < 5
        or (time.perf_counter() - began < seconds and len(times) < 1000)
    ):
        if cuda:
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        began = began or time.perf_counter()
    return statistics.median(times[2:])


def yardsticks(dtype: torch.dtype, device: str, seconds: float) -> dict[str, float]:
    """Copy bandwidth in bytes/s (read and written) and matmul rate in FLOP/s, measured now."""
    cuda = device.startswith("cuda")
    source = torch.ones((1024 if cuda else 64) * MiB, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, seconds)
    side = 8192 if cuda else 512
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return {"copy": copy, "matmul": 2 * side**3 / median_seconds(lambda: a @ b, device, seconds)}


def _directions(case: Case, function: Callable):
    """Yields (direction, a function to time): forward and backward separately, or both together if
    the forward computes the gradients.
    """

    def forward():
        out = function(*case.inputs)
        return out if isinstance(out, tuple) else (out,)

    if case.flops:
        yield "both", lambda: torch.autograd.grad(forward(), case.inputs)
        return
    yield "fwd", torch.no_grad()(forward)
    outs = forward()
    ups = [torch.randn_like(o) for o in outs]
    yield "bwd", lambda: torch.autograd.grad(outs, case.inputs, ups, retain_graph=True)


def measure(
    case: Case, tokens: int, device: str, rates: dict[str, float], seconds: float
) -> list[dict]:
    """One line a direction: milliseconds of the fused and the stock op, GB/s or TFLOP/s, the share
    of the yardstick, and extra memory.
    """
    lines = []
    stock = dict(_directions(case, case.stock))
    for i, (what, run) in enumerate(_directions(case, case.fused)):
        took, stock_took = (
            median_seconds(run, device, seconds),
            median_seconds(stock[what], device, seconds),
        )
        line = {
            "op": case.op,
            "direction": what,
            "tokens": tokens,
            "ms": took * 1e3,
            "stock_ms": stock_took * 1e3,
        }
        line["speedup"] = stock_took / took
        rate, yardstick = (
            (case.flops / took, "matmul") if case.flops else (case.bytes[i] / took, "copy")
        )
        line |= {
            "rate": rate,
            "unit": "FLOP/s" if case.flops else "B/s",
            "share": rate / rates[yardstick],
        }
        if device.startswith("cuda"):
            for key, function in (("peak_bytes", run), ("stock_peak_bytes", stock[what])):
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                function()
                line[key] = torch.cuda.max_memory_allocated(device) - before
        lines.append(line)
    return lines


def add_arguments(parser) -> None:
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--model",
        choices=PRESETS,
        default="llama-3.1-8b" if cuda else "llama-160m",
        help="whose sizes (%(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=flag(parse_length),
        nargs="+",
        default=[8192, 32768] if cuda else [512],
        metavar="N",
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPS,
        default=OPS,
        metavar="OP",
        help="some of: " + ", ".join(OPS),
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time spent on each figure (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of the table"
    )


def main(args) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "hfpatch: --device cuda needs a GPU that torch can use, none came; ask `hfpatch env` "
            "why."
        )
    dtype, config = DTYPES[args.dtype], preset_config(args.model)
    rates = yardsticks(dtype, args.device, args.seconds)
    cuda = args.device.startswith("cuda")
    head = {
        "device": torch.cuda.get_device_name(args.device) if cuda else "cpu",
        "torch": torch.__version__,
        "path": "triton"
        if use_kernel(torch.empty(1, dtype=dtype, device=args.device))
        else "plain",
        "model": args.model,
        "dtype": args.dtype,
        "copy_bytes_per_second": rates["copy"],
        "matmul_flops_per_second": rates["matmul"],
    }
    lines = []
    if not args.json:
        print(
            f"{head['device']}, torch {head['torch']}, {head['path']} path, {args.model} "
            f"{args.dtype}; ",
            end="",
        )
        print(f"copy {rates['copy'] / 1e9:,.1f} GB/s, matmul {rates['matmul'] / 1e12:,.2f} TFLOP/s")
        print(
            f"{'op':21}{'':5}{'tokens':>8}{'ms':>10}{'stock ms':>10}{'speedup':>9}{'rate':>16}{'share':>7}"
        )
    for tokens in args.tokens:
        for name, make in cases(config, tokens, dtype, args.device):
            if name in args.ops:
                for line in measure(make(), tokens, args.device, rates, args.seconds):
                    lines.append(line)
                    if not args.json:
                        print(_row(line), flush=True)
    if args.json:
        print(json.dumps(head | {"rows": lines}))
    return 0


def _row(line: dict) -> str:
    rate = (
        f"{line['rate'] / 1e9:,.1f} GB/s"
        if line["unit"] == "B/s"
        else f"{line['rate'] / 1e12:,.2f} TFLOP/s"
    )
    times = f"{line['ms']:10.3f}{line['stock_ms']:10.3f}{line['speedup']:8.2f}x"
    return f"{line['op']:21}{line['direction']:5}{line['tokens']:8}{times}{rate:>16}{line['share']:7.0%}"
