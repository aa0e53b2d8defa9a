"""Plugins for other trainers, one file a trainer, and the function that they share."""

import sys

from hfpatch.budget.policy import parse_checkpointing
from hfpatch.report import Report
from hfpatch.trainer.marks import first_to_say


def apply_tiled(model, options: dict) -> Report:
    """`hfpatch.apply(model, **options)`, its report printed once a run.

    Raises:
        ValueError: from `apply`, or no layer was swapped: the training would be stock.
    """
    import hfpatch

    report = hfpatch.apply(model, **options)
    off = parse_checkpointing(options.get("checkpointing", "auto")).offload == "off"
    if not off and not report.count("checkpointing"):
        reason = dict(report.skipped).get("checkpointing", "none there")
        raise ValueError(
            f"hfpatch: no layer of {type(model).__name__} runs tiled ({reason}). Leave the plugin "
            'out, or set checkpointing to "off".'
        )
    words = str(report)  # empty on ranks but the first
    if words and first_to_say(words):
        print(words, file=sys.stderr)
    return report
