"""A lock on a run's folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """Holds the folder for this run. The kernel frees the lock of a process that died, also one of
    another container. Without locks on this file system, nothing is held.

    Raises:
        ValueError: another run holds it.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    held = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"hfpatch: another run writes to {folder}. Wait for it, stop it, or name "
                    "another --output_dir."
                ) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()  # a run that was refused leaves no empty folder
        os.close(held)
