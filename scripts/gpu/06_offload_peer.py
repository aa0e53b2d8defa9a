"""The strongest a user has without hfpatch: transformers' offload with Liger or under TRL, at 8k, 32k and 128k.

python scripts/gpu/06_offload_peer.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
Llama-3.1-8B's shape, 32 layers, random bf16 weights, parameters and gradients on the GPU, no optimizer: Liger's
kernels with `gradient_checkpointing_kwargs={"offload": True}` (5.23:
`activation_checkpointing_enable(offload=True)`), which copies layer inputs to pinned memory on the compute stream; and
the same under TRL's selective checkpointing, which saves attention's output, with TRL's fused head.
Where 32 layers do not fit or do not end in time, rows with 8 layers follow.
"""
COLUMNS = ("impl kept layers tokens step_s tokens_s mfu peak_gib beyond_gib host_used_gib pinned_gib error").split()


def main(argv=None) -> int:
    made = common.parser("06_offload_peer", __doc__)
    made.add_argument("--impls", nargs="+", default=["liger", "trl"], choices=["liger", "trl"])
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for impl in args.impls:
        case = {"impl": impl, "checkpointing": "offload", "layers": 32}
        if impl == "liger" and not args.cuda:
            case["impl"] = "stock"  # Liger has no CPU path, and offload nothing to copy from
            sheet.skip("liger", "no GPU for it: stock tries the code path")
        short = [{**case, "tokens": T, "warmup": 1, "steps": 2} for T in (8192, 32768)]
        step.run_cases(sheet, step.small(sheet, short))
        # A step may take minutes here: it is timed without a warm-up where the shorter ones have compiled every kernel.
        long = {**case, "tokens": 131072, "warmup": 0, "steps": 1}
        rows = step.run_cases(sheet, step.small(sheet, [long]))
        if any("step_s" not in row for row in rows):
            step.run_cases(sheet, step.small(sheet, [{**long, "layers": 8}]))
    draw = lambda axes: common.lines(axes[0], sheet.rows, "tokens", "tokens_s", "impl", title="tokens a second")  # noqa: E731
    sheet.page("Rivals with transformers' offload", WORDS, COLUMNS, sheet.picture(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
