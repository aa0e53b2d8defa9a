"""A frozen base on the host beside one that stays: Llama-3.1-8B in bf16 and 4 bits, from where
copies show to 131,072 tokens.

python scripts/gpu/15_streamed.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
Adapters of rank 16 on every Linear, in bf16, no optimizer; each step runs with `weights` on the
device and on the host, and `loss` must be the same to the last digit. `copy_wait_s`: what computing
did not hide. Planned: over 26 GB/s a layer's weights hide behind its forward from some 5,000 tokens
up on an RTX 4090; a faster card needs more. The first step moves the base to the host.
"""
COLUMNS = (
    "impl base weights layers tokens step_s first_step_s tokens_s loss attention_s matmul_s "
    "copies_s copy_wait_s other_s peak_gib "
    "host_used_gib policy error"
).split()


def main(argv=None) -> int:
    made = common.parser("15_streamed", __doc__)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    made.add_argument("--bases", nargs="+", default=["bf16", "4bit"], choices=["bf16", "4bit"])
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for base in args.bases:
        cases = [
            {
                "impl": "hfpatch", "preset": args.model, "layers": args.layers, "tokens": tokens,
                "lora": args.rank, "base": base,
                "checkpointing": {"frozen_weights": weights, "plain": 0}, "warmup": 1,
                "steps": 1 if tokens > 32768 else 2,
                "split": tokens <= 32768, "host_gib": args.host_gib,
                "label": {"base": base, "weights": weights},
            }
            for tokens in args.tokens for weights in ("gpu", "host")
        ]  # fmt: skip
        step.run_cases(sheet, step.small(sheet, cases))

    def draw(axes):
        common.lines(axes[0], sheet.rows, "tokens", "step_s", "weights", title="seconds a step")

    sheet.page("A frozen base on the host", WORDS, COLUMNS, sheet.picture(draw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
