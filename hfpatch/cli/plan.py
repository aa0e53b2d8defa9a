"""`hfpatch plan`: the arguments, and the answer as text, JSON, a sweep's table or its picture."""

import json
import sys
import time
from dataclasses import replace

from hfpatch.budget.hardware import GPUS
from hfpatch.budget.policy import Policy
from hfpatch.cli.flags import adapters_of, add_adapters, add_checkpointing, checkpointing_of
from hfpatch.lab.models import resolve
from hfpatch.lab.presets import MODELS, PRESETS
from hfpatch.planner.answer import judged
from hfpatch.planner.evaluate import placements
from hfpatch.planner.limits import parse_lengths
from hfpatch.planner.optimizers import OPTIMIZERS
from hfpatch.planner.placements import FLOAT8_RECIPES, PLACEMENTS, resident, under
from hfpatch.planner.plan import plan, resolved
from hfpatch.planner.show import picture, sweep_table

PAUSE = 2.0  # seconds between two lines of progress
EPILOG = """exit code: 0 it fits, 2 bad arguments, 3 it does not fit, or the simulator contradicts the plan.
example: hfpatch plan --model llama-3.1-8b --seq-len 131072 --gpu a100-80gb --host-ram 256GiB"""


def add_arguments(parser) -> None:
    """The arguments of `hfpatch plan` on an argparse parser."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help=f"{', '.join((*PRESETS, *MODELS))}; or a config.json, a folder, a hub id",
    )
    add("--seq-len", help="tokens a sequence, such as 8192 or 128k (131072)")
    add("--batch", type=int, default=1, help="sequences a GPU and step (1)")
    add("--gpu", default="h100", help=f"{', '.join(GPUS)}, or this, which measures (h100)")
    add("--gpus", type=int, default=1, help="GPUs of one machine (1)")
    add(
        "--sp-size",
        type=int,
        default=1,
        help="GPUs that share each sequence: Ulysses, context parallelism (1)",
    )
    add("--images", type=int, default=0, help="images in each row, whose tower is planned too (0)")
    add("--video-tokens", type=int, default=0, help="visual tokens of each row's videos (0)")
    add("--host-ram", help="the machine's memory, as 256GiB; taken as enough where it is left out")
    add("--placement", default="auto", help=f"auto, {', '.join(PLACEMENTS)}")
    add(
        "--optimizer",
        default="adamw",
        help=f"of --placement adamw and adamw-fp32: {', '.join(OPTIMIZERS)} (adamw)",
    )
    add("--fp8", nargs="?", const="rowwise", choices=list(FLOAT8_RECIPES),
        help="the layers' products in torchao's float8, by rows (rowwise)")  # fmt: skip
    add_adapters(add)
    add_checkpointing(add, "; or stock, stock-checkpointing: transformers without hfpatch (auto)")
    add("--max-seq-len", action="store_true", help="also find the longest sequence that fits")
    add(
        "--sweep",
        metavar="LENGTHS",
        help="a table over lengths, as 8192,32768,131072, and all placements asked for",
    )
    add("--png", metavar="FILE", help="draw the sweep")
    add(
        "--simulate",
        action="store_true",
        help="also run the step on fake tensors, as is done unasked without a closed form",
    )
    add("--json", action="store_true", help="one JSON object (a list of them for a sweep)")


def _simulated(args, found):
    """The plan with the bytes of a simulated step of the same model and policy, and whether those
    still fit.
    """
    from hfpatch.planner.simulated import simulated_bytes

    _, shape, config = resolve(args.model)
    shape = replace(shape, adapters=adapters_of(args))
    # If gradients do not stay, the moment of the most activations counts.
    policy = Policy(**found.policy) if isinstance(found.policy, dict) else found.policy
    stays = resident(found.placement, shape, found.gpus, policy)
    return judged(found, stays, *simulated_bytes(config, found, at_peak=stays.gradients is None))


def _progress():
    """A function that prints the length that a search tries to stderr, once in PAUSE seconds."""
    said = time.monotonic()

    def say(tokens: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"hfpatch: longest sequence: trying {tokens:,} tokens", file=sys.stderr)

    return say


def _found(args, seq_len: int, placement: str, common: dict):
    """The plan. With --simulate it is also simulated, unless plan() simulated it already because no
    closed form describes the model.
    """
    found = plan(
        args.model, seq_len=seq_len, placement=placement, max_seq_len=args.max_seq_len,
        progress=_progress(), **common,
    )  # fmt: skip
    return _simulated(args, found) if args.simulate and found.closed_form else found


def main(args) -> int:
    """Runs the command; returns its exit code."""
    common = {
        "batch": args.batch, "gpu": args.gpu, "gpus": args.gpus, "host_ram": args.host_ram,
        "checkpointing": checkpointing_of(args), "adapters": adapters_of(args),
        "sp_size": args.sp_size, "images": args.images, "video_tokens": args.video_tokens,
        "fp8": args.fp8,
    }  # fmt: skip
    asked = under(args.optimizer, args.placement)
    if args.sweep is not None and (args.max_seq_len or args.seq_len is not None):
        other = "--max-seq-len" if args.max_seq_len else "--seq-len"
        raise ValueError(
            f"hfpatch: --sweep takes the lengths that it is given, {other} came with it; drop one "
            "of them."
        )
    if args.png and args.sweep is None:
        raise ValueError(
            "hfpatch: --png draws a sweep, no --sweep came; pass --sweep 8192,32768,131072 with it."
        )
    if args.sweep is not None:
        lengths = parse_lengths(args.sweep)
        names = placements(resolved(args.model, seq_len=lengths[0], **common), asked)
        plans = [_found(args, n, p, common) for p in names for n in lengths]
        print(
            json.dumps([p.to_dict() for p in plans], indent=1) if args.json else sweep_table(plans)
        )
        if args.png:
            picture(plans, args.png)
            print(f"wrote {args.png}", file=sys.stderr)
        return 0 if any(p.fits for p in plans) and not any(p.contradicted for p in plans) else 3
    seq_len = parse_lengths("131072" if args.seq_len is None else args.seq_len)
    if len(seq_len) != 1:
        raise ValueError(
            f"hfpatch: --seq-len takes one length, {args.seq_len!r} came; several go to --sweep."
        )
    found = _found(args, seq_len[0], asked, common)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return 0 if found.fits and not found.contradicted else 3
