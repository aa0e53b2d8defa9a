"""The strongest a user has without hfpatch: transformers' offload with Liger or under TRL, at 8k,
32k and 128k.

python scripts/gpu/06_offload_peer.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
Llama-3.1-8B's shape, 32 layers, random bf16 weights, parameters and gradients on the GPU, no
optimizer: Liger's kernels with `gradient_checkpointing_kwargs={"offload": True}` (5.23:
`activation_checkpointing_enable(offload=True)`), which copies layer inputs to pinned memory on the
compute stream; and the same under TRL's selective checkpointing, which saves attention's output,
with TRL's fused head (trl) or with Liger's kernels (selective). Where 32 layers do not fit or do
not end in time, rows with 8 layers follow.
"""
# name: (impl, checkpointing) of step.py
RIVALS = {
    "liger": ("liger", "offload"),
    "trl": ("trl", "offload"),
    "liger-selective": ("liger", "selective"),
}
LONG = 100_000  # tokens from which a step may take minutes
COLUMNS = (
    "impl kept layers tokens step_s first_step_s tokens_s mfu peak_gib beyond_gib host_used_gib "
    "pinned_gib error"
).split()


def main(argv=None) -> int:
    made = common.parser("06_offload_peer", __doc__)
    made.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    made.add_argument("--layers", type=int, default=32)
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for rival in args.rivals:
        impl, kept = RIVALS[rival]
        case = {"impl": impl, "checkpointing": kept, "layers": args.layers}
        if impl == "liger" and not args.cuda:
            case["impl"] = "stock"  # Liger has no CPU path, and offload nothing to copy from
            sheet.skip("liger", "no GPU for it: stock tries the code path")
        short = [{**case, "tokens": T, "warmup": 1, "steps": 2} for T in args.tokens if T < LONG]
        if short:
            step.run_cases(sheet, step.small(sheet, short))
        for T in args.tokens:
            if T < LONG:
                continue
            # All layers may take minutes a step, and are timed without a warm-up; few have time for
            # one.
            long = {**case, "tokens": T, "warmup": int(args.layers <= 8), "steps": 1}
            rows = step.run_cases(sheet, step.small(sheet, [long]))
            if args.layers > 8 and any("step_s" not in row for row in rows):
                step.run_cases(sheet, step.small(sheet, [{**long, "layers": 8, "warmup": 1}]))
    draw = lambda axes: common.lines(  # noqa: E731
        axes[0], sheet.rows, "tokens", "tokens_s", "impl", title="tokens a second"
    )
    sheet.page("Rivals with transformers' offload", WORDS, COLUMNS, sheet.picture(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
