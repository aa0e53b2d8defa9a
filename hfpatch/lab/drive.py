"""A disk on the clock (clock.py). Threads write and read files through bounce buffers, as in
store/disk.py.

The host waits for a free buffer, fills it, and a thread writes it. A read begins once a buffer is
free and the file's earlier writes are done.
"""

from collections import deque

# Pieces of a bounce buffer's size on their way to the disk, and back.
BUFFERS = 8
READS = 6


class Drive:
    """rates: bytes/s (written, read). Times are seconds on the clock."""

    def __init__(self, rates: tuple[float, float]):
        self.rates = rates
        self.written = 0.0  # the end of the last write
        self.was_read = 0.0  # the end of the last read
        # The time at which each buffer is free again, the next one first.
        self.write_bounces = deque([0.0] * BUFFERS, BUFFERS)
        self.read_bounces = deque([0.0] * READS, READS)

    def write(self, copied: float, nbytes: int) -> None:
        """Writes a piece that is in its buffer at the time `copied`."""
        self.written = max(self.written, copied) + nbytes / self.rates[0]
        self.write_bounces.append(self.written)

    def read(self, asked: float, nbytes: int) -> float:
        """The time at which a piece, requested at `asked`, is in its buffer."""
        start = max(self.was_read, self.written, asked, self.read_bounces[0])
        self.was_read = start + nbytes / self.rates[1]
        return self.was_read
