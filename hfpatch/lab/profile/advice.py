"""The first two sentences of a report: the peak, and its largest holder."""

from hfpatch.lab.profile.timeline import LASTING, NOWHERE, Run, held
from hfpatch.lab.tables import size


def focus(runs: list[Run]) -> Run:
    """The run that the report is about: the longest that finished, hfpatch's first; else any."""
    order = sorted(
        runs, key=lambda r: (r.error is None, r.seq_len, r.impl == "hfpatch", r.peak_bytes)
    )
    return order[-1]


def holder(run: Run) -> tuple[str, str, int]:
    """(module, phase, bytes): the module that holds most of the peak beyond LASTING categories, and
    the phase in which these blocks were born.
    """
    named = {key: count for key, count in held(run).items() if key[0] != NOWHERE}
    if not named:
        return ("", run.peak_phase, 0)
    (module, phase), count = max(named.items(), key=lambda item: item[1])
    return module, phase, count


def sentences(runs: list[Run]) -> list[str]:
    """Two sentences for people; one with the error if nothing was recorded."""
    run = focus(runs)
    if not run.peak_bytes:
        return [f"Nothing was recorded: {run.error or 'no run finished'}."]
    label = "Simulated: " if run.source == "simulated" else ""
    first = f"{label}{run.impl} peaks at {size(run.peak_bytes)} with {run.seq_len:,} tokens"
    others = [r for r in runs if r.seq_len == run.seq_len and r is not run and r.peak_bytes]
    if others:
        beside = ", ".join(_beside(other, run) for other in others)
        first += f" ({beside})"
    if run.error:
        first += f"; it did not finish: {run.error}"
    module, phase, count = holder(run)
    second = ", in parameters, gradients and optimizer states alone"
    if module:
        lasting = size(sum(run.peak_split[c] for c in LASTING))
        second = (
            f": `{module}` holds {size(count)} of it, born in the {phase}, and parameters, gradients "
            f"and optimizer states hold {lasting}"
        )
    return [f"{first}.", f"The peak comes in the {run.peak_phase or 'step'}{second}."]


def _beside(other: Run, run: Run) -> str:
    ended = "ran out of memory past " if other.error else ""
    said = f"{other.impl} {ended}{size(other.peak_bytes)}"
    if other.peak_bytes >= run.peak_bytes:
        said += f", {other.peak_bytes / run.peak_bytes:.1f} times as much"
    return said
