"""Flags that mean the same in every command: what decoder layers keep for backward."""

from hfpatch.budget.limits import flag, parse_word
from hfpatch.budget.policy import CHECKPOINTING


def add_checkpointing(add, more: str = "") -> None:
    """Adds --checkpointing and --every.

    Args:
        add: a parser's add_argument.
        more: what this command's --checkpointing takes besides.
    """
    add("--checkpointing", action="append", default=[], metavar="WHAT", help=CHECKPOINTING + more)
    add(
        "--every",
        type=flag(parse_word),
        metavar="K",
        help="keep every K-th layer's input: --checkpointing every=K",
    )


def checkpointing_of(args):
    """What `checkpointing=` gets of these arguments: a list of words, empty where none came."""
    return args.checkpointing + ([] if args.every is None else [f"every={args.every}"])
