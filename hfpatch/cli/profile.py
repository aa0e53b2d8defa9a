"""`hfpatch profile`: options, and the summary at the end."""

import argparse
import shlex
import sys

from hfpatch.cli.flags import add_checkpointing
from hfpatch.lab.profile.options import CHOICES
from hfpatch.lab.profile.report import files
from hfpatch.lab.profile.run import profile, results
from hfpatch.lab.profile.timeline import LASTING
from hfpatch.lab.tables import seconds, size, table
from hfpatch.planner.limits import parse_lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a preset, a config.json, a folder or a hub id; random weights",
    )
    add("--seq-len", default="8192", help="tokens, or several lengths with commas (8192)")
    add("--batch", type=int, default=1, help="sequences a step (1)")
    add_checkpointing(add)
    add("--out", default="runs/profile", help="the report's folder (runs/profile)")
    add("--impl", default="hf,hfpatch", help="of hf, liger, hfpatch (hf,hfpatch)")
    add("--steps", type=int, default=3, help="steps that are timed (3)")
    add("--warmup", type=int, default=1, help="steps before them (1)")
    add("--dtype", default="auto", choices=CHOICES["dtype"])
    add("--optimizer", default="adamw", choices=CHOICES["optimizer"])
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for hf and liger (on)",
    )
    add("--device", default="auto", choices=CHOICES["device"])
    add(
        "--simulate",
        action="store_true",
        help="no real steps, fake tensors alone: any size, any machine",
    )
    add("--json", action="store_true", help="results on stdout as JSON, nothing else")


def main(args) -> int:
    called = sys.argv[1:2] == ["profile"]
    command = shlex.join(["hfpatch", *sys.argv[1:]]) if called else "hfpatch profile"
    done = profile(
        args.model, seq_len=parse_lengths(args.seq_len), command=command,
        **{name: getattr(args, name) for name in (
            "impl", "out", "batch", "steps", "warmup", "dtype", "optimizer",
            "gradient_checkpointing", "checkpointing", "device", "simulate",
        )},
    )  # fmt: skip
    print(results(done.runs, command=command, notes=done.notes)) if args.json else show(done)
    return 0


def show(done) -> None:
    """Prints the sentences and a table."""
    head = ("implementation", "tokens", "peak", "in the", "of it lasting", "a step")
    rows = [
        (run.impl, f"{run.seq_len:,}", size(run.peak_bytes), run.peak_phase,
         size(sum(run.peak_split[name] for name in LASTING)), seconds(run.seconds))
        for run in done.runs
    ]  # fmt: skip
    print("\n".join(done.sentences))
    print(table(rows, head))
    for run in done.runs:
        if run.error:
            print(f"{run.impl}, {run.seq_len:,} tokens: {run.error}")
    print("\n".join([*files(done.runs), *done.notes, f"report: {done.folder / 'report.md'}"]))
