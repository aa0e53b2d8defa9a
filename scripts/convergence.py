"""Trains one tiny model from scratch with each implementation on the same batches and draws the loss curves.

    python scripts/convergence.py --out profiles/convergence

Real text (the standard library's sources), fp32 and bf16 (autocast over fp32 weights, Trainer's bf16=True). Liger joins
where there is a GPU. Writes losses.csv, curves.png and README.md with the command.
"""

import argparse
import csv
import json
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "scripts")]

import torch  # noqa: E402
import transformers  # noqa: E402

STYLES = {"hf": ("#777777", "-", 3.0), "hfpatch": ("#d62728", "-", 1.0), "liger": ("#1f77b4", "--", 1.0)}


def curve(impl: str, dtype: str, steps: int, folder: Path, cache: Path) -> list[dict]:
    """The log of one run: its "loss" entries, one a step, and its "eval_loss" entries."""
    out = folder / f"{impl}-{dtype}"
    command = [
        sys.executable, ROOT / "scripts/train.py", "--impl", impl, "--preset", "llama-tiny",
        "--config_overrides", "hidden_size=64,intermediate_size=176,num_hidden_layers=3,tie_word_embeddings=true",
        "--train_tokenizer", 512, "--data", sysconfig.get_path("stdlib"), "--data_glob", "*.py",
        "--validation_split", 0.05, "--seq_length", 128, "--packing", "--long_rows", "split",
        "--per_device_train_batch_size", 8, "--max_steps", steps, "--learning_rate", 5e-3, "--warmup_steps", 20,
        "--lr_floor", 0.05, "--weight_decay", 0.1, "--logging_steps", 1, "--eval_strategy", "steps",
        "--eval_steps", max(1, steps // 4), "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true",
        "--bf16", str(dtype == "bf16").lower(), "--use_cpu", str(not torch.cuda.is_available()),
        "--output_dir", out, "--cache_dir", cache,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{impl} {dtype} failed:\n{done.stdout}{done.stderr}")
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


def draw(logs: dict, path: Path) -> None:
    """A panel a dtype: the training loss (mean of 10 steps) of each implementation, its held-out loss as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtypes = list(dict.fromkeys(dtype for _, dtype in logs))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(5.5 * len(dtypes), 4), sharey=True, squeeze=False)
    for axis, dtype in zip(axes[0], dtypes):
        for (impl, of), log in logs.items():
            if of != dtype:
                continue
            color, line, width = STYLES[impl]
            losses = [entry["loss"] for entry in log if "loss" in entry]
            means = [sum(losses[i : i + 10]) / len(losses[i : i + 10]) for i in range(0, len(losses), 10)]
            axis.plot([10 * i + 5 for i in range(len(means))], means, line, color=color, lw=width, label=impl)
            held = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
            axis.plot(*zip(*held), "o", color=color, ms=3 + width)
        axis.set(title=dtype, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("nats a token (line: training, points: held out)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def rows(logs: dict) -> list[dict]:
    """One row a run: the last held-out loss, and how far the training losses are from stock's at most."""
    table = []
    for (impl, dtype), log in logs.items():
        ours = [e["loss"] for e in log if "loss" in e]
        stock = [e["loss"] for e in logs["hf", dtype] if "loss" in e]
        exact = [e["loss"] for e in logs["hf", "fp32"] if "loss" in e]
        held = [(e["eval_loss"], e["eval_nats_per_byte"]) for e in log if "eval_loss" in e][-1]
        table.append(
            {
                "impl": impl, "dtype": dtype, "steps": len(ours), "held_out_nats_per_token": held[0],
                "held_out_nats_per_byte": held[1],
                "largest_difference_to_hf": max(abs(a - b) for a, b in zip(ours, stock)),
                "largest_difference_to_hf_fp32": max(abs(a - b) for a, b in zip(ours, exact)),
            }
        )  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/convergence", help="folder of the results")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each run (default 400)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    logs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("fp32", "bf16"):
            for impl in ("hf", "hfpatch", "liger") if gpu else ("hf", "hfpatch"):
                print(f"{impl} {dtype} ...", flush=True)
                logs[impl, dtype] = curve(impl, dtype, args.steps, Path(scratch), Path(scratch) / "cache")
    with open(args.out / "losses.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["impl", "dtype", "step", "kind", "nats_per_token"])
        for (impl, dtype), log in logs.items():
            for entry in log:
                for kind in ("loss", "eval_loss"):
                    if kind in entry:
                        writer.writerow([impl, dtype, entry["step"], kind, entry[kind]])
    draw(logs, args.out / "curves.png")
    table = rows(logs)
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    lines = ["# The same loss, step by step", "", f"    {shlex.join(['python', *sys.argv])}", ""]
    lines += [f"{device}; Python {platform.python_version()}, torch {torch.__version__}, transformers "
              f"{transformers.__version__}. A Llama from scratch, {args.steps} steps on the standard library's "
              "sources; equal batches for all. bf16 is autocast over fp32 weights."]  # fmt: skip
    lines += [] if gpu else ["Liger has no CPU path: its row comes from a run on a GPU."]
    lines += ["", "| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0])]
    for row in table:
        cells = (
            f"{v:.2e}" if k.startswith("largest") else f"{v:.4f}" if isinstance(v, float) else str(v)
            for k, v in row.items()
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "![curves](curves.png)", ""]
    (args.out / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
