"""Learning curves on the GPU: the tiny and the 160M preset on the same real text, stock, Liger and hfpatch, bf16.

python scripts/gpu/11_learning.py --out $OUT
"""

import ast
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

WORDS = """
scripts/train.py from scratch on the Python standard library's sources: the same seed, batches, tokenizer and
optimizer, float32 weights under bf16 autocast; only `--impl` differs. `apart` is the mean distance of a curve's
last quarter from stock's, in nats: kernels that learn as well differ by the noise of bf16. Held-out loss before and
after is in the last columns.
"""
RUNS = {
    "llama-tiny": (
        "--config_overrides hidden_size=128,intermediate_size=352,num_hidden_layers=4,tie_word_embeddings=true "
        "--train_tokenizer 512 --seq_length 256 --per_device_train_batch_size 64 --max_steps 400 "
        "--learning_rate 4e-3 --warmup_steps 20 --logging_steps 10"
    ),
    "llama-160m": (
        "--train_tokenizer 32000 --seq_length 1024 --per_device_train_batch_size 16 --max_steps 300 "
        "--learning_rate 6e-4 --warmup_steps 30 --logging_steps 10"
    ),
}
SMALL = {
    "llama-tiny": (
        "--train_tokenizer 300 --seq_length 64 --per_device_train_batch_size 4 --max_steps 6 --learning_rate 4e-3 "
        "--warmup_steps 1 --logging_steps 2 --use_cpu"
    )
}
COMMON = (
    "--packing --long_rows split --validation_split 0.02 --eval_on_start --weight_decay 0.1 --bf16 True "
    "--dtype float32 --save_strategy no --report_to none --disable_tqdm True --seed 1"
)


def learn(args, preset, flags, impl, cache, folder, seconds: float):
    """(losses logged, held-out losses, last lines of the output, seconds) of one run of scripts/train.py."""
    library = sysconfig.get_path("stdlib")
    command = [sys.executable, str(common.ROOT / "scripts" / "train.py"), "--preset", preset, "--impl", impl]
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
    command += [*flags.split(), *COMMON.split(), "--cache_dir", str(cache), "--output_dir", str(folder)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(60.0, seconds + 30))
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
    args = common.parse(common.parser("11_learning", __doc__), argv)
    sheet = common.Sheet(args)
    curves: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        for preset, flags in (SMALL if args.small else RUNS).items():
            for impl in ("hf", "hfpatch", "liger"):
                if impl == "liger" and not args.cuda:
                    sheet.skip(f"{preset} liger", "no GPU for it")
                    continue
                if sheet.late(f"{preset} {impl}"):
                    continue
                folder = Path(scratch) / f"{preset}-{impl}"
                cache = Path(scratch) / "tokens"
                losses, held, last, seconds = learn(args, preset, flags, impl, cache, folder, sheet.left())
                if not losses:
                    sheet.skip(f"{preset} {impl}", last[0][:200])
                    continue
                curves[preset, impl] = losses
                quarter = max(1, len(losses) // 4)
                stock = curves.get((preset, "hf"))
                pairs = list(zip(losses[-quarter:], stock[-quarter:])) if stock else []
                sheet.add(
                    preset=preset, impl=impl, logged=len(losses), first_loss=losses[0], last_loss=losses[-1],
                    apart=sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else None,
                    held_out_before=held[0] if len(held) > 1 else None, held_out_after=held[-1] if held else None,
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
    sheet.page("Learning curves: stock, Liger, hfpatch", WORDS, columns, sheet.picture(draw, wide=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
