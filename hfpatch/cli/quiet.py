"""What a command's terminal shows: no log lines of other libraries on their own optional parts, and
a line every few seconds while something takes long.
"""

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE = 5.0  # seconds before the first line of progress

# torchao logs extensions built for other Pythons, torch's pytree enums of torchao, bitsandbytes an
# optional kernel of the hub for its CPU path, DeepSpeed the accelerator that it found.
FOREIGN = ("torchao", "torch.utils._pytree", "bitsandbytes", "DeepSpeed")


def quiet() -> None:
    """Shows only errors of these loggers and of those below them. The filter holds even if a library
    sets its logger's level during import.
    """
    for name in FOREIGN:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.addFilter(_errors_alone)  # once, however often it is called
    # PEFT reads a property that transformers renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def _errors_alone(record) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def progress(what: str, shown: bool = True) -> Iterator[None]:
    """Says on stderr what runs, and for how long already: after PAUSE seconds, and ever more rarely."""
    ended = threading.Event()
    began = time.monotonic()

    def say():
        pause = PAUSE
        while not ended.wait(pause):
            print(f"hfpatch: {what}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            pause *= 1.5

    if shown:
        threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
