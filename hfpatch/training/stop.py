"""A clean stop: SIGTERM, Ctrl-C, a launcher that is gone and the time limit end training after the step in hand."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

LAUNCHERS = re.compile(rb"accelerate|torchrun|torch\.distributed|torch/distributed|deepspeed")
# What launchers put into the environment.
MARKS = ({"TORCHELASTIC_RUN_ID"}, {"ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_MODE"})
GONE = -1  # nobody's pid


class StopCleanly(TrainerCallback):
    """SIGTERM, SIGINT, a lost launcher and the time limit end training; all but the last save a checkpoint first.

    time_limit: seconds of training, 0 for none. After training, `signal` is the number of the signal that stopped it (a
    lost launcher counts as SIGTERM), 0 for none; `code` the exit code, 128 + signal or 0.
    """

    def __init__(self):
        self.time_limit, self.signal = 0.0, 0
        self._heard, self._before, self._began = 0, {}, 0.0
        self._launcher = launcher()
        self._begun = threading.Event()
        if self._launcher:
            threading.Thread(target=self._until_training, daemon=True).start()

    def _until_training(self):
        """Ends the process where its launcher goes before the first step: a rank that waits for others would for half an hour."""
        while not self._begun.wait(1.0):
            if self._orphaned:
                os.write(
                    2,
                    b"hfpatch: expected the launcher until training begins, it is gone; launch again, nothing is lost.\n",
                )
                os._exit(1)

    @property
    def _orphaned(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    @property
    def code(self) -> int:
        return 128 + self.signal if self.signal else 0

    @property
    def reason(self) -> str:
        return {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}.get(self.signal, "")

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()
        self._begun.set()

        def note(number, frame):
            self._heard = number
            signal.signal(number, self._before[number])  # a second signal ends the process at once
            os.write(2, b"hfpatch: stopping after the step in hand, with a checkpoint; a second signal ends at once.\n")

        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            # SIG_IGN: as under nohup, or in a script's background. A run begins again where it looks for its batch size.
            if before is not signal.SIG_IGN and number not in self._before:
                self._before[number] = before  # first: the next signal may come at once
                signal.signal(number, note)

    def on_step_end(self, args, state, control, **kwargs):
        if self._orphaned:
            self._heard = self._heard or signal.SIGTERM
        late = bool(self.time_limit) and time.monotonic() - self._began > self.time_limit
        # A signal reaches the ranks at different steps.
        heard, late = highest(args, self._heard, late)
        if heard:
            self.signal, control.should_save, control.should_training_stop = heard, True, True
        elif late:
            control.should_training_stop = control.should_log = True

    def on_train_end(self, args, state, control, **kwargs):
        while self._before:
            signal.signal(*self._before.popitem())


def highest(args, *numbers: int) -> tuple[int, ...]:
    """The highest of each number over all ranks: what one of them knows, all know at the same step."""
    if args.world_size <= 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.int32, device=args.device)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return tuple(numbers.tolist())


def launcher() -> int | None:
    """The parent's pid where that is accelerate launch, torchrun or deepspeed; None for a shell, which may go first.

    GONE where one of them started this process and has ended since: in the seconds that imports take.
    """
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        command = b"" if os.getppid() != parent else None  # no /proc (macOS), or one that hides it
    if command and LAUNCHERS.search(command):
        return parent
    # Taken in by the first process, or about to be. In a container that one may be a launcher of somebody's own.
    left_alone = b"python" not in (command or b"") if parent == 1 else command == b""
    return GONE if left_alone and any(marks <= os.environ.keys() for marks in MARKS) else None
