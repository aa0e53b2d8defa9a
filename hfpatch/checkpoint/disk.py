"""The disk tier: saved tensors as files in a directory of this process, written and read by threads.

A device tensor goes through a pinned bounce buffer: the copy to it runs on the side stream, a thread waits for its event and
writes. Reading is the reverse, started ahead of need. Files go when their tensor is released, when the process exits, and, after a
crash, when the next process opens the same directory.
"""

import atexit
import os
import queue
import shutil
import socket
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from hfpatch.memory.locks import try_lock

PIECE = 64 << 20  # bytes a bounce buffer holds
PREFIX = "hfpatch-"


def sweep(directory: str) -> list[str]:
    """Removes what dead processes of this machine left in `directory`; returns the folders removed.

    A folder is alive while its lock is held: a pid means nothing in another PID namespace, and is used again.
    """
    removed = []
    for entry in os.scandir(directory):
        host = entry.name.removeprefix(PREFIX).rpartition("@")[0].rpartition("-")[0]
        if not (entry.is_dir() and entry.name.startswith(PREFIX) and host == socket.gethostname()):
            continue
        try:
            fd = os.open(entry.path, os.O_RDONLY)
        except OSError:
            continue  # somebody else's, or just gone
        if try_lock(fd):
            shutil.rmtree(entry.path, ignore_errors=True)
            removed.append(entry.path)
        os.close(fd)
    return removed


def own_folder(directory: str) -> tuple[str, int]:
    """A new folder of this process in `directory`, and the descriptor that holds its lock; dead ones are swept first."""
    # One at a time: a folder without its lock yet would look dead.
    gate = os.open(directory, os.O_RDONLY)
    try:
        try_lock(gate, wait=True)
        sweep(directory)
        path = tempfile.mkdtemp(prefix=f"{PREFIX}{socket.gethostname()}-{os.getpid()}@", dir=directory)
        held = os.open(path, os.O_RDONLY)
        try_lock(held)
        return path, held
    finally:
        os.close(gate)


class File:
    """One saved tensor's bytes in a file."""

    def __init__(self, path: str):
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.writes: list[Future] = []

    def wait_written(self) -> None:
        for write in self.writes:
            write.result()

    def remove(self) -> None:
        for write in self.writes:
            if not write.cancel():
                write.exception()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            os.unlink(self.path)


class DiskDirectory:
    """Writes and reads tensors' bytes under a folder of its own in `directory` (bounce buffers come from `pool`)."""

    def __init__(self, directory: str, pool, threads: int = 4, buffers: int = 8):
        os.makedirs(directory, exist_ok=True)
        self.path, self.lock = own_folder(directory)
        self.pool = pool
        self.writers = ThreadPoolExecutor(threads, "hfpatch-write")
        self.readers = ThreadPoolExecutor(threads, "hfpatch-read")
        # Apart, so that prefetched reads that hold their buffers cannot starve the writes they wait for, nor the reverse.
        self.write_buffers, self.read_buffers = queue.SimpleQueue(), queue.SimpleQueue()
        self.unmade = {id(self.write_buffers): buffers, id(self.read_buffers): buffers}
        self.count = 0
        atexit.register(self.close)

    def _buffer(self, buffers) -> Tensor:
        """A free bounce buffer, made on first need; waits for one where all are in use."""
        try:
            return buffers.get_nowait()
        except queue.Empty:
            if self.unmade[id(buffers)]:
                self.unmade[id(buffers)] -= 1
                return self.pool.take(PIECE)
            return buffers.get()

    def write(self, source: Tensor, mark) -> File:
        """Starts writing source (uint8, flat, contiguous). mark() records an event after the copies issued so far."""
        self.count += 1
        file = File(os.path.join(self.path, f"{self.count}.bin"))
        for start in range(0, source.numel(), PIECE):
            piece = source[start : start + PIECE]
            bounce = self._buffer(self.write_buffers)
            bounce[: piece.numel()].copy_(piece, non_blocking=True)
            file.writes.append(self.writers.submit(self._write, file.fd, bounce, piece.numel(), start, mark()))
        return file

    def _write(self, fd, bounce, nbytes, start, event) -> None:
        try:
            event.synchronize()
            view, done = memoryview(bounce.numpy())[:nbytes], 0
            while done < nbytes:
                done += os.pwrite(fd, view[done:], start + done)
        finally:
            self.write_buffers.put(bounce)

    def read(self, file: File, saved, a: int, b: int) -> list:
        """Starts reading rows [a, b) of each batch row of `saved`. Returns jobs for land()."""
        jobs = []
        for row in range(saved.shape[0]):
            first = (row * saved.shape[1] + a) * saved.row_bytes
            nbytes = (b - a) * saved.row_bytes
            jobs.append([(file, first + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)])
        # Only the first piece is started ahead, and two buffers stay for land(): readers ahead must not starve the one waited for.
        head = jobs[0][0] if jobs and jobs[0] else None
        started = self._start(*head) if head and self.read_buffers.qsize() > 2 else None
        return [started, jobs]

    def _start(self, file, first, nbytes):
        return self.readers.submit(self._read, file, self._buffer(self.read_buffers), first, nbytes)

    @staticmethod
    def _read(file, bounce, first, nbytes):
        file.wait_written()
        view, done = memoryview(bounce.numpy())[:nbytes], 0
        while done < nbytes:
            got = os.preadv(file.fd, [view[done:]], first + done)
            if not got:
                raise OSError(f"hfpatch: expected {nbytes} bytes in {file.path}, it ends early; is the disk full?")
            done += got
        return bounce

    def land(self, job: list, destination: Tensor, mark) -> None:
        """Copies what a read job brought into destination [B, t, ...] (contiguous a batch row)."""
        import torch

        started, rows = job
        for row, pieces in enumerate(rows):
            flat, offset = destination[row].view(-1).view(torch.uint8), 0
            for file, first, nbytes in pieces:
                bounce = (started or self._start(file, first, nbytes)).result()
                started = None
                flat[offset : offset + nbytes].copy_(bounce[:nbytes], non_blocking=True)
                offset += nbytes
                self.readers.submit(self._free_after, bounce, mark())

    def _free_after(self, bounce, event) -> None:
        event.synchronize()
        self.read_buffers.put(bounce)

    def close(self) -> None:
        self.writers.shutdown(wait=True)
        self.readers.shutdown(wait=True)
        for buffers in (self.write_buffers, self.read_buffers):
            while not buffers.empty():
                self.pool.give(buffers.get_nowait())
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        atexit.unregister(self.close)
