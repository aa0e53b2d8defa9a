"""8k and 32k steps of Llama-3.1-8B: hfpatch with its checkpoints on the host and on the GPU, beside
its rivals, in one run.

python scripts/gpu/07_short_steps.py --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

WORDS = """
32 layers of 8B's widths, random bf16 weights, parameters and gradients on the GPU, no optimizer.
hfpatch keeps the layers' inputs and attention outputs in pinned host memory (host) or on the GPU
(gpu), everything else equal: `overhead` is host over gpu, less one. Liger runs with transformers'
checkpointing (plain), without (off), and with TRL's selective checkpointing and transformers'
offload (selective); trl is that with TRL's fused head in place of Liger. With --cap-gib all of them
have so much of the card: where a larger one holds everything, `auto` then has to choose. `auto` is
what a user gets who says nothing; `behind` is a rival's step over it. Targets: `behind` above 1 in
every row, overhead under 0.03.
"""
# name: (impl, checkpointing) of step.py
RIVALS = {
    "liger": ("liger", "plain"),
    "trl": ("trl", "offload"),
    "liger-off": ("liger", "off"),
    "liger-selective": ("liger", "selective"),
}
COLUMNS = (
    "impl kept layers tokens step_s forward_s backward_s tokens_s mfu overhead behind attention_s "
    "matmul_s copy_wait_s other_s "
    "other_kernels peak_gib beyond_gib host_used_gib policy error"
).split()


def main(argv=None) -> int:
    made = common.parser("07_short_steps", __doc__)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 4096, 16384])
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--steps", type=int, default=5, help="steps that are timed")
    made.add_argument("--warmup", type=int, default=2, help="steps before them")
    made.add_argument(
        "--tiers", nargs="+", default=["host", "gpu", "auto"], choices=["host", "gpu", "auto"]
    )
    made.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    made.add_argument(
        "--cap-gib", type=float, help="device memory that every step may take, as on a smaller card"
    )
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    base = {
        "layers": args.layers,
        "warmup": args.warmup,
        "steps": args.steps,
        "split": True,
        "host_gib": args.host_gib,
    }
    base["cap_gib"] = args.cap_gib
    kept = {
        tier: {"offload": tier, "every": 1, "save_attention": True, "plain": 0, "keep": []}
        for tier in ("host", "gpu")
    }
    ours = [
        {
            **base,
            "impl": "hfpatch",
            "tokens": T,
            "checkpointing": kept.get(tier, tier),
            "label": {"tier": tier},
        }
        for T in args.tokens
        for tier in args.tiers
    ]
    rows = step.run_cases(sheet, step.small(sheet, ours))
    times = {(r["tokens"], r["tier"]): r["step_s"] for r in rows if "step_s" in r}
    for row in rows:
        gpu = times.get((row["tokens"], "gpu"))
        if row["tier"] == "host" and "step_s" in row and gpu:
            row["overhead"] = row["step_s"] / gpu - 1
    for rival in args.rivals:
        impl, how = RIVALS[rival]
        cases = [
            {**base, "impl": impl, "tokens": T, "checkpointing": how, "label": {"tier": ""}}
            for T in args.tokens
        ]
        for row in step.run_cases(sheet, step.small(sheet, cases)):
            ours = times.get((row["tokens"], "auto"))
            if "step_s" in row and ours:
                row["behind"] = row["step_s"] / ours

    def draw(axes):
        for axis, T in zip(axes, dict.fromkeys(r["tokens"] for r in sheet.rows)):
            rows = [
                {**r, "what": f"{r['impl']} {r['tier'] or r['kept']}"}
                for r in sheet.rows
                if r["tokens"] == T
            ]
            common.bars(axis, rows, "what", "tokens_s", title=f"tokens a second at {T:,}")

    sheet.page(
        "Short steps: offload's overhead, and the rivals",
        WORDS,
        COLUMNS,
        sheet.picture(draw, wide=len(args.tokens)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
