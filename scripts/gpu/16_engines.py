"""A 3B Llama under engines that keep its optimizer on the host: seconds a step, device and host
peaks, beside gpu8bit and the plan.

python scripts/gpu/16_engines.py --tokens 32768 --out $OUT
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
import step
import text

import hfpatch
from hfpatch.trainer import tokenizer

WORDS = """
scripts/train.py of Llama-3.2-3B from random weights on the Python standard library's sources, one
sequence a step on one GPU: `--engine zero3_cpu_offload`, `--engine fsdp2_cpu_offload` (float32
weights under bf16 autocast) and `--placement gpu8bit`. `step_s`: the median of the steps after the
first, which pins memory and compiles, the optimizer's step in it. `host_used_gib` is the machine's
memory in use beyond what was in use before the program began. Beside it stands what `hfpatch plan`
says of the same run; it plans no FSDP on one GPU. A run ends as its last step is logged: nothing is
saved.
"""
COLUMNS = (
    "engine tokens steps step_s steps_s tokens_s first_loss last_loss peak_gpu_gib reserved_gib "
    "host_used_gib "
    "plan_step_s plan_gpu_gib plan_host_gib error"
).split()
# name: (flags of train.py, the plan's placement)
ENGINES = {
    "zero3_cpu_offload": (
        "--engine zero3_cpu_offload --dtype float32 --bf16 True",
        "zero3-offload",
    ),
    "fsdp2_cpu_offload": ("--engine fsdp2_cpu_offload --dtype float32 --bf16 True", None),
    "gpu8bit": ("--placement gpu8bit", "gpu8bit"),
}
FLAGS = (
    "--impl hfpatch --packing --per_device_train_batch_size 1 --logging_steps 1 --learning_rate "
    "1e-5 "
    "--save_strategy no --report_to none --disable_tqdm True --seed 1"
)
EXCLUDED = "site-packages dist-packages test tests idlelib lib2to3 __pycache__".split()
SIZES = "hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16"


def train(args, engine: str, tokens: int, flags: str, scratch: Path, seconds: float) -> dict:
    """What a run logged, and the most that it took."""
    library = sysconfig.get_path("stdlib")
    command = [
        sys.executable,
        str(common.ROOT / "scripts" / "train.py"),
        "--model",
        args.model,
        *flags.split(),
    ]
    command += [
        *FLAGS.split(),
        "--data",
        f"{library}/json" if args.small else library,
        "--data_glob",
        "**/*.py",
    ]
    command += [
        "--data_exclude",
        *EXCLUDED,
        "--seq-len",
        str(tokens),
        "--max_steps",
        str(args.steps),
    ]
    # A tokenizer of its own: one trained by the run would shrink the model's vocabulary to its
    #     size.
    command += ["--tokenizer", str(scratch / "bpe"), "--cache_dir", str(scratch / "tokens")]
    command += ["--output_dir", str(scratch / engine)]
    command += ["--config_overrides", SIZES] if args.small else []
    command += [] if args.cuda else ["--use_cpu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if args.host_gib:
        environment["HFPATCH_HOST_MEMORY"] = str(int(args.host_gib * common.GiB))
    host, logged, last = step.HostWatch(), [], []
    # In this process's group, so that what ends an entry ends it too.
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    # The clock ends it: a program that says nothing is waited for no longer.
    previous = signal.signal(signal.SIGALRM, lambda *_: _kill(run))
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
        found = host.close()
        _kill(run)
        run.stdout.close()
    if not logged:
        return found | {"error": f"code {run.returncode}: " + " | ".join(last)[-300:]}
    times = [float(entry["step_seconds"]) for entry in logged]
    step_s = statistics.median(times[1:] or times)
    more = (
        {"error": f"ended after {len(logged)} steps: " + " | ".join(last)[-200:]}
        if len(logged) < args.steps
        else {}
    )
    return found | more | {
        "step_s": step_s, "steps_s": " ".join(f"{s:.4g}" for s in times),
        "tokens_s": tokens / step_s,
        "first_loss": float(logged[0]["loss"]), "last_loss": float(logged[-1]["loss"]),
        "peak_gpu_gib": float(logged[-1].get("peak_gpu_gib") or 0) or None,
        "reserved_gib": float(logged[-1].get("peak_gpu_reserved_gib") or 0) or None,
    }  # fmt: skip


def _kill(run: subprocess.Popen) -> None:
    run.kill()
    run.wait()


def planned(args, tokens: int, placement: str | None) -> dict:
    """The plan of the same run; {} where there is none."""
    if placement is None or args.small:
        return {}
    host = {"host_ram": f"{args.host_gib}GiB"} if args.host_gib else {}
    plan = hfpatch.plan(args.model, seq_len=tokens, gpu=args.gpu, placement=placement, **host)
    return {
        "plan_step_s": plan.step_seconds, "plan_gpu_gib": plan.gpu_peak_bytes / common.GiB,
        "plan_host_gib": plan.host_peak_bytes / common.GiB,
    }  # fmt: skip


def main(argv=None) -> int:
    made = common.parser("16_engines", __doc__)
    made.add_argument("--model", default="llama-3.2-3b")
    made.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    made.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    made.add_argument("--steps", type=int, default=3, help="the first is not timed")
    made.add_argument("--gpu", default="h100", help="row of the planner's table")
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    runs = {name: ENGINES[name] for name in args.engines}
    if not args.cuda:
        sheet.skip("engines", "no GPU for them: a run without one tries the code path")
        runs = {"none": ("", None)}
    with tempfile.TemporaryDirectory() as scratch:
        # of the tokenizer, and files it learns them from
        words = (300, 10) if args.small else (8192, 300)
        tokenizer.train(iter(text.sources(words[1])), words[0]).save_pretrained(
            Path(scratch) / "bpe"
        )
        for tokens in [64] if args.small else args.tokens:
            for engine, (flags, placement) in runs.items():
                if sheet.late(f"{engine} {tokens}"):
                    continue
                found = train(
                    args, engine, tokens, flags, Path(scratch), sheet.left() + common.OVERTIME
                )
                beside = planned(args, tokens, placement)
                sheet.add(
                    impl="hfpatch",
                    engine=engine,
                    tokens=tokens,
                    steps=args.steps,
                    **found,
                    **beside,
                )

    def draw(axes):
        rows = [{**r, "what": f"{r['engine']} {r['tokens']:,}"} for r in sheet.rows]
        common.bars(axes[0], rows, "what", "step_s", title="seconds a step")
        common.bars(axes[1], rows, "what", "host_used_gib", title="GiB of host memory")

    sheet.page(
        f"{args.model} under its engines, on one GPU", WORDS, COLUMNS, sheet.picture(draw, wide=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
