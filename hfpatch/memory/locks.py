"""A lock on an open file that the kernel frees with its process, whatever PID namespace that is in (flock, not pids)."""

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def try_lock(fd: int, *, wait: bool = False) -> bool | None:
    """True: the file is ours until fd is closed. False: another process has it. None: this file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
