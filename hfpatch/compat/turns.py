"""What stands somewhere for the time of a call: there with the first thread that wants it, gone with the last."""

import os
import threading
import weakref

_told: weakref.WeakSet = weakref.WeakSet()


def told_of_forks(thing):
    """The thing, whose `_at_fork_reinit` (locks have one) is called in a process that was forked: it has no other thread, neither
    one that held a lock nor one that was to do something."""
    _told.add(thing)
    return thing


def lock():
    """A lock that its thread may take again (a signal's handler, in the midst of anything, may run a model), free after a fork."""
    return told_of_forks(threading.RLock())


def _forked() -> None:
    for thing in _told:
        getattr(thing, "_at_fork_reinit", int)()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

LOCK = lock()


class ForNow:
    """A context by which something stands in its place. `enter` puts it there and adds the context to its users, `leave` takes it
    away where none is left; a signal may end either anywhere, and a handler run both of another context there, so that leaving
    twice, or what was never entered, does nothing, and entering puts in place what is wanted after its user is noted.
    """

    __slots__ = ()

    def __enter__(self):
        try:
            with LOCK:
                self.enter()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc):
        try:
            with LOCK:
                self.leave()
        except BaseException:  # Ctrl-C in the midst of it
            with LOCK:
                self.leave()
            raise
