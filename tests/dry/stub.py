"""Python's side of the dry device: counters, the log, the stacks of host waits.

It talks to the library that the process has preloaded (device/record.c), so it works only there.
"""

import collections
import ctypes
import sys
import tempfile
import traceback
from pathlib import Path

LIBRARY = ctypes.CDLL(None)
LIBRARY.dry_launches.restype = ctypes.c_long
LIBRARY.dry_complaints.restype = ctypes.c_long
HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
NO_HOOK = ctypes.cast(None, HOOK)


def reset() -> None:
    """Sets every counter to 0."""
    LIBRARY.dry_reset()


def launches() -> int:
    """Kernels launched since reset()."""
    return LIBRARY.dry_launches()


def complaints() -> int:
    """Launches refused, dead pointers and copies out of live memory, since the process began."""
    return LIBRARY.dry_complaints()


def log_to(path: str | Path | None) -> None:
    """Begins a log for order.py at this path, in place of the one before; None ends it."""
    LIBRARY.dry_log_to(None if path is None else str(path).encode())


def mark(text: str) -> None:
    """Writes a line into the log."""
    LIBRARY.dry_mark(text.encode())


def host_uses(use: str, x) -> None:
    """Writes into the log that the host itself reads ("r") or writes ("w") x's memory."""
    mark(f"host {use} {x.data_ptr():#x} {x.numel() * x.element_size()}")


def counts() -> dict[str, collections.Counter]:
    """The counters since reset(), by group.

    "total": launches; "copies" and "bytes": by kind ("h2d", "d2h", "d2d", "h2h"); "call": by
    function of CUDA's interfaces; "kernel": launches by mangled name.
    """
    found = collections.defaultdict(collections.Counter)
    with tempfile.NamedTemporaryFile("r") as file:
        LIBRARY.dry_dump(file.name.encode())
        for line in file.read().splitlines():
            group, rest = line.split(" ", 1)
            name, count = rest.rsplit(" ", 1)
            found[group][name] += int(count)
    return found


class HostWaits:
    """Notes each call that made the host wait, with the Python stack that led to it.

    >>> with HostWaits() as waits:
    ...     loss.item()
    >>> waits.found
    Counter({("cudaMemcpy", "train.py:3 step"): 1})

    A pageable copy with non_blocking counts: the driver waits for it. So does cudaFree.
    """

    DEPTH = 8  # frames that are kept of a stack, the innermost first

    def __enter__(self):
        self.found = collections.Counter()
        self.hook = HOOK(self._note)  # kept: ctypes does not hold it
        LIBRARY.dry_set_hook(self.hook)
        return self

    def _note(self, call: bytes) -> None:
        frames = traceback.extract_stack(sys._getframe(1), limit=14)
        stack = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
        self.found[call.decode(), " < ".join(stack[: -self.DEPTH - 1 : -1])] += 1

    def __exit__(self, *_):
        LIBRARY.dry_set_hook(NO_HOOK)


def _short(path: str) -> str:
    return path.split("site-packages/")[-1].split("/tests/")[-1].split("/hfpatch/", 1)[-1]
