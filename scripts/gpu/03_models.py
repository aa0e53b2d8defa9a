"""Llama-3.1-8B's shape at 4k, 8k and 32k tokens: tokens/s and peak memory, stock, Liger and hfpatch
in one run.

python scripts/gpu/03_models.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
One forward and backward of a Llama of 8B's widths with random bf16 weights, parameters and
gradients on the GPU, no optimizer. Stock and Liger with transformers' own checkpointing. Each
implementation in a process of its own, one after another on the same card. `beyond_gib` is what is
alive beyond parameters and gradients at the moment of the highest total. A row that says out of
memory did not fit with 32 layers; the rows with 8 layers compare what all can run.
"""
COLUMNS = (
    "impl layers tokens step_s tokens_s mfu peak_gib reserved_gib beyond_gib host_used_gib "
    "pinned_gib loss policy error"
).split()


def main(argv=None) -> int:
    made = common.parser("03_models", __doc__)
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for impl in ("hfpatch", "liger", "stock"):
        for layers, lengths in ((32, (4096, 8192, 32768)), (8, (32768,))):
            cases = [
                {
                    "impl": impl,
                    "layers": layers,
                    "tokens": T,
                    "warmup": 2,
                    "steps": 3,
                    "host_gib": args.host_gib,
                }
                for T in lengths
            ]
            step.run_cases(sheet, step.small(sheet, cases))

    def draw(axes):
        rows = [{**r, "what": f"{r['impl']}, {r['layers']} layers"} for r in sheet.rows]
        common.speed_and_peak(axes, rows, "what")

    sheet.page("Whole models: stock, Liger, hfpatch", WORDS, COLUMNS, sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
