"""What other libraries log about their own optional parts, kept off the terminal of our commands."""

import logging

# torchao: extensions built for other Pythons. torch's pytree: enums of torchao. bitsandbytes: a
# kernel of the hub that its CPU path can do without. DeepSpeed: that it found an accelerator.
FOREIGN = ("torchao", "torch.utils._pytree", "bitsandbytes", "DeepSpeed")


def quiet() -> None:
    """Errors of these loggers are shown, and nothing less; a library that sets its level anew while
    it is imported changes nothing.
    """
    for name in FOREIGN:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        if not any(isinstance(known, _ErrorsAlone) for known in logger.filters):
            logger.addFilter(_ErrorsAlone())


class _ErrorsAlone(logging.Filter):
    def filter(self, record) -> bool:
        return record.levelno >= logging.ERROR
