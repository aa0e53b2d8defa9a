"""What a command's terminal shows: no log lines of other libraries on their own optional parts, and
a line every few seconds while something takes long.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE = 5.0  # seconds between two lines of progress

# torchao logs extensions built for other Pythons, torch's pytree enums of torchao, bitsandbytes an
# optional kernel of the hub for its CPU path, DeepSpeed the accelerator that it found.
FOREIGN = ("torchao", "torch.utils._pytree", "bitsandbytes", "DeepSpeed")


def quiet() -> None:
    """Shows only errors of these loggers. The filter holds even if a library sets its logger's
    level again during import.
    """
    for name in FOREIGN:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        if not any(isinstance(known, _ErrorsAlone) for known in logger.filters):
            logger.addFilter(_ErrorsAlone())


class _ErrorsAlone(logging.Filter):
    def filter(self, record) -> bool:
        return record.levelno >= logging.ERROR


@contextmanager
def progress(what: str, shown: bool = True) -> Iterator[None]:
    """Says on stderr every PAUSE seconds what runs, and for how long already."""
    ended, began = threading.Event(), time.monotonic()

    def say():
        while not ended.wait(PAUSE):
            print(f"hfpatch: {what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    if shown:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
