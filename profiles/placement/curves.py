"""Loss curves of the three placements beside float32 AdamW, on the same batches: is learning kept?

    python profiles/placement/curves.py --out profiles/placement

A 0.8 M parameter Llama reads the bytes of this Python's standard library. Each run is a process of
its own; all start from the same float32 weights and see the same rows in the same order, without
gradient clipping (gpu8bit-fused has none). Two runs are there to judge by: float32 AdamW from the
same weights rounded to bf16, which shows how far apart two equally good runs come, and gpu8bit
rounding to nearest, which shows what stochastic rounding is for. On a CPU zero3-offload steps with
torch's AdamW in place of DeepSpeed's C++ one.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hfpatch.cli.failures import Parser, guarded
from hfpatch.planner.limits import check_ranges

# the word in front of each row is its placement; colours are of the Okabe-Ito set
RUNS = {
    "float32 AdamW": ("#000000", "-"),
    "float32 AdamW, from bf16 weights": ("#CC79A7", "-."),
    "zero3-offload": ("#0072B2", "-"),
    "gpu8bit": ("#D55E00", "-"),
    "gpu8bit-fused": ("#009E73", "--"),
    "gpu8bit, rounded to nearest": ("#999999", ":"),
}


def rows(count: int, length: int):
    """`count` rows of `length` bytes, from Python files in a fixed order."""
    import torch

    text = b"".join(
        p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-t]*.py"))
    )
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return [
        {"input_ids": (row := ids[s : s + length].long()), "labels": row} for s in starts.tolist()
    ]


def one(name: str, folder: str, steps: int, rate: float) -> None:
    """Trains one run and writes its losses to folder/losses.json."""
    import torch

    from hfpatch.trainer import placement

    kind = name.split(",")[0]
    if kind == "zero3-offload":
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.set_num_threads(1)
    # torchao compiles its update: the same numbers, minutes of C++ on a CPU
    torch.compiler.set_stance("force_eager")
    plain = kind == "float32 AdamW"
    flags = {} if plain else placement.training_arguments(kind)
    if "nearest" in name:
        flags["optim_args"] = "bf16_stochastic_round=False"
    if kind == "zero3-offload":
        flags["deepspeed"]["zero_force_ds_cpu_optimizer"] = False
    batch, length = 8, 128
    args = TrainingArguments(
        folder, per_device_train_batch_size=batch, max_steps=steps, learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=20, weight_decay=0.1, adam_beta2=0.98, logging_steps=1, save_strategy="no",
        report_to="none",
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), seed=1,
        **{"max_grad_norm": 0.0, **flags},
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    if "from bf16" in name:
        model = model.bfloat16().float()
    if not plain and placement.PLACEMENTS[kind].bf16:
        model = model.bfloat16()
    more = {} if plain else placement.trainer_arguments(model, args, kind)
    trainer = Trainer(model, args, train_dataset=rows(steps * batch, length), **more)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    (Path(folder) / "losses.json").write_text(json.dumps(losses))
    sys.stdout.flush()
    os._exit(0)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gap) = pyplot.subplots(2, 1, figsize=(5, 7))  # for a phone's width
    for name, values in losses.items():
        colour, style = RUNS[name]
        smooth = [
            sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1])
            for i in range(len(values))
        ]
        curves.plot(smooth, color=colour, linestyle=style, label=name, linewidth=1.3)
        if name != "float32 AdamW":
            base = losses["float32 AdamW"]
            differences = [v - b for v, b in zip(values, base)]
            means = [
                sum(differences[max(0, i - 19) : i + 1]) / min(20, i + 1)
                for i in range(len(values))
            ]
            gap.plot(means, color=colour, linestyle=style, label=name, linewidth=1.3)
    curves.set(xlabel="step", ylabel="loss (mean of 10 steps)", title="Training loss")
    gap.set(
        xlabel="step",
        ylabel="difference (mean of 20 steps)",
        title="Training loss minus float32 AdamW's",
    )
    gap.axhline(0, color="black", linewidth=0.8)
    curves.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv=None) -> int:
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", default="runs/placement", help="folder for results.csv and curves.png"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    check_ranges(vars(args), "_")
    if args.one:
        one(args.one, args.out, args.steps, args.learning_rate)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    losses = {}
    for name in RUNS:
        folder = Path("runs") / "placement_curves" / name.replace(" ", "_").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        flags = [
            "--one",
            name,
            "--out",
            folder,
            "--steps",
            args.steps,
            "--learning_rate",
            args.learning_rate,
        ]
        code = subprocess.run([sys.executable, __file__, *map(str, flags)]).returncode
        if code:
            raise ValueError(
                f"hfpatch: the run {name!r} ended with exit code {code}; its output is above."
            )
        losses[name] = json.loads((folder / "losses.json").read_text())
    with (out / "results.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *losses])
        table.writerows([step, *values] for step, values in enumerate(zip(*losses.values()), 1))
    draw(losses, out / "curves.png")
    for name, values in losses.items():
        print(f"{name:<30} mean loss of the last 50 steps {sum(values[-50:]) / 50:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
