"""The report of apply(), printed as a title and at most ten lines; `details` holds the rest."""

import os
import sys
from dataclasses import dataclass, field

LINES = 11  # with the title


def say(line: str) -> None:
    """Prints a line for the user to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"hfpatch: {line}", file=sys.stderr, flush=True)


@dataclass
class Report:
    """The result of `hfpatch.apply`. Printed, it is a title and at most ten lines. On ranks
    other than 0 (RANK) the printed form is empty, but the fields are filled.

    Attributes:
        model: class name of the model.
        swaps: (option, class name of the modules, their number) for each option that took effect.
        skipped: (option, reason) for each option that did not.
        notes: further sentences: the kernels' path, what is kept for backward.
        details: sentences that the printed form leaves out.

    Examples:
        >>> report = hfpatch.apply(model)
        >>> report.count("rms_norm")  # 0 where the option was skipped
        65
    """

    model: str
    swaps: list[tuple[str, str, int]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def count(self, option: str) -> int:
        """The number of modules that an option ("rope", "rms_norm", "mlp", "loss",
        "checkpointing") swapped.
        """
        return sum(n for o, _, n in self.swaps if o == option)

    def __str__(self):
        if os.environ.get("RANK", "0") != "0":
            return ""
        lines = [f"hfpatch on {self.model}:"]
        swapped = dict.fromkeys(option for option, _, _ in self.swaps)
        for option in swapped:
            kinds = ", ".join(f"{n} x {name}" for o, name, n in self.swaps if o == option)
            others = [f"; others stay stock: {why}" for o, why in self.skipped if o == option]
            lines.append(f"  {option:<13} {kinds}{''.join(others[:1])}")
        for option, why in self.skipped:
            if option not in swapped:
                lines.append(f"  {option:<13} stays stock: {why}")
        notes = self.notes
        left = LINES - len(lines)
        if len(notes) > left:
            notes = [*notes[: left - 1], f"{len(notes) - left + 1} more in report.notes"]
        lines += [f"  {note}" for note in notes]
        return "\n".join(lines)
