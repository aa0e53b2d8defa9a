"""`hfpatch bench`: compares every op with stock transformers and with this machine's limits.

The limits (yardsticks) are measured in the same run: a large copy for the ops that move memory, a
large matmul for the loss. Bytes and FLOPs are the least that the op needs (each tensor read or
written once), so the share of the yardstick shows how much is left to gain.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hfpatch import ops
from hfpatch.budget.limits import parse_length
from hfpatch.lab import elementwise
from hfpatch.lab.device import copy_rate, matmul_rate, peak_bytes, timed
from hfpatch.lab.float64 import plain_loss
from hfpatch.lab.presets import PRESETS, preset_config
from hfpatch.ops._library import use_kernel
from hfpatch.planner.limits import flag

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSS = "linear_cross_entropy"
OPS = (*elementwise.OPS, LOSS)
MiB = 1 << 20


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        fused, stock: hfpatch's op, and HF's formula: a tuple of outputs of inputs and fixed.
        inputs, fixed: tensors with a gradient, and without.
        bytes: those of a forward and of a backward.
        flops: those of forward and backward together, if matmuls bound the op, else 0.
    """

    fused: Callable
    stock: Callable
    inputs: list[torch.Tensor]
    fixed: list[torch.Tensor]
    bytes: tuple[int, int] = (0, 0)
    flops: int = 0

    def ways(self, function: Callable) -> Iterator[tuple[str, Callable]]:
        """Yields (direction, a function to time): forward and backward separately, or both together
        if the forward computes the gradients.
        """

        def forward():
            return function(*self.inputs, *self.fixed)

        if self.flops:
            yield "both", lambda: torch.autograd.grad(forward(), self.inputs)
            return
        yield "fwd", torch.no_grad()(forward)
        outs = forward()
        ups = [torch.randn_like(o) for o in outs]
        yield "bwd", lambda: torch.autograd.grad(outs, self.inputs, ups, retain_graph=True)


def case(name: str, config: dict, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The op of that name at a model's widths."""
    widths = elementwise.Widths(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
    )
    if name == LOSS:
        sizes = (tokens, widths.hidden), (widths.vocab, widths.hidden)
        inputs = [torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in sizes]
        labels = torch.randint(widths.vocab, (tokens,), device=device)
        return Case(
            fused=lambda h, w, y: (ops.linear_cross_entropy(h, w, y, num_valid=tokens),),
            stock=lambda h, w, y: (plain_loss(h, w, y) / tokens,),
            inputs=inputs,
            fixed=[labels],
            flops=6 * tokens * widths.hidden * widths.vocab,
        )
    op = elementwise.OPS[name]
    rows, shared, fixed = op.make(tokens, widths, dtype, device, seed=0)
    moved = (tokens * dtype.itemsize * n(widths) for n in (op.fwd_elements, op.bwd_elements))
    inputs = [x.requires_grad_() for x in (*rows, *shared)]
    return Case(op.ours, op.plain, inputs, fixed, tuple(moved))


def milliseconds(run: Callable, device: torch.device, seconds: float) -> float:
    """The median time of run() over about `seconds`."""
    # Larger than any L2, so that no run reads the last run's tensors from L2.
    nbytes = 256 * MiB if device.type == "cuda" else 0
    flush = torch.empty(nbytes, dtype=torch.int8, device=device)

    def stages(i, mark):
        flush.zero_()
        mark()
        run()
        mark()

    return timed(stages, budget_ms=1e3 * seconds, least=3, most=1000)[1]


def yardsticks(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Copy bandwidth in bytes/s (read and written) and matmul rate in FLOP/s, measured now."""
    cuda = device.type == "cuda"
    copied, side = (1024, 8192) if cuda else (64, 512)
    return {
        "copy": copy_rate(device, small=False, nbytes=copied * MiB),
        "matmul": matmul_rate(device, False, dtype, side, side, side),
    }


def measure(
    name: str, made: Case, tokens: int, device: torch.device, rates: dict, seconds: float
) -> list[dict]:
    """One line a direction: milliseconds of the fused and the stock op, GB/s or TFLOP/s, the share
    of the yardstick, and extra memory.
    """
    lines = []
    stock = dict(made.ways(made.stock))
    for i, (what, run) in enumerate(made.ways(made.fused)):
        took, stock_took = (milliseconds(f, device, seconds) for f in (run, stock[what]))
        amount, yardstick = (made.flops, "matmul") if made.flops else (made.bytes[i], "copy")
        rate = amount / (took / 1e3)
        line = {
            "op": name, "direction": what, "tokens": tokens, "ms": took, "stock_ms": stock_took,
            "speedup": stock_took / took, "rate": rate,
            "unit": "FLOP/s" if made.flops else "B/s", "share": rate / rates[yardstick],
        }  # fmt: skip
        if device.type == "cuda":
            held = peak_bytes(run), peak_bytes(stock[what])
            line |= dict(zip(("peak_bytes", "stock_peak_bytes"), held))
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
    device = torch.device(args.device)
    rates = yardsticks(dtype, device)
    head = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
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
        for name in OPS:
            if name in args.ops:
                made = case(name, config, tokens, dtype, device)
                for line in measure(name, made, tokens, device, rates, args.seconds):
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
