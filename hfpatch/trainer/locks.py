"""A lock on an open file, which the kernel frees when its process ends; and locks that killed
builds of torch's extensions left, which nobody frees. (flock, not pids, so that PID namespaces do
not matter.)
"""

import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(fd: int, *, wait: bool = False) -> bool | None:
    """True if the file is ours until fd is closed, False if another process holds it, None if this
    file system has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


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
