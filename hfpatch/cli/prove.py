"""`hfpatch prove`: checks and measures hfpatch on this machine. Makes a page, and a row to send."""

import json
import sys
from pathlib import Path

from hfpatch.cli.quiet import progress


def add_arguments(parser) -> None:
    parser.add_argument(
        "--out", default="hfpatch-prove", help="folder of the page and the row (%(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, as on a CPU: a minute")
    parser.add_argument(
        "--seconds", type=float, default=600, help="about how long on a GPU (%(default)s)"
    )


def main(args) -> int:
    """Returns the exit code: 0 if all checks pass, 1 if one failed, which the page names."""
    import torch

    from hfpatch.lab.prove import PAGE, ROW, page, prove, row
    from hfpatch.planner.measure import measure_this

    # [Step 1] Choose the device and the sizes, and make the folder.
    cuda = torch.cuda.is_available()
    small = args.small or not cuda
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)  # first: a wrong path fails before the work
    if small and not args.small:
        _say("no GPU that torch can use is here: small sizes, on the CPU")
    # [Step 2] Run the checks and the measurements.
    with progress("checking and measuring"):
        proof = prove(
            torch.device("cuda" if cuda else "cpu"), small=small, seconds=args.seconds, say=_say,
            rates=measure_this if cuda and not small else None,
        )  # fmt: skip
    # [Step 3] Write the page and the row.
    (out / PAGE).write_text(page(proof), encoding="utf-8")
    (out / ROW).write_text(json.dumps(row(proof), indent=1) + "\n", encoding="utf-8")
    # [Step 4] Print the failed checks, how many passed, and what each planned step took.
    for check in proof.failed:
        _say(
            f"FAILED {check.what} {check.dtype} at {check.tokens} tokens: {check.where}, "
            f"{check.share:.3g} of what is allowed"
        )
    passed = len(proof.done) - len(proof.failed)
    print(f"{passed} of {len(proof.done)} comparisons with float64 pass; read {out / PAGE}.")
    for step in proof.steps:
        if "error" not in step and "plan_s" in step:
            print(
                "planned {plan_peak_gib:.1f} GiB, peak {peak_gib:.1f}; planned {plan_s:.1f} s, took "
                "{step_s:.1f}".format(**step)
            )
    if not small:
        print(
            f"{out / ROW} is one row to send: the device, versions and figures, nothing else of "
            "yours."
        )
    return 0 if proof.ok else 1


def _say(line: str) -> None:
    print(f"hfpatch: {line}", file=sys.stderr, flush=True)
