"""A lock on a run's folder, and locks that killed builds of torch's extensions left."""

import contextlib
import fcntl
import os
import time
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


BUILD_SECONDS = 600  # no file of an operator takes longer to compile


def left_by_builds() -> list[Path]:
    """Locks of builds of torch's C++ extensions, such as DeepSpeed's Adam, that were killed: a
    process that needs the extension waits for the lock forever."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = [path for depth in ("*", "*/*") for path in root.glob(f"{depth}/lock")]
    return [path for path in locks if time.time() - path.stat().st_mtime > BUILD_SECONDS]
