"""Happens-before over a log of the dry device.

    order.py LOG [MARK]      prints each kind of conflict, and how many of them have no order

Uses of pinned memory by the host itself, copies, fills, products, FlashAttention's and cuDNN's attention, Triton kernels and ATen's
element-wise kernels are accesses of memory. Two accesses of the same bytes on different streams, one
of them a write, conflict: one must be ordered before the other, by events or because the host waited
between them. Device addresses are never used twice for different memory, so that no freed memory is
taken for another's.

Of copies, fills and products all bytes are known; of ATen's kernels at least a byte an element. Of
the others only the first byte behind each pointer is, and not whether it is read or written: such a
conflict is "unsure", since both sides may only read.
"""

import collections
import sys
from dataclasses import dataclass, field
from pathlib import Path

GRAIN = 21  # accesses are looked up by pieces of 2 MiB
REMEMBERED = 64  # of the latest accesses of a piece


class Clocks:
    """Vector clocks of streams, of the host and of events, from the log's E and W lines."""

    def __init__(self):
        self.streams = collections.defaultdict(collections.Counter)
        self.host = collections.Counter()
        self.events: dict[str, collections.Counter] = {}

    def operation(self, stream: str, number: int) -> collections.Counter:
        """The stream's clock at its operation of this number."""
        clock = self.streams[stream]
        _merge(clock, self.host)
        clock[stream] = number
        return clock

    def event(self, words: list[str]) -> None:
        """E record EVENT stream S at N, or E wait EVENT stream S."""
        if words[1] == "record":
            self.events[words[2]] = self.operation(words[4], int(words[6])).copy()
        else:
            clock = self.streams[words[4]]
            _merge(clock, self.events.get(words[2], {}))

    def by_host(self) -> collections.Counter:
        """The host's clock at a use of memory by itself."""
        self.host["host"] += 1
        return self.host

    def host_waited(self, words: list[str]) -> None:
        """W CALL [EVENT | stream S]; without either for the whole device."""
        if words[-2] == "stream":
            _merge(self.host, self.streams[words[-1]])
        elif words[-1].startswith("0x"):
            _merge(self.host, self.events.get(words[-1], {}))
        else:
            for clock in list(self.streams.values()):
                _merge(self.host, clock)


def _merge(into: collections.Counter, other) -> None:
    for stream, number in other.items():
        if number > into[stream]:
            into[stream] = number


@dataclass(frozen=True, slots=True)
class Access:
    start: int
    end: int
    stream: str
    number: int
    use: str  # r, w or ?
    kind: str
    line: int

    def conflicts(self, other: "Access") -> bool:
        overlap = self.start < other.end and other.start < self.end
        return overlap and self.stream != other.stream and (self.use != "r" or other.use != "r")

    def hides(self, other: "Access", ordered: bool) -> bool:
        """Whether whoever is ordered after self is after the other too, and conflicts with both."""
        covers = self.start <= other.start and other.end <= self.end
        return covers and ordered and (self.use == "w" or other.use == "r" == self.use)


@dataclass
class Found:
    """Conflicts by kind: how many there are, how many without an order, and the first such pair of
    lines."""

    seen: collections.Counter = field(default_factory=collections.Counter)
    unordered: collections.Counter = field(default_factory=collections.Counter)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)

    def races(self) -> dict[str, int]:
        """Conflicts without an order of which both sides are sure."""
        return {kind: n for kind, n in self.unordered.items() if "unsure" not in kind}


def conflicts(path: str | Path, mark: str | None = None) -> Found:
    """The conflicts of a log. mark: they count behind this mark only."""
    clocks, latest, found = Clocks(), collections.defaultdict(list), Found()
    counts = mark is None
    with open(path, errors="replace") as log:
        for number, line in enumerate(log, 1):
            letter, words = line[0], line.split()
            if letter == "M" and words[1] == "host" or words[:2] == ["H", "unpin"]:
                clock = clocks.by_host()
                access = _by_host(words, clock["host"], number)
                _compare(access, clock, latest, found if counts else None)
            elif letter == "M":
                counts = counts or line[2:].strip() == mark
            elif letter == "E":
                clocks.event(words)
            elif letter == "W":
                clocks.host_waited(words)
            elif letter in "CZK":
                clock = clocks.operation(words[1], int(words[3].rstrip(":")))
                for access in _accesses(words, number):
                    _compare(access, clock, latest, found if counts else None)
    return found


def _by_host(words: list[str], number: int, line: int) -> Access:
    """Of the words M host USE POINTER BYTES, or H unpin BYTES POINTER."""
    if words[0] == "H":
        words = ["M", "host", "w", words[3], words[2]]
    start = int(words[3], 16)
    return Access(start, start + int(words[4]), "host", number, words[2], "the host", line)


def _accesses(words: list[str], line: int) -> list[Access]:
    """Of the words LETTER STREAM at NUMBER: KIND [pageable] (USE POINTER BYTES)..."""
    stream, number, name = words[1], int(words[3].rstrip(":")), words[4]
    kind = {"C": f"copy {name}", "Z": "fill"}.get(words[0]) or _kernel(name)
    rest = [word for word in words[5:] if word != "pageable"]
    rest = rest[len(rest) % 3 :]  # a library's name may have a second word
    found = []
    for i in range(0, len(rest), 3):
        start = int(rest[i + 1], 16)
        # The driver copies pageable memory through a buffer of its own, before it returns.
        if "pageable" in words and start >> 44 != 2:
            continue
        end = start + max(1, int(rest[i + 2]))
        found.append(Access(start, end, stream, number, rest[i], kind, line))
    return found


def _kernel(name: str) -> str:
    for word in ("cublas", "cudnn", "flash", "elementwise"):
        if word in name:
            return {"cublas": "product", "elementwise": "ATen kernel"}.get(
                word, f"{word} attention"
            )
    return f"kernel {name}"


def _compare(access: Access, clock, latest, found: Found | None) -> None:
    """Notes the access's conflicts with earlier ones. found: None where they do not count."""
    compared = set()
    for piece in range(access.start >> GRAIN, (access.end - 1 >> GRAIN) + 1):
        kept = []
        for other in latest[piece]:
            ordered = other.stream == access.stream or clock[other.stream] >= other.number
            if found is not None and id(other) not in compared and access.conflicts(other):
                compared.add(id(other))
                _note(access, other, ordered, found)
            if not access.hides(other, ordered):
                kept.append(other)
        kept.append(access)
        latest[piece] = kept[-REMEMBERED:]


def _note(access: Access, other: Access, ordered: bool, found: Found) -> None:
    verbs = {"r": "read", "w": "write", "?": "use"}
    what = f"{verbs[access.use]} by {access.kind} after {verbs[other.use]} by {other.kind}"
    if "?" in (access.use, other.use):
        what += " (unsure)"
    found.seen[what] += 1
    if not ordered:
        found.unordered[what] += 1
        found.first.setdefault(what, (access.line, other.line))


def main(path: str, mark: str | None = None) -> None:
    found = conflicts(path, mark)
    for what, count in sorted(found.seen.items()):
        bad = found.unordered[what]
        lines = "{} against {}".format(*found.first[what]) if bad else ""
        print(f"{count:8} {what}: {f'{bad} without an order, first {lines}' if bad else 'ordered'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
