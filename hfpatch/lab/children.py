"""Child processes that end with this one."""

import os
import signal
import sys


def ends_with(parent: int):
    """The preexec_fn of a child that Linux ends when the process `parent`, which starts it, is gone,
    however it ended. None on other systems.
    """

    def before_exec() -> None:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was gone before
            os._exit(1)

    return before_exec if sys.platform == "linux" else None
