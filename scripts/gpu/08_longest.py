"""The longest sequence that trains: lengths tried in turn at 32 layers or at 4, against the plan's
--max-seq-len.

python scripts/gpu/08_longest.py --layers 32 --out $OUT
python scripts/gpu/08_longest.py --layers 4 --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

import hfpatch
from hfpatch.budget.shape import ModelShape
from hfpatch.lab.presets import preset_config
from hfpatch.planner.placements import resident

WORDS = """
Each length is one forward and backward of Llama-3.1-8B's shape on the real card, without optimizer.
A whole step of 32 layers at 524,288 tokens takes a quarter of an hour, so `run` layers run and
`ballast_gib` of the card is taken away for the parameters and gradients of the others: what a layer
holds does not depend on how many there are, and `needs_host_gib` counts the checkpoints of all. The
rows at full depth run every layer. `step_s` is of a process's first step: pinning and compiling are
in it. A length fits where the step ends; `kept` says with which checkpoints.
"""
COLUMNS = (
    "layers run tokens fits plan_max kept step_s peak_gib reserved_gib beyond_gib ballast_gib "
    "needs_host_gib host_used_gib "
    "policy error"
).split()
LENGTHS = {
    32: (131072, 196608, 262144, 393216, 524288, 655360),
    4: (524288, 786432, 1048576, 1310720),
}


def host_bytes(shape: ModelShape, tokens: int, layers: int, every: int, save: bool) -> int:
    """Pinned memory of the checkpoints of all layers, bf16, one sequence."""
    inputs = tokens * shape.hidden_size * 2
    outputs = tokens * (shape.q_size * 2 + shape.num_heads * 4) if save and every == 1 else 0
    return -(-layers // every) * inputs + (layers * outputs if save and every == 1 else 0)


def kept_for(shape, tokens: int, layers: int, host: float) -> dict:
    """The most that the host holds: attention outputs too, inputs alone, or those of every second
    layer and so on.
    """
    for every, save in ((1, True), (1, False), (2, False), (4, False)):
        if host_bytes(shape, tokens, layers, every, save) <= host * common.GiB:
            break
    return {"offload": "host", "every": every, "save_attention": save, "plain": 0, "keep": []}


def main(argv=None) -> int:
    made = common.parser("08_longest", __doc__)
    made.add_argument("--layers", type=int, choices=(4, 32), default=32)
    made.add_argument(
        "--placement",
        choices=("none", "gpu8bit"),
        default="none",
        help="room for which optimizer's states",
    )
    made.add_argument(
        "--run", type=int, default=2, help="layers that really run; --layers runs all"
    )
    made.add_argument("--tokens", type=int, nargs="+", help="lengths to try, shortest first")
    made.add_argument(
        "--gpu", default="h100", help="row of the planner's table, for the plan's longest sequence"
    )
    made.add_argument("--host-gib", type=float, default=100.0, help="host memory for checkpoints")
    args = common.parse(made, argv)
    none = args.placement == "none"
    sheet = common.Sheet(args, f"08_longest_{args.layers}" + ("" if none else f"_{args.placement}"))
    config = preset_config("llama-3.1-8b") | {"num_hidden_layers": args.layers}
    shape = ModelShape.from_config(config)
    run = min(args.run, args.layers)
    # bf16 parameters and gradients of the layers that do not run, and the optimizer's states of
    # all.
    states = 0 if none else resident(args.placement, shape, 1).optimizer
    ballast = ((args.layers - run) * shape.layer_parameters * 4 + states) / common.GiB
    planned = None
    if not none:
        planned = hfpatch.plan(
            config,
            seq_len=131072,
            gpu=args.gpu,
            host_ram=f"{args.host_gib}GiB",
            placement=args.placement,
            max_seq_len=True,
        ).max_seq_len
    for tokens in args.tokens or LENGTHS[args.layers]:
        kept = kept_for(shape, tokens, args.layers, args.host_gib)
        needs = (
            host_bytes(shape, tokens, args.layers, kept["every"], kept["save_attention"])
            / common.GiB
        )
        case = {
            "impl": "hfpatch", "layers": run, "tokens": tokens, "checkpointing": kept, "warmup": 0,
            "steps": 1,
            "ballast_gib": ballast, "host_gib": args.host_gib,
            "label": {
                "layers": args.layers, "run": run, "ballast_gib": ballast, "needs_host_gib": needs,
                "plan_max": planned,
            },
        }  # fmt: skip
        rows = step.run_cases(sheet, step.small(sheet, [case]))
        for row in rows:
            # A step that was stopped by the clock says nothing about memory.
            row["fits"] = (
                True if "step_s" in row else False if row["error"] == "out of memory" else None
            )
        if not rows or not rows[-1]["fits"]:
            break
    longest = max((r["tokens"] for r in sheet.rows if r["fits"]), default=0)
    draw = lambda axes: common.lines(  # noqa: E731
        axes[0], sheet.rows, "tokens", "peak_gib", "layers", title="peak GiB by length"
    )
    sheet.page(
        f"Longest sequence at {args.layers} layers: {longest:,} tokens",
        WORDS,
        COLUMNS,
        sheet.picture(draw),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
