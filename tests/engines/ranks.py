"""Ranks that begin at once: forks of one process that has imported what all workers import.

A rank that imports torch, transformers and DeepSpeed by itself takes eight seconds to begin, more
than most workers run. What real launchers do is tested where they are meant: test_multinode.py,
ZeRO in test_launch.py, tests/trainer/test_run_module.py.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "deepspeed"]
)


def start(worker: str, words: list[str], variables: dict[str, str], ranks: int, log: Path) -> list:
    """Processes that run the worker's script, each with the variables of its rank; their output is
    appended to the log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(ranks):
        mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        mine = {name: str(value) for name, value in mine.items()} | shared if ranks > 1 else {}
        given = (worker, words, variables | mine, str(log))
        processes.append(_server.Process(target=_run, args=given))
        with mock.patch.dict(os.environ, variables, clear=True):  # the server's, once it begins
            processes[-1].start()
    return processes


def wait(processes: list, seconds: float) -> int | str:
    """The exit code of all; one that fails ends the others, as under torchrun."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.exitcode for process in processes]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            _end(processes)
            return failed[0] if failed else 0
        time.sleep(0.02)
    _end(processes)
    return f"none after {seconds} s"


def _end(processes: list) -> None:
    for process in processes:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(worker: str, words: list[str], variables: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(HERE)
    sys.argv = [worker, *words]
    sys.path[:0] = [str(HERE)]
    runpy.run_path(worker, run_name="__main__")
