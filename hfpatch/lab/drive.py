"""A disk on the clock (clock.py): files that threads write and read through bounce buffers, as
store/disk.py has them.

A piece is written once it is in its buffer, and the host waits for a buffer before it fills it. A
piece is read as soon as a buffer is free and what is read was written.
"""

from collections import deque

from hfpatch.store.disk import BUFFERS, PIECE, RESERVE


def pieces(nbytes: int) -> list[int]:
    """Bytes of each bounce buffer that a tensor goes through."""
    return [min(PIECE, nbytes - at) for at in range(0, nbytes, PIECE)]


class Drive:
    """rates: bytes/s (written, read). Times are seconds on the clock."""

    def __init__(self, rates: tuple[float, float]):
        self.write_rate, self.read_rate = rates
        self.written = self.was_read = 0.0  # when the last piece was
        # when each buffer is free again
        self.write_bounces: deque[float] = deque([0.0] * BUFFERS, BUFFERS)
        self.read_bounces: deque[float] = deque([0.0] * (BUFFERS - RESERVE), BUFFERS - RESERVE)

    def writable(self) -> float:
        """When the next buffer for writing is free."""
        return self.write_bounces[0]

    def write(self, copied: float, nbytes: int) -> None:
        """A piece that is in its buffer at `copied`."""
        self.written = max(self.written, copied) + nbytes / self.write_rate
        self.write_bounces.append(self.written)

    def read(self, asked: float, nbytes: int) -> float:
        """When a piece that the host asks for is in its buffer."""
        start = max(self.was_read, self.written, asked, self.read_bounces[0])
        self.was_read = start + nbytes / self.read_rate
        return self.was_read

    def landed(self, copied: float, nbytes: int) -> None:
        """A piece that was read is on the device at `copied`."""
        self.read_bounces.append(copied)
