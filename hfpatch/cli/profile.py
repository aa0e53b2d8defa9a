"""`hfpatch profile`: options, progress, and the summary at the end."""

import argparse
import shlex
import sys

from hfpatch.budget.free import gpu_free, host_free
from hfpatch.cli.flags import add_checkpointing
from hfpatch.cli.table import show_table
from hfpatch.lab.hardware import GiB
from hfpatch.lab.models import text_config_of
from hfpatch.lab.profile.options import CHOICES, words_of
from hfpatch.lab.profile.run import profile, results
from hfpatch.lab.profile.timeline import size
from hfpatch.planner.limits import parse_lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="a preset, a config.json, a folder or a hub id; random weights",
    )
    parser.add_argument(
        "--seq-len", default="8192", help="tokens, or several lengths with commas (default 8192)"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences a step (default 1)")
    add_checkpointing(parser.add_argument)
    parser.add_argument(
        "--out", default="runs/profile", help="the report's folder (default runs/profile)"
    )
    parser.add_argument(
        "--impl", default="hf,hfpatch", help="of hf, liger, hfpatch (default hf,hfpatch)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="one recorded, the rest timed (default 3)"
    )
    before = parser.add_mutually_exclusive_group()
    before.add_argument(
        "--warmup", type=int, default=1, help="steps before the recorded one (default 1)"
    )
    before.add_argument(
        "--from-first-step",
        action="store_true",
        help="record the first step: the same as --warmup 0",
    )
    parser.add_argument("--dtype", default="auto", choices=CHOICES["dtype"])
    parser.add_argument("--optimizer", default="adamw", choices=CHOICES["optimizer"])
    parser.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for hf and liger; hfpatch brings its own (default: on)",
    )
    parser.add_argument("--device", default="auto", choices=CHOICES["device"])
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="follow the step on fake tensors: any size, any machine",
    )
    parser.add_argument(
        "--no-stacks",
        action="store_true",
        help="no Python lines in the report; a lighter recording",
    )
    parser.add_argument(
        "--no-trace", action="store_true", help="no Chrome trace: a folder of a few hundred KiB"
    )
    parser.add_argument(
        "--json", action="store_true", help="results on stdout as JSON, nothing else"
    )


def options(args) -> dict:
    """The arguments of each run, by the names of profiling.options.Options."""
    return {
        "batch": args.batch, "steps": args.steps, "warmup": 0 if args.from_first_step
        else args.warmup,
        "dtype": args.dtype, "optimizer": args.optimizer,
        "gradient_checkpointing": args.gradient_checkpointing,
        "checkpointing": words_of(args.checkpointing), "device": args.device,
        "stacks": not args.no_stacks, "trace": not args.no_trace, "simulate": args.simulate,
    }  # fmt: skip


def main(args) -> int:
    command = (
        shlex.join(["hfpatch", *sys.argv[1:]])
        if sys.argv[1:2] == ["profile"]
        else "hfpatch profile"
    )
    lengths, impls = parse_lengths(args.seq_len), args.impl.split(",")
    if not args.simulate:
        _expect_room(args.model, args.batch * max(lengths))
    wanted = {
        "seq_len": lengths,
        "impl": impls,
        "out": args.out,
        "command": command,
        **options(args),
    }
    if args.json:
        done = profile(args.model, **wanted)
        print(results(done.runs, command=command, notes=done.notes))
        return 0
    show(profile(args.model, progress=progress, **wanted))
    return 0


def _expect_room(model: str, tokens: int) -> None:
    """ValueError for tokens whose layer inputs alone, in 2 bytes, this machine cannot hold."""
    values = text_config_of(model)[1]
    needed = 2 * tokens * values.get("hidden_size", 0) * values.get("num_hidden_layers", 0)
    room = (host_free() or 1 << 60) + (gpu_free() or 0)
    if needed > room:
        raise ValueError(
            f"hfpatch: {tokens:,} tokens must fit this machine's {room / GiB:.0f} GiB, and their "
            f"layer inputs alone take {needed / GiB:.0f}. Pass fewer tokens, or --simulate."
        )


def progress(impl: str, seq_len: int, text: str) -> None:
    """A line on stderr for each part of the work."""
    print(f"hfpatch: {impl}, {seq_len:,} tokens: {text}", file=sys.stderr)


def show(done) -> None:
    """Prints the sentences and a table."""
    head = ("implementation", "tokens", "peak", "in the", "of it lasting", "s/step")
    rows = []
    for run in done.runs:
        split = run.peak_split
        lasting = split["parameters"] + split["gradients"] + split["optimizer"]
        step = (
            f"{sorted(run.step_seconds)[len(run.step_seconds) // 2]:.3f}"
            if run.step_seconds
            else ""
        )
        rows.append(
            (
                run.impl,
                f"{run.seq_len:,}",
                size(run.peak_bytes),
                run.peak_phase,
                size(lasting),
                step,
            )
        )
    print("\n".join(done.sentences))
    show_table(rows, head)
    for run in done.runs:
        if run.error:
            print(f"{run.impl}, {run.seq_len:,} tokens: {run.error}")
        if "trace_file" in run.memory:
            print(
                f"trace of one step: {done.folder / run.memory['trace_file']}, "
                f"{size(run.memory['trace_file_bytes'])}"
            )
    print("\n".join([*done.notes, f"report: {done.folder / 'report.md'}"]))
