"""Steps of what is no dense Llama: a hybrid (Qwen3.5), experts (Qwen3-30B-A3B) and float8 products;
stock, Liger and hfpatch.

python scripts/gpu/20_families.py --out $OUT
"""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
One forward and backward with random bf16 weights, parameters and gradients on the GPU, no
optimizer. hybrid: 8 layers of Qwen3.5-9B's widths, three of four a gated delta net (`kernels` says
whether fla's were there; without them transformers computes it in plain torch). experts: 4 layers of
Qwen3-30B-A3B. float8: 8 layers of Llama-3.1-8B, its products in torchao's rowwise float8, beside
bf16. Each implementation in a process of its own, one after another on the same card.
"""
COLUMNS = (
    "what impl kernels layers tokens step_s tokens_s peak_gib beyond_gib host_used_gib loss policy "
    "error"
).split()
# transformers' Qwen3_5TextConfig is Qwen3.5-9B's by default
HYBRID = {"model_type": "qwen3_5_text", "num_hidden_layers": 8}
TINY_HYBRID = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def cases(args) -> list[dict]:
    """The most informative first."""
    fla = importlib.util.find_spec("fla") is not None
    common_ = {"warmup": 1, "steps": 2, "host_gib": args.host_gib}
    hybrid = {"config": HYBRID, "tiny": TINY_HYBRID, "label": {"what": "hybrid", "kernels": fla}}
    experts = {"preset": "Qwen/Qwen3-30B-A3B", "layers": 4, "label": {"what": "experts"}}
    bf16 = {"layers": 8, "label": {"what": "bf16"}}
    float8 = bf16 | {"fp8": "rowwise", "label": {"what": "float8"}}
    asked = [
        (hybrid, "hfpatch", (8192, 32768, 131072)), (hybrid, "stock", (8192, 32768)),
        (float8, "hfpatch", (8192, 32768)), (bf16, "hfpatch", (8192, 32768)),
        (float8, "stock", (8192,)), (experts, "hfpatch", (8192, 32768)),
        (experts, "liger", (8192,)), (experts, "stock", (8192,)),
    ]  # fmt: skip
    return [
        [common_ | what | {"impl": impl, "tokens": T} for T in lengths]
        for what, impl, lengths in asked
        if args.only is None or what["label"]["what"] in args.only
    ]


def main(argv=None) -> int:
    made = common.parser("20_families", __doc__)
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    made.add_argument("--only", nargs="+", choices=("hybrid", "experts", "bf16", "float8"))
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    for together in cases(args):
        step.run_cases(sheet, step.small(sheet, together))

    def draw(axes):
        rows = [{**r, "series": f"{r['what']}, {r['impl']}"} for r in sheet.rows]
        common.speed_and_peak(axes, rows, "series")

    sheet.page("Hybrids, experts, float8", WORDS, COLUMNS, sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
