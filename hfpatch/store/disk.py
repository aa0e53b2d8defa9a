"""The disk tier: saved tensors in unnamed files of a directory, written and read by threads.

A file is unlinked as soon as it is open. Its last user frees it, also after a crash, so no process
has leftovers to sweep. A tensor goes through host memory of the pool: the copy stream fills it, and
threads wait for the copy's event and write. A read does the reverse, started ahead of need. Each
wait is for work that was queued before it, so waits cannot form a circle, wherever a step was
interrupted.
"""

import os
import tempfile
from collections import deque
from concurrent.futures import Future

from torch import Tensor

from hfpatch.store.pool import Loan

PIECE = 64 << 20  # bytes that one thread writes or reads at a time
THREADS = 8
UNDER_WAY = 2  # tensors that wait to be written, and tiles on their way to the device


class File:
    """One saved tensor's bytes."""

    def __init__(self, directory: str):
        try:
            os.makedirs(directory, exist_ok=True)
            self.fd, path = tempfile.mkstemp(prefix="hfpatch-", dir=directory)
        except OSError as error:
            raise OSError(
                error.errno,
                f"hfpatch: no file can be made in {directory}: {error.strerror}. Pass another "
                "directory as Checkpointing(offload=...)",
            ) from error
        os.unlink(path)
        self.directory = directory
        self.writes: list[Future] = []

    def wait_written(self) -> None:
        for write in self.writes:
            write.result()

    def __del__(self, close=os.close):
        if hasattr(self, "fd"):
            close(self.fd)


class DiskDirectory:
    """Writes and reads tensors' bytes in `directory`, through host memory of `pool`."""

    def __init__(self, directory: str, pool):
        self.directory = directory
        self.pool = pool
        self.device = pool.device
        self.threads = self.device.threads(THREADS, "hfpatch-disk")
        self.writing: deque[list[Future]] = deque()
        # [host memory, event of its copy to the device], the oldest first
        self.landing: deque[list] = deque()

    def _jobs(self, work, file: File, at: int, loan: Loan, start: int, stop: int, *args) -> list:
        """Threads that move bytes start to stop of the loan, from byte `at` of the file on."""
        jobs = []
        for a in range(start, stop, PIECE):
            bounds = (a, min(a + PIECE, stop))
            jobs.append(self.threads.submit(work, file, at + a - start, loan, bounds, *args))
        return jobs

    # -- writing -----------------------------------------------------------------------------------
    def write(self, source: Tensor, stream, file: File, at: int = 0) -> None:
        """Starts writing source (uint8, flat, contiguous) to a file from byte `at` on. stream: the
        current one.
        """
        while len(self.writing) >= UNDER_WAY:
            for job in self.writing.popleft():
                job.exception()  # waits; the reader of the file raises it
        nbytes = source.numel()
        loan = self.pool.take(nbytes)
        loan.bytes[:nbytes].copy_(source, non_blocking=self.device.pins)
        copied = self.device.mark(stream, blocking=True)
        jobs = self._jobs(self._write, file, at, loan, 0, nbytes, copied)
        self.writing.append(jobs)
        file.writes += jobs

    def _write(self, file: File, at: int, loan: Loan, bounds: tuple[int, int], copied) -> None:
        self.device.synchronize(copied)
        start, stop = bounds
        view = self.device.host_bytes(loan.bytes, writes=False)[start:stop]
        try:
            while view:
                done = os.pwrite(file.fd, view, at)
                at += done
                view = view[done:]
        except OSError as error:
            raise OSError(
                error.errno,
                f"hfpatch: {stop - start} bytes could not be written to {file.directory}: "
                f"{error.strerror}. Free space there, or pass another directory as "
                "Checkpointing(offload=...)",
            ) from error

    # -- reading -----------------------------------------------------------------------------------
    def read(self, saved, a: int, b: int) -> tuple[Loan, list[Future]]:
        """Starts reading tokens [a, b) of each batch row of `saved`, one behind the other."""
        nbytes = (b - a) * saved.row_bytes
        loan = self.pool.take(saved.shape[0] * nbytes)
        jobs = []
        for row in range(saved.shape[0]):
            at = (row * saved.shape[1] + a) * saved.row_bytes
            jobs += self._jobs(self._read, saved.file, at, loan, row * nbytes, (row + 1) * nbytes)
        return loan, jobs

    def _read(self, file: File, at: int, loan: Loan, bounds: tuple[int, int]) -> None:
        file.wait_written()
        view = self.device.host_bytes(loan.bytes, writes=True)[slice(*bounds)]
        while view:
            done = os.preadv(file.fd, [view], at)
            if not done:
                raise OSError(
                    f"hfpatch: {file.directory} must hold {len(view)} bytes more, and the file "
                    "ends early. Is the disk full?"
                )
            at += done
            view = view[done:]

    def land(self, destination: Tensor, read: tuple[Loan, list[Future]], stream) -> None:
        """Copies what was read into destination [B, t, ...], contiguous per batch row. stream: the
        current one.
        """
        loan, jobs = read
        for job in jobs:
            job.result()
        flat = loan.bytes[: destination.numel() * destination.element_size()]
        source = flat.view(destination.dtype).view(destination.shape)
        landed = [loan, None]  # without an event: all of the device is waited for
        self.landing.append(landed)
        for into, row in zip(destination, source):
            into.copy_(row, non_blocking=self.device.pins)
        landed[1] = self.device.mark(stream, blocking=True)
        # A thread may write to the oldest's memory again. Ctrl-C here leaves more than one to go.
        while len(self.landing) > UNDER_WAY:
            self.device.synchronize(self.landing[0][1])
            self.landing.popleft()

    def close(self) -> None:
        """Frees the host memory. Files that a graph holds stay readable."""
        for jobs in self.writing:
            for job in jobs:
                job.exception()
        self.writing.clear()
        self.landing.clear()  # memory that is freed waits for the device
