"""The 131,072-token step of Llama-3.1-8B, all 32 layers on one GPU: seconds, MFU, memory, the
split, and the floor.

python scripts/gpu/05_step_128k.py --out $OUT
python scripts/gpu/05_step_128k.py --model Qwen/Qwen3-8B --layers 36 24 16 --out $OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step

from hfpatch.lab.presets import preset_config

WORDS = """
bf16 parameters and gradients resident, random weights and tokens, no optimizer; inputs and
attention outputs of the layers in pinned host memory. `floor_s`: the step's FLOPs (attention
forward once, each layer's matmuls forward twice and backward once) at the rates of the layer's own
matmuls and of attention, forward in one launch and backward per KV group, measured on this card
just before; `floor_cube_s` takes an 8192-cube for the matmuls. `ratio` is step over floor. The
split is of a recorded step, where there was time for one; `other` is what no attention or matmul
kernel nor a wait for copies covers. `beyond_gib`: alive beyond parameters and gradients when the
total is highest. MFU counts the model's own causal FLOPs against the data sheet. Where the model's
layers do not all fit, fewer run and the row says scaled: `step_whole_s` is then the step at its
depth by the layers' own time. Targets of Llama-3.1-8B: ratio 1.12, 6.0 GiB beyond; under 50 s on an
H100 where cuDNN or FA3 serves both directions.
"""
COLUMNS = (
    "preset impl layers tokens scaled step_s step_whole_s tokens_s mfu floor_s ratio floor_cube_s "
    "attention_backend "
    "attention_fwd_tflop_s attention_bwd_tflop_s gemm_tflop_s attention_s matmul_s copy_wait_s "
    "other_s beyond_gib "
    "peak_gib reserved_gib host_used_gib pinned_gib policy error"
).split()


def main(argv=None) -> int:
    made = common.parser("05_step_128k", __doc__)
    made.add_argument(
        "--model", default="llama-3.1-8b", help="a name that `hfpatch plan --model` knows"
    )
    made.add_argument("--tokens", type=int, default=131072)
    made.add_argument(
        "--layers", type=int, nargs="+", default=[32, 24, 16], help="tried in turn until one fits"
    )
    made.add_argument("--steps", type=int, default=2, help="steps that are timed")
    made.add_argument("--tile", type=int, help="tokens a tile; the engine's own choice without it")
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    kept = {"offload": "host", "every": 1, "save_attention": True, "plain": 0, "keep": []} | (
        {"tile": args.tile} if args.tile else {}
    )
    depth = preset_config(args.model)["num_hidden_layers"]
    for layers in args.layers:
        case = {
            "impl": "hfpatch", "layers": layers, "tokens": args.tokens, "checkpointing": kept,
            "warmup": 1,
            "steps": args.steps, "split": True, "floor": True, "host_gib": args.host_gib,
            "label": {"preset": args.model}, **({"preset": args.model}
                                                if args.model != "llama-3.1-8b" else {}),
        }  # fmt: skip
        (row,) = step.run_cases(sheet, step.small(sheet, [case])) or [{}]
        row["scaled"] = layers != depth
        if "step_s" not in row:
            continue
        row["ratio"] = row["step_s"] / row["floor_s"]
        if layers != depth:
            # The head and the embedding run once whatever the number of layers: scaling them too
            #     adds under 2%.
            row["step_whole_s"] = row["step_s"] * depth / layers
        break

    def draw(axes):
        done = [r for r in sheet.rows if "attention_s" in r]
        parts = ("attention_s", "matmul_s", "other_s", "copy_wait_s")
        for i, row in enumerate(done):
            left = 0.0
            for part in parts:
                axes[0].barh(i, row[part], left=left, label=part if i == 0 else None)
                left += row[part]
            axes[0].axvline(
                row["floor_s"], linestyle=":", color="black", label="floor" if i == 0 else None
            )
        axes[0].set_yticks(range(len(done)), [f"{r['layers']} layers" for r in done])
        axes[0].set(title="seconds of a step", xlabel="s")
        if done:
            axes[0].legend(fontsize=7)

    sheet.page(
        f"{args.model} at {args.tokens:,} tokens on one GPU", WORDS, COLUMNS, sheet.picture(draw)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
