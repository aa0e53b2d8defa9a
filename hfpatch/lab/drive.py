"""A disk on the clock (clock.py). Threads write and read files through bounce buffers, as in
store/disk.py.

The host waits for a free buffer, fills it, and a thread writes it. A read begins once a buffer is
free and the file's earlier writes are done.
"""

from collections import deque

from hfpatch.store.disk import PIECE

BUFFERS, READS = 8, 6  # pieces on their way to the disk, and back


def pieces(nbytes: int) -> list[int]:
    """The bytes of each piece of a tensor: one bounce buffer a piece."""
    return [min(PIECE, nbytes - at) for at in range(0, nbytes, PIECE)]


class Drive:
    """rates: bytes/s (written, read). Times are seconds on the clock."""

    def __init__(self, rates: tuple[float, float]):
        self.write_rate, self.read_rate = rates
        self.written = self.was_read = 0.0  # the end of the last write, and of the last read
        # the time at which each buffer is free again
        self.write_bounces: deque[float] = deque([0.0] * BUFFERS, BUFFERS)
        self.read_bounces: deque[float] = deque([0.0] * READS, READS)

    def writable(self) -> float:
        """The time at which the next buffer for writing is free."""
        return self.write_bounces[0]

    def write(self, copied: float, nbytes: int) -> None:
        """Writes a piece that is in its buffer at the time `copied`."""
        self.written = max(self.written, copied) + nbytes / self.write_rate
        self.write_bounces.append(self.written)

    def read(self, asked: float, nbytes: int) -> float:
        """The time at which a piece, requested at `asked`, is in its buffer."""
        start = max(self.was_read, self.written, asked, self.read_bounces[0])
        self.was_read = start + nbytes / self.read_rate
        return self.was_read

    def landed(self, copied: float, nbytes: int) -> None:
        """Frees the buffer of a piece that is on the device at the time `copied`."""
        self.read_bounces.append(copied)
