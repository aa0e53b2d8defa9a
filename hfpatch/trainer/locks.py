"""A lock on a run's folder, and the locks that killed builds of torch's extensions left."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """Holds the folder for this run. The kernel frees the lock of a process that died, also one of
    another container. Without locks on this file system, nothing is held.

    Raises:
        ValueError: another run holds it.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
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


BUILD_SECONDS = 600  # no file of an operator takes longer to compile


def left_builds() -> list[str]:
    """Locks that killed builds of torch's C++ extensions (DeepSpeed's operators) left. A process
    that needs such an extension waits for ever.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{home}/torch_extensions").expanduser()
    found = []
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        try:
            latest = max(file.stat().st_mtime for file in lock.parent.iterdir())
        except (OSError, ValueError):  # it vanished, so a build is running
            continue
        if time.time() - latest > BUILD_SECONDS:
            found.append(str(lock))
    return found
