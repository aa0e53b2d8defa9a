"""Flags that mean the same in every command: checkpointing of decoder layers, and adapters."""

from argparse import SUPPRESS

from hfpatch.budget.policy import CHECKPOINTING
from hfpatch.lab.adapters import ALL_LINEAR, BASES, Adapters


def add_checkpointing(add, more: str = "") -> None:
    """Adds --checkpointing.

    Args:
        add: a parser's add_argument.
        more: help text on additional values of this command's --checkpointing.
    """
    add("--checkpointing", action="append", default=[], metavar="WHAT", help=CHECKPOINTING + more)


def add_adapters(add) -> None:
    """Adds --lora-r, --base and --lora-target."""
    add(
        "--lora-r",
        type=int,
        default=0,
        help="train LoRA adapters of this rank over a frozen base (0: all weights)",
    )
    add(
        "--base",
        default="bf16",
        choices=list(BASES),
        help="of --lora-r: how the base's weights are kept (bf16)",
    )
    for bits in ("4bit", "8bit"):  # the names of `hfpatch train`
        add(f"--load-in-{bits}", dest="base", action="store_const", const=bits, help=SUPPRESS)
    add(
        "--lora-target",
        default=ALL_LINEAR,
        help="of --lora-r: names of Linear layers with commas (all-linear)",
    )


def adapters_of(args) -> Adapters | None:
    """The Adapters of --lora-r and its companions, or None. ValueError for a companion without
    --lora-r."""
    if args.lora_r:
        return Adapters.of(args.lora_r, args.base, args.lora_target)
    if (args.base, args.lora_target) != ("bf16", ALL_LINEAR):
        raise ValueError(
            "hfpatch: --base and --lora-target work with --lora-r only. Add --lora-r 16."
        )
    return None
