"""The program `hfpatch`: one table row a command, each loaded only when it is called."""

import gc
import importlib
import os
import sys

import hfpatch
from hfpatch.cli.failures import Parser, guarded
from hfpatch.planner.limits import check_ranges
from hfpatch.trainer import run_file

COMMANDS = {
    "plan": ("hfpatch.cli.plan", "does a run fit, and how long does a step take (no GPU needed)"),
    "profile": ("hfpatch.cli.profile", "run real steps and write a memory report"),
    "check": ("hfpatch.cli.check", "what hfpatch would patch in a model"),
    "prove": ("hfpatch.cli.prove", "test hfpatch on this machine and write a report"),
    "env": ("hfpatch.cli.env", "versions, devices and limits, and what would go wrong"),
    "train": ("hfpatch.cli.train", "train a causal language model on texts or conversations"),
    "run": ("hfpatch.cli.run", "run a training command unmodified, with the patch on its models"),
}
MODELS = ("plan", "profile", "check")  # commands whose first word is a model or a run file


def main(argv=None) -> int:
    """Runs one command. Returns its exit code: 0 ok, 2 bad arguments, 1 a failure of the machine, 3
    a plan that does not fit.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    # An error of a user's script belongs to the script. A training run handles its own failures.
    if words[:1] in (["run"], ["train"]):
        return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    if argv is None and words[:1] == ["plan"]:
        # Of a plan's seconds a sixth went to the garbage collector, which looks at thousands of
        # modules again and again while they load, and a tenth to taking them apart at the end.
        gc.disable()
        os._exit(guarded(_command, words))
    return guarded(_command, words)


def _model_first(command: Parser, argv: list[str]) -> list[str]:
    """The words with `MODEL` or `RUN.yaml` behind the command's name turned into flags."""
    command.usage = f"{command.prog} MODEL [flags] | RUN.yaml [flags]"
    name = next(iter(argv[1:]), "-")
    if name.startswith("-"):
        return argv
    flags = command._option_string_actions
    first = run_file.words(name, flags) if run_file.is_one(name) else ["--model", name]
    return [argv[0], *first, *argv[2:]]


def _command(argv) -> int:
    parser = Parser(
        prog="hfpatch",
        description="Long-context fine-tuning of any Hugging Face decoder on the GPU at hand.",
    )
    parser.add_argument("--version", action="version", version=f"hfpatch {hfpatch.__version__}")
    parser.epilog = (
        "Each command but run takes --debug: the traceback of a failure in place of its sentence."
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the chosen command is imported: torch takes seconds to load, and `plan` stays quick.
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(command)
            argv = _model_first(command, argv) if name in MODELS else argv
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # argparse would name the program's help, which does not list a command's flags
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    check_ranges(vars(args))
    return importlib.import_module(COMMANDS[args.command][0]).main(args)
