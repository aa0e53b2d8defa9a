"""A clean stop after the current step: on SIGTERM, Ctrl-C, the launcher's end, the time limit."""

import os
import signal
import time

import torch
from transformers import TrainerCallback


class StopCleanly(TrainerCallback):
    """SIGTERM, SIGINT, a lost launcher and the time limit end training; the first three save.

    time_limit: seconds of training, 0 for none. After training, `signal` is the number of the
    signal that stopped it (SIGTERM for a lost launcher), 0 for none; `code` is the exit code, 128 +
    signal or 0; `late`: the time limit stopped it.
    """

    def __init__(self):
        self.time_limit, self.signal, self.late = 0.0, 0, False
        self._heard = 0
        self._before = {}
        self._began = 0.0
        self._launcher = launcher()

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

        def note(number, frame):
            self._heard = number
            signal.signal(number, self._before[number])  # a second signal ends the process at once
            os.write(
                2,
                b"hfpatch: stopping after the step in hand, with a checkpoint; a second signal "
                b"ends at once.\n",
            )

        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            # SIG_IGN: as under nohup, or in a script's background. A run begins again where it
            # looks for its batch size.
            if before is not signal.SIG_IGN and number not in self._before:
                self._before[number] = before  # first: the next signal may come at once
                signal.signal(number, note)

    def on_step_end(self, args, state, control, **kwargs):
        if self._orphaned:  # accelerate's launcher of one process leaves it behind
            self._heard = self._heard or signal.SIGTERM
        late = bool(self.time_limit) and time.monotonic() - self._began > self.time_limit
        # A signal reaches the ranks at different steps.
        heard, late = highest(args, self._heard, late)
        if heard:
            self.signal, control.should_save, control.should_training_stop = heard, True, True
        elif late:
            self.late = True
            control.should_training_stop = control.should_log = True

    def on_train_end(self, args, state, control, **kwargs):
        while self._before:
            signal.signal(*self._before.popitem())


def highest(args, *numbers: int) -> tuple[int, ...]:
    """The maximum of each number over all ranks, so that all ranks act at the same step."""
    if args.world_size <= 1:
        return numbers
    numbers = torch.tensor(numbers, dtype=torch.int32, device=args.device)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    return tuple(numbers.tolist())


def launcher() -> int | None:
    """The parent's pid if a launcher started this process; None for a shell, which may end first.

    torchrun and deepspeed set LOCAL_RANK; accelerate sets its own names for a single process.
    """
    launched = {"LOCAL_RANK", "ACCELERATE_DYNAMO_MODE"} & os.environ.keys()
    return os.getppid() if launched else None
