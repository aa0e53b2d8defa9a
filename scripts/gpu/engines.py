"""A 3B Llama under engines that keep its optimizer on the host, beside 8-bit Adam on the GPU.

python scripts/gpu/engines.py --tokens 32768 --out $OUT

`hfpatch train` on the Python standard library's sources, one sequence a step on one GPU. `step_s`
is the median of the steps after the first, which pins memory and compiles. A run ends as its last
step is logged.
"""

import ast
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

from hfpatch.trainer import tokenizer

ENGINES = {
    "zero3_cpu_offload": "--placement zero3_cpu_offload --dtype float32 --bf16 True",
    "fsdp2_cpu_offload": "--placement fsdp2_cpu_offload --dtype float32 --bf16 True",
    "gpu8bit": "--placement gpu8bit",
}
FLAGS = (
    "--impl hfpatch --packing --per_device_train_batch_size 1 --logging_steps 1 --learning_rate "
    "1e-5 --save_strategy no --report_to none --disable_tqdm True --seed 1 --data_glob **/*.py"
)
EXCLUDED = "site-packages dist-packages test tests idlelib lib2to3 __pycache__".split()
SMALL = (
    "hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=16"
)


def train(args, flags: str, tokens: int, scratch: str, seconds: float) -> dict:
    """What a run logged."""
    library = sysconfig.get_path("stdlib")
    data = f"{library}/json" if args.small else library
    command = [sys.executable, str(common.ROOT / "scripts" / "train.py"), "--model", args.model]
    command += [*flags.split(), *FLAGS.split(), "--data", data, "--data_exclude", *EXCLUDED]
    command += ["--seq-len", str(tokens), "--max_steps", str(args.steps)]
    command += ["--output_dir", f"{scratch}/run", "--tokenizer", f"{scratch}/bpe"]
    command += ["--config_overrides", SMALL] if args.small else []
    command += [] if args.cuda else ["--use_cpu"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    logged, last = [], []
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    previous = signal.signal(signal.SIGALRM, lambda *_: run.kill())
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        for line in run.stdout:
            print("   ", line.rstrip(), flush=True)
            last = [*last, line.strip()][-3:] if line.strip() else last
            if line.startswith("{'loss'"):
                logged.append(ast.literal_eval(line))
            if len(logged) == args.steps:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        run.kill()
        run.wait()
        run.stdout.close()
    if not logged:
        return {"error": f"code {run.returncode}: " + " | ".join(last)[-300:]}
    times = [float(entry["step_seconds"]) for entry in logged]
    return {
        "steps": len(logged), "step_s": statistics.median(times[1:] or times),
        "first_loss": float(logged[0]["loss"]), "last_loss": float(logged[-1]["loss"]),
        "peak_gpu_gib": float(logged[-1].get("peak_gpu_gib") or 0) or None,
    }  # fmt: skip


def train_tokenizer(scratch: str, size: int) -> None:
    """A tokenizer of its own: one that the run trains would shrink the model's vocabulary."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = (path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    tokenizer.train(texts, size).save_pretrained(f"{scratch}/bpe")


def main(argv=None) -> int:
    made = common.parser("engines", __doc__)
    made.add_argument("--model", default="llama-3.2-3b")
    made.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    made.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    made.add_argument("--steps", type=int, default=3, help="the first is not timed")
    args = common.parse(made, argv)
    rows = common.Rows(args, "engines")
    runs = {name: ENGINES[name] for name in args.engines} if args.cuda else {"none": ""}
    for tokens in [64] if args.small else args.tokens:
        for engine, flags in runs.items():
            if rows.left() < 0:
                rows.add(engine=engine, tokens=tokens, left_out="the time was over")
                continue
            with tempfile.TemporaryDirectory() as scratch:
                train_tokenizer(scratch, 300 if args.small else 8192)
                found = train(args, flags, tokens, scratch, rows.left() + 10)
            rows.add(engine=engine, tokens=tokens, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
