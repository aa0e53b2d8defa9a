"""QLoRA of Llama-3.1-8B on a small card's memory: hfpatch beside TRL's and Liger's ways, 32k and
131,072 tokens, and the longest.

python scripts/gpu/13_qlora.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
32 layers of 8B's widths, the base in 4 bits (NF4 of nf4.py: plain torch, so its time is above that
of bitsandbytes' kernels; 0.516 bytes a weight), rank 16 on every Linear, adapters in bf16, no
optimizer. `cap_gib` is all the device memory that the process may take. trl is TRL's selective
checkpointing with transformers' offload and TRL's fused head; liger its kernels with the same
offload. Each implementation goes on to the next length while one fits. From 100,000 tokens on the
step is its process's first: pinning and compiling are in it.
"""
RIVALS = {"trl": "offload", "liger": "offload"}
COLUMNS = (
    "impl kept cap_gib layers tokens fits step_s first_step_s tokens_s attention_s matmul_s "
    "copy_wait_s other_s peak_gib "
    "reserved_gib beyond_gib host_used_gib policy error"
).split()


def main(argv=None) -> int:
    made = common.parser("13_qlora", __doc__)
    made.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[32768, 131072, 327680, 450000],
        help="shortest first",
    )
    made.add_argument("--layers", type=int, default=32)
    made.add_argument(
        "--cap-gib", type=float, default=24.0, help="device memory that the process may take"
    )
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for impl in ("hfpatch", *args.rivals):
        for tokens in args.tokens:
            case = {
                "impl": impl, "layers": args.layers, "tokens": tokens,
                "checkpointing": RIVALS.get(impl, "auto"),
                "lora": args.rank, "cap_gib": args.cap_gib, "warmup": 1 if tokens < 100000 else 0,
                "steps": 1,
                "split": tokens < 100000, "host_gib": args.host_gib,
                "label": {"cap_gib": args.cap_gib, "rank": args.rank, "base": "4bit"},
            }  # fmt: skip
            rows = step.run_cases(sheet, step.small(sheet, [case]))
            for row in rows:
                row["fits"] = (
                    True if "step_s" in row else False if row["error"] == "out of memory" else None
                )
            if args.small or not rows or not rows[-1]["fits"]:
                break

    def draw(axes):
        common.lines(
            axes[0], sheet.rows, "tokens", "peak_gib", "impl", title=f"peak GiB of {args.cap_gib:g}"
        )

    sheet.page("QLoRA on a small card", WORDS, COLUMNS, sheet.picture(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
