"""The disk tier: saved tensors in unnamed files of a directory, written and read by threads.

A file is unlinked as soon as it is open. Its last user frees it, also after a crash, so no process
has leftovers to sweep. A device tensor goes through a pinned bounce buffer: the copy stream fills
the buffer, a thread waits for the copy's event and writes. A read does the reverse, started ahead
of need. Every wait is for work that began earlier, in a thread that waits for nothing later: no
wait can hang, wherever a step was interrupted.
"""

import os
import tempfile
from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor

from hfpatch.store.pool import Loan, Shelf

PREFIX = "hfpatch-"
# Bounce buffers: bytes of one, buffers per direction, and those among them that do not read ahead.
PIECE, BUFFERS, RESERVE = 64 << 20, 8, 2


class File:
    """One saved tensor's bytes."""

    def __init__(self, directory: str):
        try:
            os.makedirs(directory, exist_ok=True)
            self.fd, path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
        except OSError as error:
            raise OSError(
                error.errno,
                f"hfpatch: no file can be made in {directory}: {error.strerror}. Pass another "
                "directory as Checkpointing(offload=...)",
            ) from error
        os.unlink(path)
        self.directory = directory
        self.writes = []

    def wait_written(self) -> None:
        for write in self.writes:
            write.result()

    def __del__(self, close=os.close):
        if hasattr(self, "fd"):
            close(self.fd)


class Bounce:
    """A pinned buffer between the device and the threads, with its last file job and last copy."""

    def __init__(self, loan: Loan):
        self.loan = loan
        self.bytes = loan.thing.bytes
        self.job: Future | None = None  # the last read or write, in a thread
        self.copied = None  # event of the last copy to the device


def _ended(job: Future | None) -> None:
    """Waits for a thread's job. Ignores its error, which the reader of the file raises."""
    if job is not None:
        job.exception()


class DiskDirectory:
    """Writes and reads tensors' bytes in `directory` (bounce buffers come from `pool`)."""

    def __init__(self, directory: str, pool, threads: int = 4):
        self.directory, self.pool, self.device = directory, pool, pool.device
        self.writers = self.device.threads(threads, "hfpatch-write")
        self.readers = self.device.threads(threads, "hfpatch-read")
        self.write_bounces: deque[Bounce] = deque()
        self.read_bounces = Shelf()

    # -- writing -----------------------------------------------------------------------------------
    def write(self, source: Tensor, stream, file: File, at: int = 0) -> None:
        """Starts writing source (uint8, flat, contiguous) to a file from byte `at` on. stream: the
        current one.
        """
        for start in range(0, source.numel(), PIECE):
            piece = source[start : start + PIECE]
            if len(self.write_bounces) < BUFFERS:
                self.write_bounces.append(Bounce(self.pool.take(PIECE)))
            self.write_bounces.rotate(1)
            bounce = self.write_bounces[0]
            _ended(bounce.job)
            bounce.bytes[: piece.numel()].copy_(piece, non_blocking=self.device.pins)
            written = self.device.mark(stream, blocking=True)
            bounce.job = self.writers.submit(
                self._write, file, bounce.bytes, piece.numel(), at + start, written
            )
            file.writes.append(bounce.job)

    def _write(self, file: File, bounce: Tensor, nbytes: int, start: int, event) -> None:
        self.device.synchronize(event)
        view = self.device.host_bytes(bounce, writes=False)[:nbytes]
        try:
            while view:
                done = os.pwrite(file.fd, view, start)
                start += done
                view = view[done:]
        except OSError as error:
            raise OSError(
                error.errno,
                f"hfpatch: {nbytes} bytes could not be written to {file.directory}: "
                f"{error.strerror}. Free space there, or pass another directory as "
                "Checkpointing(offload=...)",
            ) from error

    # -- reading -----------------------------------------------------------------------------------
    def read(self, file: File, saved, a: int, b: int) -> "Read":
        """Starts reading tokens [a, b) of each batch row of `saved`, as far as buffers are free."""
        pieces = []
        nbytes = (b - a) * saved.row_bytes
        for row in range(saved.shape[0]):
            first = (row * saved.shape[1] + a) * saved.row_bytes
            for at in range(0, nbytes, PIECE):
                pieces.append((row, at, first + at, min(PIECE, nbytes - at)))
        return Read(self, file, pieces)

    def take_bounce(self, wanted: bool) -> Loan | None:
        """A bounce buffer to read into, or None if too many are in use. wanted: never None, a new
        one is made if none is free.
        """
        if not wanted and self.read_bounces.taken >= BUFFERS - RESERVE:
            return None
        if not self.read_bounces.free:
            self.read_bounces.add(Bounce(self.pool.take(PIECE)))
        return self.read_bounces.take()

    def start(self, file: File, bounce: Bounce, first: int, nbytes: int) -> Future:
        bounce.job = self.readers.submit(
            self._read, file, bounce.bytes, first, nbytes, bounce.copied, bounce.job
        )
        return bounce.job

    def _read(
        self, file: File, bounce: Tensor, first: int, nbytes: int, copied, before: Future | None
    ) -> None:
        _ended(before)  # an abandoned read may still fill this buffer
        # A new buffer has no event, and synchronize(None) would wait for the whole device.
        if copied is not None:
            self.device.synchronize(copied)
        file.wait_written()
        view = self.device.host_bytes(bounce, writes=True)[:nbytes]
        while view:
            done = os.preadv(file.fd, [view], first)
            if not done:
                raise OSError(
                    f"hfpatch: {file.directory} must hold {nbytes} bytes, and the file ends early. "
                    "Is the disk full?"
                )
            first += done
            view = view[done:]

    def close(self) -> None:
        """Frees the bounce buffers that no read holds. Files that a graph holds stay readable."""
        for bounce in self.write_bounces:
            _ended(bounce.job)
        self.write_bounces.clear()
        self.read_bounces.drop_free()


class Read:
    """A read of several rows from a file to the device, in pieces: (row, offset in the row, offset
    in the file, bytes).
    """

    def __init__(self, disk: DiskDirectory, file: File, pieces: list):
        self.disk, self.file, self.pieces = disk, file, deque(pieces)
        self.started: deque[tuple[tuple, Loan, Future]] = deque()
        self._ahead()

    def _ahead(self, wanted: bool = False) -> None:
        while self.pieces and (loan := self.disk.take_bounce(wanted)) is not None:
            wanted = False
            piece = self.pieces.popleft()
            self.started.append((piece, loan, self.disk.start(self.file, loan.thing, *piece[2:])))

    def land(self, destination: Tensor, stream) -> None:
        """Copies the rows into destination [B, t, ...], contiguous per batch row. stream: the
        current one.
        """
        while self.pieces or self.started:
            self._ahead(wanted=not self.started)
            (row, offset, _, nbytes), loan, job = self.started.popleft()
            job.result()
            flat = destination[row].view(-1).view(torch.uint8)
            device = self.disk.device
            flat[offset : offset + nbytes].copy_(
                loan.thing.bytes[:nbytes], non_blocking=device.pins
            )
            loan.thing.copied = device.mark(stream, blocking=True)
