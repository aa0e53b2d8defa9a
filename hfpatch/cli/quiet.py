"""Hides other libraries' log lines on their own optional parts from our commands' terminal."""

import logging

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
