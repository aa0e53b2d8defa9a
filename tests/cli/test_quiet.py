"""Our commands say nothing for other libraries."""

import logging
import time

import pytest

from hfpatch.cli import quiet
from hfpatch.cli.main import main
from hfpatch.cli.quiet import FOREIGN, progress


@pytest.fixture
def as_before():
    loggers = [logging.getLogger(name) for name in FOREIGN]
    kept = [(logger.level, list(logger.filters)) for logger in loggers]
    yield
    for logger, (level, filters) in zip(loggers, kept):
        logger.setLevel(level)
        logger.filters[:] = filters


@pytest.mark.parametrize("name", [*FOREIGN, "bitsandbytes.backends.cpu.ops"])
def test_warnings_of_others_are_not_shown_and_errors_are(name, as_before):
    main(["plan", "--abacus"])
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)  # some of them hand nothing on
    if name in FOREIGN:
        logging.getLogger(name).setLevel(logging.INFO)  # as some do while they are imported
    logging.getLogger(name).warning("an optional library is missing")
    logging.getLogger(name).error("it failed")
    logging.getLogger(name).removeHandler(handler)
    assert said == ["it failed"]


def test_what_takes_long_is_said_until_it_ends(monkeypatch, capsys):
    monkeypatch.setattr(quiet, "PAUSE", 0.05)
    with progress("counting"):
        time.sleep(0.3)
    said = capsys.readouterr().err
    assert said.startswith("hfpatch: counting, 0 s\n") and 2 <= said.count("counting") <= 4
    with progress("counting", shown=False):
        time.sleep(0.15)
    assert not capsys.readouterr().err


def test_an_engine_that_does_not_start_is_named(monkeypatch, capsys):
    """DeepSpeed waits for the lock of a build that was killed, for ever and in silence."""

    def waits(argv):
        time.sleep(0.3)
        raise ValueError("hfpatch: it ended.")

    monkeypatch.setattr(quiet, "PAUSE", 0.05)
    monkeypatch.setattr("hfpatch.trainer.arguments.parse", waits)
    main(["train", "--model", "llama-tiny", "--data", "x"])
    assert capsys.readouterr().err.startswith("hfpatch: starting the engine, 0 s\n")
