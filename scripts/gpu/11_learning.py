"""Learning curves on the GPU: the tiny and the 160M preset on the same real text, stock, Liger and
hfpatch, bf16.

python scripts/gpu/11_learning.py --out $OUT
"""

import ast
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

WORDS = """
scripts/train.py from scratch on the Python standard library's sources: the same seed, batches,
tokenizer and optimizer, float32 weights under bf16 autocast; only `--impl` differs. The runs go
side by side, so that `seconds` compares none. `apart` is the mean distance of a curve's last
quarter from stock's, in nats: kernels that learn as well differ by the noise of bf16. Held-out loss
before and after is in the last columns.
"""
RUNS = {
    "llama-tiny": (
        "--config_overrides "
        "hidden_size=128,intermediate_size=352,num_hidden_layers=4,tie_word_embeddings=true "
        "--train_tokenizer 512 --seq-len 256 --per_device_train_batch_size 64 --max_steps 400 "
        "--learning_rate 4e-3 --warmup_steps 20 --logging_steps 10"
    ),
    "llama-160m": (
        "--train_tokenizer 32000 --seq-len 1024 --per_device_train_batch_size 16 --max_steps 300 "
        "--learning_rate 6e-4 --warmup_steps 30 --logging_steps 10"
    ),
}
SMALL = {
    "llama-tiny": (
        "--train_tokenizer 300 --seq-len 64 --per_device_train_batch_size 4 --max_steps 6 "
        "--learning_rate 4e-3 "
        "--warmup_steps 1 --logging_steps 2 --use_cpu"
    )
}
COMMON = (
    "--packing --validation_split 0.02 --eval_on_start --weight_decay 0.1 --bf16 True "
    "--dtype float32 --save_strategy no --report_to none --disable_tqdm True --seed 1"
)


def learn(args, preset, flags, impl, cache, folder, seconds: float):
    """(losses logged, held-out losses, last lines of the output, seconds) of one run of
    scripts/train.py.
    """
    library = sysconfig.get_path("stdlib")
    command = [
        sys.executable,
        str(common.ROOT / "scripts" / "train.py"),
        "--model",
        preset,
        "--impl",
        impl,
    ]
    command += ["--data", f"{library}/json" if args.small else library, "--data_glob", "**/*.py"]
    command += [
        "--data_exclude",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
    ]
    command += [
        *flags.split(),
        *COMMON.split(),
        "--cache_dir",
        str(cache),
        "--output_dir",
        str(folder),
    ]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + common.OVERTIME,
            # what a run had logged when it was stopped counts
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        output, error = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        output, error = (expired.stdout or b"").decode(), "stopped: the time of this run was over"
    losses, held = [], []
    for line in output.splitlines():
        if line.startswith("{"):
            entry = ast.literal_eval(line)
            if "loss" in entry:
                losses.append(float(entry["loss"]))
            if "eval_loss" in entry:
                held.append(float(entry["eval_loss"]))
    return losses, held, error.strip().splitlines()[-1:] or [""], time.perf_counter() - start


def main(argv=None) -> int:
    made = common.parser("11_learning", __doc__)
    made.add_argument("--presets", nargs="+", default=list(RUNS), choices=list(RUNS))
    made.add_argument(
        "--impls", nargs="+", default=["hf", "hfpatch", "liger"], choices=["hf", "hfpatch", "liger"]
    )
    made.add_argument(
        "--together",
        type=int,
        default=6,
        help="runs side by side: seconds are none that one has alone",
    )
    args = common.parse(made, argv)
    if args.small:
        args.presets, args.together = list(SMALL), 1
    sheet = common.Sheet(args)
    curves: dict = {}
    jobs = [(preset, impl) for preset in args.presets for impl in args.impls]
    for preset, impl in [job for job in jobs if job[1] == "liger" and not args.cuda]:
        sheet.skip(f"{preset} {impl}", "no GPU for it")
        jobs.remove((preset, impl))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.together) as threads:

        def run(preset, impl):
            if sheet.left() <= 0:
                return None
            folder = Path(scratch) / f"{preset}-{impl}"
            flags = (SMALL if args.small else RUNS)[preset]
            return learn(args, preset, flags, impl, folder / "tokens", folder, sheet.left())

        started = [(*job, threads.submit(run, *job)) for job in jobs]
        for preset, impl, future in started:
            if future.result() is None:
                sheet.late(f"{preset} {impl}")
                continue
            losses, held, last, seconds = future.result()
            if not losses:
                sheet.skip(f"{preset} {impl}", last[0][:200])
                continue
            curves[preset, impl] = losses
            # One that was stopped is compared as far as it came.
            pairs = list(zip(losses, curves.get((preset, "hf"), [])))
            pairs = pairs[-max(1, len(pairs) // 4) :]
            sheet.add(
                preset=preset, impl=impl, logged=len(losses), first_loss=losses[0],
                last_loss=losses[-1],
                apart=sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else None,
                held_out_before=held[0] if len(held) > 1 else None,
                held_out_after=held[-1] if held else None,
                seconds=seconds, curve=" ".join(f"{x:.4f}" for x in losses),
            )  # fmt: skip

    def draw(axes):
        presets = dict.fromkeys(p for p, _ in curves)
        for axis, preset in zip(axes, presets):
            for (name, impl), losses in curves.items():
                if name == preset:
                    axis.plot(losses, label=impl)
            axis.set(title=preset, xlabel="log line", ylabel="loss, nats a token")
            axis.legend()

    columns = [c for c in sheet.columns() if c != "curve"]
    sheet.page(
        "Learning curves: stock, Liger, hfpatch", WORDS, columns, sheet.picture(draw, wide=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
