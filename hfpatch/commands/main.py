"""`hfpatch plan | profile | bench | env | run | simulate`: one table row a command, each loaded only when it is called."""

import argparse
import importlib
import sys

import hfpatch

COMMANDS = {
    "plan": ("hfpatch.commands.plan", "does a run fit, and how long does a step take (no GPU needed)"),
    "profile": ("hfpatch.commands.profile", "run real steps and write a memory report"),
    "bench": ("hfpatch.commands.bench", "time each fused op beside its plain version on this machine"),
    "env": ("hfpatch.commands.env", "versions, devices, limits, and what would go wrong"),
    "run": ("hfpatch.commands.run", "run an unmodified Trainer script with the patch applied to its model"),
    "simulate": (
        "hfpatch.commands.simulate",
        "memory of one implementation of one model, its code run on fake tensors",
    ),
}
READS_ITS_OWN = ("run", "simulate")  # what follows their name is theirs, a script's own flags among it


def main(argv=None) -> int:
    """Runs one command. Returns its exit code: 0 ok, 2 bad arguments, 3 a plan that does not fit."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="hfpatch", description="Long-context fine-tuning of Llama on one GPU.")
    parser.add_argument("--version", action="version", version=f"hfpatch {hfpatch.__version__}")
    if argv and argv[0] in READS_ITS_OWN:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the command asked for is imported: `plan` stays quick where torch takes seconds to load.
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).main(args)
    except (ValueError, FileNotFoundError) as error:
        print(str(error) if str(error).startswith("hfpatch:") else f"hfpatch: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
