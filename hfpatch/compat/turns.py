"""One model, one thread at a time."""

import threading
from weakref import WeakValueDictionary

WAIT_SECONDS = 1800.0
_LOCKS = WeakValueDictionary()  # by id(config)


class Turn:
    """The lock of one patched model: held during each forward and each backward node, never between
    them.

    It is reentrant. Models with one config object share it: the config names their attention while
    one of them runs. A copy or a pickle of the model has its own lock.
    """

    def __init__(self, config=None):
        self.lock = threading.RLock()
        if config is not None:
            self.lock = _LOCKS.setdefault(id(config), self.lock)

    def __deepcopy__(self, memo):
        return Turn()

    def __reduce__(self):
        return Turn, ()

    def __enter__(self):
        # On a GPU autograd has its own threads. One that waits for a forward which waits for it
        # would never return.
        if not self.lock.acquire(timeout=WAIT_SECONDS):
            raise RuntimeError(
                "hfpatch: this model's other thread did not end its forward or backward within "
                f"{WAIT_SECONDS:.0f} s. Take gradients of a patched model outside of its forward "
                "(not in a forward hook)."
            )
        return self

    def __exit__(self, *exc):
        self.lock.release()
