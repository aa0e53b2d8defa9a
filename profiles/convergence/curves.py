"""Trains one tiny model from scratch with each implementation on the same batches and draws the
loss curves.

    python profiles/convergence/curves.py --out profiles/convergence

Real text (the standard library's sources), fp32 and bf16 (autocast over fp32 weights, Trainer's
bf16=True). Liger joins where there is a GPU. Writes losses.csv, curves.png and README.md with the
command.
"""

import csv
import json
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone that was not installed

import torch  # noqa: E402
import transformers  # noqa: E402

from hfpatch.cli.failures import Parser, guarded  # noqa: E402
from hfpatch.planner.limits import check_ranges  # noqa: E402

STYLES = {
    "hf": ("#777777", "-", 3.0),
    "hfpatch": ("#d62728", "-", 1.0),
    "liger": ("#1f77b4", "--", 1.0),
}


def curve(impl: str, dtype: str, seed: int, steps: int, folder: Path, cache: Path) -> list[dict]:
    """The log of one run: its "loss" entries, one a step, and its "eval_loss" entries."""
    out = folder / f"{impl}-{dtype}-{seed}"
    command = [
        sys.executable, ROOT / "scripts/train.py", "--impl", impl, "--model", "llama-tiny",
        "--config_overrides",
        "hidden_size=64,intermediate_size=176,num_hidden_layers=3,tie_word_embeddings=true",
        "--train_tokenizer", 512, "--data", sysconfig.get_path("stdlib"), "--data_glob", "*.py",
        "--validation_split", 0.05, "--seq-len", 128, "--packing",
        "--per_device_train_batch_size", 8, "--max_steps", steps, "--learning_rate", 2e-3,
        "--warmup_steps", 20,
        "--seed", seed, "--data_seed", 1,
        "--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs",
        '{"min_lr_rate": 0.05}',
        "--weight_decay", 0.1, "--logging_steps", 1, "--eval_strategy", "steps",
        "--eval_steps", max(1, steps // 4),
        "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true",
        "--bf16", str(dtype == "bf16").lower(), "--use_cpu", str(not torch.cuda.is_available()),
        "--output_dir", out, "--cache_dir", cache,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stdout}{done.stderr}", file=sys.stderr)
        raise ValueError(
            f"hfpatch: the run {impl} {dtype} ended with exit code {done.returncode}; its output "
            "is above."
        )
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


def losses(log: list[dict]) -> list[float]:
    """The training loss of each step."""
    return [entry["loss"] for entry in log if "loss" in entry]


def draw(logs: dict, path: Path) -> None:
    """A panel a dtype: the training loss (mean of 10 steps) of each run, its held-out loss as
    points.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(dtype for _, dtype, _ in logs))
    figure, axes = plt.subplots(len(dtypes), 1, figsize=(5, 3.5 * len(dtypes)), squeeze=False)
    for axis, dtype in zip(axes[:, 0], dtypes):
        for (impl, of, seed), log in logs.items():
            if of != dtype:
                continue
            color, line, width = STYLES[impl]
            every = losses(log)
            means = [
                sum(every[i : i + 10]) / len(every[i : i + 10]) for i in range(0, len(every), 10)
            ]
            label = impl if seed == 0 else None
            axis.plot(
                [10 * i + 5 for i in range(len(means))],
                means,
                line,
                color=color,
                lw=width,
                label=label,
            )
            held = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
            axis.plot(*zip(*held), "o", color=color, ms=2 + width)
        axis.set(title=dtype, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        axis.set_ylabel("nats a token (points: held out)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def rows(logs: dict) -> list[dict]:
    """One row an implementation and dtype: the last held-out loss over the seeds, and its distance
    to stock fp32's.
    """
    table = []
    for impl, dtype in dict.fromkeys((impl, dtype) for impl, dtype, _ in logs):
        runs = {seed: log for (i, d, seed), log in logs.items() if (i, d) == (impl, dtype)}
        held = {seed: [e for e in log if "eval_loss" in e][-1] for seed, log in runs.items()}
        values = [entry["eval_loss"] for entry in held.values()]
        apart = [
            abs(a - b)
            for seed, log in runs.items()
            for a, b in zip(losses(log), losses(logs["hf", "fp32", seed]))
        ]
        table.append(
            {
                "implementation": impl, "dtype": dtype, "seeds": len(runs),
                "held-out nats a token": f"{sum(values) / len(values):.4f}",
                "of each seed": " ".join(f"{value:.4f}" for value in values),
                "nats a byte": (
                    f"{sum(e['eval_nats_per_byte'] for e in held.values()) / len(held):.4f}"
                ),
                "training loss from hf fp32 at most": f"{max(apart):.1e}",
            }
        )  # fmt: skip
    return table


def main(argv=None) -> int:
    return guarded(_main, sys.argv[1:] if argv is None else argv)


def _main(argv) -> int:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/convergence", help="folder of the results"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="optimizer steps of each run (default 300)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each kind, from different weights (default 3)"
    )
    args = parser.parse_args(argv)
    check_ranges(vars(args))
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    logs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("fp32", "bf16"):
            for impl in ("hf", "hfpatch", "liger") if gpu else ("hf", "hfpatch"):
                for seed in range(args.seeds):
                    print(f"{impl} {dtype} seed {seed} ...", flush=True)
                    run = curve(
                        impl, dtype, seed, args.steps, Path(scratch), Path(scratch) / "cache"
                    )
                    logs[impl, dtype, seed] = run
    with open(args.out / "losses.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["impl", "dtype", "seed", "step", "kind", "nats_per_token"])
        for (impl, dtype, seed), log in logs.items():
            for entry in log:
                for kind in ("loss", "eval_loss"):
                    if kind in entry:
                        writer.writerow([impl, dtype, seed, entry["step"], kind, entry[kind]])
    draw(logs, args.out / "curves.png")
    table = rows(logs)
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    lines = ["# The same loss, step by step", "", f"    {shlex.join(['python', *sys.argv])}", ""]
    lines += [f"{device}; Python {platform.python_version()}, torch {torch.__version__}, transformers "
              f"{transformers.__version__}. A Llama from scratch, {args.steps} steps on the "
              "standard library's "
              "sources; equal batches for all. bf16 is autocast over fp32 weights."]  # fmt: skip
    lines += [] if gpu else ["Liger has no CPU path: its row comes from a run on a GPU."]
    lines += ["", "| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in table]
    lines += ["", "![curves](curves.png)", ""]
    (args.out / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
