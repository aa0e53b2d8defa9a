"""Full fine-tuning with --placement gpu8bit on one GPU: steps of Llama-3.1-8B through Trainer, on
real text.

python scripts/gpu/09_gpu8bit.py --out $OUT
python scripts/gpu/09_gpu8bit.py --tokens 8192 --steps 12 --impls hfpatch liger --out $OUT
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common
import step
import text
import torch

WORDS = """
Llama-3.1-8B from its config with random bf16 weights, 32 layers, batch 1, gradient clipping at 1.0,
the optimizer that `--placement` brings (8-bit Adam moments, stochastic rounding), through
transformers' Trainer. The text is Python's standard library under a byte-level BPE trained on it,
`used_ids` of whose tokens occur. `step_s` is the median of the steps after the first (which pins
memory and compiles the optimizer). Liger runs with transformers' checkpointing and the same
optimizer. Target at 131,072: under 100 GiB of host memory, loss finite and falling.
"""
COLUMNS = (
    "impl placement tokens steps step_s tokens_s mfu first_loss last_loss finite falls "
    "peak_gpu_gib reserved_gib "
    "host_used_gib pinned_gib parameters vocabulary used_ids policy error"
).split()


def train(job: dict) -> dict:
    """The run of one implementation, in this process."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hfpatch.trainer import placement
    from hfpatch.trainer.callback import Callback

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    data, used = text.rows(job["vocabulary"], job["tokens"], job["steps"], job.get("files"))
    model = step.build(job, device)
    step.become(model, job)

    class Steps(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, args, state, control, **kwargs):
            common.synchronize()
            self.clock = common.time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            common.synchronize()
            self.seconds.append(common.time.perf_counter() - self.clock)
            # What came by then is a row; whoever is ended from outside leaves none.
            control.should_training_stop |= common.time.time() > job["until"]

    steps = Steps()
    steps.seconds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(step.host_memory(job.get("host_gib")))
        if not cuda:  # the optimizer's step would be compiled by a C++ compiler, weight by weight
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        settings = {"max_grad_norm": 1.0, **placement.training_arguments(job["placement"])}
        args = TrainingArguments(
            output_dir=folder, max_steps=job["steps"], per_device_train_batch_size=1,
            logging_steps=1,
            learning_rate=job["learning_rate"], lr_scheduler_type="constant", save_strategy="no",
            report_to="none",
            disable_tqdm=True, use_cpu=not cuda, dataloader_pin_memory=False, seed=0, **settings,
        )  # fmt: skip
        extra = placement.trainer_arguments(model, args, job["placement"])
        dataset = [{"input_ids": row, "labels": row} for row in data]
        columns = Callback()
        run = Trainer(
            model=model, args=args, train_dataset=dataset, callbacks=[columns, steps], **extra
        )
        host = step.HostWatch()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            run.train()
        finally:
            found = host.close()
        logs = [entry for entry in run.state.log_history if "loss" in entry]
    losses = [float(entry["loss"]) for entry in logs]
    seconds = statistics.median(steps.seconds[1:] or steps.seconds)
    found |= {
        "step_s": seconds,
        "steps_s": " ".join(f"{s:.4g}" for s in steps.seconds),
        "tokens_s": job["tokens"] / seconds,
        "mfu": step.mfu_of(step.ModelShape.from_config(model.config), job["tokens"], seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": " ".join(f"{x:.4f}" for x in losses),
        "finite": all(x == x and abs(x) != float("inf") for x in losses),
        "falls": losses[-1] < losses[0],
        "pinned_gib": step.pinned_gib(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "used_ids": used,
        "policy": step.policy_of(model),
    }
    if cuda:
        found["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / common.GiB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / common.GiB
    return found


def guarded(job: dict) -> dict:
    try:
        return train(job)
    except (RuntimeError, ValueError, MemoryError, ImportError) as error:
        return common.failure(error)


def in_process_of_its_own(job: dict, seconds: float) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", json.dumps(job), str(result)]
        try:
            code = subprocess.run(command, timeout=seconds + common.OVERTIME).returncode
        except subprocess.TimeoutExpired:
            return {"error": "stopped: the time of this run was over"}
        return (
            json.loads(result.read_text())
            if result.exists()
            else {"error": f"the process ended with code {code}"}
        )


def main(argv=None) -> int:
    made = common.parser("09_gpu8bit", __doc__)
    made.add_argument("--tokens", type=int, default=131072)
    made.add_argument("--steps", type=int, default=3)
    made.add_argument(
        "--impls", nargs="+", default=["hfpatch"], choices=["hfpatch", "liger", "stock"]
    )
    made.add_argument("--placement", default="gpu8bit", choices=["gpu8bit", "gpu8bit-fused"])
    made.add_argument(
        "--vocabulary",
        type=int,
        default=40960,
        help="size of the BPE; the model keeps its own 128,256 rows",
    )
    made.add_argument("--learning-rate", type=float, default=1e-4)
    made.add_argument("--host-gib", type=float, help="host memory to plan with")
    args = common.parse(made, argv)
    sheet = common.Sheet(args, f"09_{args.placement}_{args.tokens}")
    for impl in args.impls:
        if sheet.late(impl):
            continue
        job = {
            "impl": impl, "layers": 32, "tokens": args.tokens, "steps": args.steps,
            "placement": args.placement,
            "vocabulary": args.vocabulary, "learning_rate": args.learning_rate,
            "host_gib": args.host_gib,
            "until": common.time.time() + sheet.left(),
        }  # fmt: skip
        if args.small:
            job |= {
                "preset": "llama-tiny",
                "layers": 2,
                "changes": {"vocab_size": 512},
                "tokens": 64,
                "steps": 2,
            }
            job |= {"vocabulary": 400, "files": 20, "learning_rate": 1e-2}
        result = guarded(job) if args.small else in_process_of_its_own(job, sheet.left())
        shown = {
            k: job[k] for k in ("impl", "placement", "tokens", "steps", "layers", "vocabulary")
        }
        sheet.add(**shown, **result)
    done = [r for r in sheet.rows if "losses" in r]

    def draw(axes):
        for row in done:
            axes[0].plot([float(x) for x in row["losses"].split()], marker="o", label=row["impl"])
        axes[0].set(
            title=f"loss, {args.placement}, {args.tokens:,} tokens a step",
            xlabel="step",
            ylabel="nats a token",
        )
        if done:
            axes[0].legend()

    sheet.page(
        f"Llama-3.1-8B trained with {args.placement} at {args.tokens:,} tokens",
        WORDS,
        COLUMNS,
        sheet.picture(draw),
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        Path(sys.argv[3]).write_text(json.dumps(guarded(json.loads(sys.argv[2]))))
        sys.exit(0)
    sys.exit(main())
