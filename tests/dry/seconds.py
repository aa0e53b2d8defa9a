"""The seconds of a step by its real calls: the log's launches, copies, events and waits, on streams
that are clocks.

    with Priced(gpu):                           each operation writes its seconds into the log
        loss.backward()
    replayed(lines_of(log, "step 2"), gpu)      on any machine

An operation takes what the planner's clock says (hfpatch/lab/clock.py): its FLOPs and bytes over the
card's rates, in equal parts for each of its launches. All else is that of the real step: what is
launched where, which stream or host waits for what, and how many bytes each copy has.
"""

import collections
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from hfpatch.lab import clock
from hfpatch.lab.hardware import Gpu

COMPUTE = "0"  # torch's default stream
LINK = {"d2h": clock.TO_HOST, "h2d": clock.TO_DEVICE}


class Pen(clock.ClockDevice):
    """Writes an operation's seconds into the log, behind its launches."""

    def launch(self, seconds: float) -> None:
        import stub  # of a process on the dry device alone

        stub.mark(f"seconds {seconds}")

    def copy(self, nbytes: int, direction: str) -> None:
        self.launch(0.0)  # its bytes are in the log


class Priced(clock.ClockFollower):
    """Context in which each operation of a step on the dry device is priced."""

    def __init__(self, gpu: Gpu):
        super().__init__(
            Pen(gpu, torch.device("cuda")),
            # Real tensors have no values behind them to know.
            shadows=SimpleNamespace(
                fake_mode=None, answer=lambda *_: (False, None), run=lambda *_: None
            ),
        )

    def _accumulates(self, args, kwargs) -> bool:
        return False  # the engine's thread has no Python caller to ask; a sum takes its time

    def _direction(self, func, args) -> str | None:
        if func is not torch.ops.aten.copy_.default:
            return None
        ways = {("cpu", "cuda"): clock.TO_HOST, ("cuda", "cpu"): clock.TO_DEVICE}
        return ways.get((args[0].device.type, args[1].device.type))


def lines_of(path, mark: str) -> list[list[str]]:
    """The words of the log's lines behind a mark."""
    words = [line.split() for line in Path(path).read_text(errors="replace").splitlines()]
    return words[words.index(["M", *mark.split()]) :]


@dataclass
class Replayed:
    """Attributes, in seconds:
    seconds: of the step. exposed: compute waits for copies.
    lost: of operations that launched nothing here.
    """

    exposed: float = 0.0
    lost: float = 0.0
    host: float = 0.0
    streams: collections.Counter = field(default_factory=collections.Counter)
    links: collections.Counter = field(default_factory=collections.Counter)
    events: dict = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.streams[COMPUTE]

    def work(self, stream: str, seconds: float, link: str | None = None) -> None:
        """A launch, or a copy over a link that copies in its direction share."""
        self.host += clock.LAUNCH_SECONDS
        start = max(self.streams[stream], self.host, self.links[link] if link else 0.0)
        self.streams[stream] = start + seconds
        if link:
            self.links[link] = self.streams[stream]

    def event(self, words: list[str]) -> None:
        """E record EVENT stream S at N, or E wait EVENT stream S."""
        _, verb, event, _, stream, *_ = words
        if verb == "record":
            self.events[event] = max(self.streams[stream], self.host)
            return
        time = self.events.get(event, 0.0)
        if stream == COMPUTE:
            self.exposed += max(0.0, time - max(self.streams[stream], self.host))
        self.streams[stream] = max(self.streams[stream], time)

    def host_waits(self, words: list[str]) -> None:
        """W CALL [EVENT | stream S]; without either for the whole device."""
        times = self.streams.values()
        if words[-2] == "stream":
            times = [self.streams[words[-1]]]
        elif words[-1] in self.events:
            times = [self.events[words[-1]]]
        self.host = max(self.host, *times, 0.0)


def is_launch(words: list[str]) -> bool:
    return words[0] in "KZ" or words[0] == "C" and words[4] not in LINK


def replayed(lines: list[list[str]], gpu: Gpu) -> Replayed:
    found, launches, share = Replayed(), [], {}
    for number, words in enumerate(lines):
        if is_launch(words):
            launches.append(number)
        elif words[:2] == ["M", "seconds"]:
            share |= dict.fromkeys(launches, float(words[2]) / max(1, len(launches)))
            found.lost += float(words[2]) * (not launches)
            launches = []
    for number, words in enumerate(lines):
        if is_launch(words):
            found.work(words[1], share.get(number, 0.0))
        elif words[0] == "C":
            nbytes = int(words[-1])
            found.work(words[1], nbytes / gpu.link_rate, LINK[words[4]])
        elif words[0] == "E":
            found.event(words)
        elif words[0] == "W":
            found.host_waits(words)
    return found
