"""The timeline of a clocked step: slices of work by stream, the waits of compute for copies, and a
trace for Perfetto.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from hfpatch.lab.clock import Slice


@dataclass
class Timeline:
    """One step.

    Attributes:
        seconds: of each turn and of the whole step ("step").
        waits: slices in which compute waits for copies.
        late: seconds in which compute waited for the host to issue work.
        peak_bytes: on the device, simulated.
        planned, planned_python: seconds of the closed form, and its part in which a GPU waits for
            Python. The clock counts only launches of that part.
    """

    title: str
    slices: list[Slice] = field(default_factory=list)
    waits: list[Slice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    planned: float | None = None
    planned_python: float = 0.0

    def exposed(self, *by: str) -> dict[tuple, float]:
        """Seconds in which compute waited for copies, summed by fields of a Slice, such as
        exposed("turn", "layer", "phase").
        """
        found: dict[tuple, float] = defaultdict(float)
        for wait in self.waits:
            found[tuple(getattr(wait, name) for name in by)] += wait.end - wait.start
        return dict(found)

    @property
    def exposed_seconds(self) -> float:
        return sum(wait.end - wait.start for wait in self.waits)

    def busy(self, stream: str, turn: str | None = None) -> float:
        """Seconds in which a stream worked."""
        return sum(
            s.end - s.start for s in self.slices if s.stream == stream and turn in (None, s.turn)
        )

    def to_dict(self) -> dict:
        """The sums, ready for JSON."""
        layers = [
            [*key, value] for key, value in sorted(self.exposed("turn", "layer", "phase").items())
        ]
        return {
            "title": self.title, "seconds": self.seconds, "exposed_seconds": self.exposed_seconds,
            "exposed": layers,
            "late_seconds": self.late, "peak_bytes": self.peak_bytes,
            "planned_seconds": self.planned,
        }  # fmt: skip

    def __str__(self) -> str:
        step = self.seconds["step"]
        lines = [self.title]
        exposed = self.exposed("turn")
        for turn, seconds in self.seconds.items():
            wait = sum(exposed.values()) if turn == "step" else exposed.get((turn,), 0.0)
            line = (
                f"{turn:<10}{seconds:9.3f} s, copies exposed {wait:7.3f} s ({wait / step:.1%} of "
                "the step)"
            )
            late = sum(self.late.values()) if turn == "step" else self.late.get(turn, 0.0)
            lines.append(f"{line}, compute waits for the host {late:.3f} s")
        worst = sorted(self.exposed("turn", "layer", "phase").items(), key=lambda item: -item[1])[
            :5
        ]
        lines += [
            f"  {' '.join(filter(None, key))}: {1e3 * value:.1f} ms exposed"
            for key, value in worst
            if value > 1e-4
        ]
        if self.planned is not None:
            slow = self.planned_python > 0.01 * self.planned
            python = f", {self.planned_python:.3f} s of it Python's" * slow
            counted = ", which counts launches" * slow
            lines.append(
                f"the plan's closed form says {self.planned:.3f} s{python} "
                f"({step / self.planned - 1:+.1%} on the clock{counted})"
            )
        lines.append(f"peak memory on the device: {self.peak_bytes / 2**30:.2f} GiB (simulated)")
        return "\n".join(lines)


# -- Chrome's trace format, which Perfetto opens ---------------------------------------------------
def trace_events(timeline: Timeline) -> list[dict]:
    """Complete events in microseconds: one thread per stream, and one for compute's waits."""
    rows = {name: i for i, name in enumerate(_rows(timeline))}
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": timeline.title}}]
    for name, i in rows.items():
        events.append(
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": name}}
        )
        events.append(
            {"ph": "M", "pid": 0, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}}
        )
    for s in [*timeline.waits, *timeline.slices]:
        events.append({
            "ph": "X", "pid": 0, "tid": rows[s.stream], "name": s.name, "cat": s.turn,
            "ts": round(1e6 * s.start, 3), "dur": round(1e6 * (s.end - s.start), 3),
            "args": {"turn": s.turn, "bytes": s.nbytes} if s.nbytes else {"turn": s.turn},
        })  # fmt: skip
    return events


def _rows(timeline: Timeline) -> list[str]:
    named = dict.fromkeys(s.stream for s in [*timeline.waits, *timeline.slices])
    return sorted(named, key=lambda name: (name.startswith("copies"), name != "waits", name))


def write_trace(timeline: Timeline, path) -> Path:
    """The trace as a JSON file; its path. Open it at ui.perfetto.dev or chrome://tracing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))
    return path
