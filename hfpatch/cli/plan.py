"""`hfpatch plan`: the arguments, and the answer as text or JSON."""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace

from hfpatch.budget.limits import parse_length
from hfpatch.budget.policy import parse_checkpointing
from hfpatch.cli.flags import adapters_of, add_adapters, add_checkpointing
from hfpatch.cli.quiet import progress
from hfpatch.lab.hardware import GPUS
from hfpatch.lab.presets import MODELS, PRESETS
from hfpatch.planner.float8 import RECIPES
from hfpatch.planner.limits import flag, parse_bytes
from hfpatch.planner.placements import PLACEMENTS
from hfpatch.planner.plan import plan

PAUSE = 2.0  # seconds of silence before a search names the length it tries
EPILOG = """exit code: 0 it fits, 2 bad arguments, 3 it does not fit.
example: hfpatch plan llama-3.1-8b --seq-len 128k --gpu a100-80gb --host-ram 256GiB"""


# Flag, its default, its help. The last one is a run file's.
COUNTS = (
    ("--batch", 1, "sequences a GPU and step (1)"),
    ("--gpus", 1, "GPUs of one machine (1)"),
    ("--sp-size", 1, "GPUs that share each sequence: Ulysses, context parallelism (1)"),
    ("--images", 0, "images in each row, whose tower is planned too (0)"),
    ("--video-tokens", 0, "visual tokens of each row's videos (0)"),
    ("--gradient-accumulation-steps", 1, argparse.SUPPRESS),
)


def add_arguments(parser) -> None:
    """The arguments of `hfpatch plan` on an argparse parser."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help=f"{', '.join((*PRESETS, *MODELS))}; or a config.json, a folder, a hub id",
    )
    add(
        "--seq-len", type=flag(parse_length), default=131072, metavar="N",
        help="tokens a sequence, such as 8192 or 128k (131072)",
    )  # fmt: skip
    add("--gpu", default="h100", help=f"{', '.join(GPUS)}, or this, which measures (h100)")
    for name, default, said in COUNTS:
        add(name, type=int, default=default, help=said)
    add(
        "--host-ram", type=flag(parse_bytes), metavar="SIZE",
        help="the machine's memory, as 256GiB (twice the cards', at least 64GiB)",
    )  # fmt: skip
    add("--placement", default="auto", help=f"auto, {', '.join(PLACEMENTS)}")
    add("--fp8", nargs="?", const="rowwise", choices=list(RECIPES),
        help="the layers' products in torchao's float8, by rows (rowwise)")  # fmt: skip
    add_adapters(add)
    add_checkpointing(add, "; or stock, stock-checkpointing: transformers without hfpatch (auto)")
    add("--max-seq-len", action="store_true", help="also find the longest sequence that fits")
    add(
        "--extended", action="store_true", help=argparse.SUPPRESS
    )  # of a run file with rope_scaling
    add("--json", action="store_true", help="one JSON object")


def _lengths_tried():
    """A function that prints the length that a search tries to stderr, once in PAUSE seconds."""
    said = time.monotonic()

    def say(tokens: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"hfpatch: longest sequence: trying {tokens:,} tokens", file=sys.stderr)

    return say


def main(args) -> int:
    """Runs the command; returns its exit code."""
    # at once: planning loads torch for seconds
    parse_checkpointing([word for word in args.checkpointing if not word.startswith("stock")])
    with progress("planning: the model's own step runs on fake tensors"):
        found = plan(
            args.model, seq_len=args.seq_len, batch=args.batch, gpu=args.gpu, gpus=args.gpus,
            host_ram=args.host_ram, placement=args.placement, checkpointing=args.checkpointing,
            adapters=adapters_of(args), sp_size=args.sp_size, images=args.images,
            video_tokens=args.video_tokens, fp8=args.fp8, max_seq_len=args.max_seq_len,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            progress=_lengths_tried(),
        )  # fmt: skip
    if args.extended:
        found = replace(found, run=replace(found.run, positions=None))
    print(json.dumps(asdict(found), indent=1) if args.json else found, flush=True)
    return 0 if found.fits else 3
