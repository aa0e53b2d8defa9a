"""Callbacks that end training: on a signal, the launcher's end, the time limit, or NaN."""

import math
import os
import signal
import time

import torch
from transformers import TrainerCallback


class StopCleanly(TrainerCallback):
    """SIGTERM, SIGINT, a lost launcher and the time limit end training; the first three save.

    time_limit: seconds of training, 0 for none. After training, `signal` is the number of the
    signal that stopped it (SIGTERM for a lost launcher), 0 for none; `late`: the time limit stopped
    it.
    """

    def __init__(self):
        self.time_limit = 0.0
        self.signal = 0
        self.late = False
        self._heard = 0
        self._before = {}
        self._launcher = launcher()

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()

        def note(number, frame):
            self._heard = number
            signal.signal(number, self._before[number])  # a second signal ends the process at once
            said = "saving a checkpoint after this step, then stopping; signal again to stop now."
            os.write(2, f"hfpatch: {said}\n".encode())

        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            # SIG_IGN: as under nohup, or in a script's background. A run begins again where it
            # looks for its batch size.
            if before is not signal.SIG_IGN and number not in self._before:
                self._before[number] = before  # first: the next signal may come at once
                signal.signal(number, note)

    def on_step_end(self, args, state, control, **kwargs):
        # accelerate's launcher of one process leaves it behind.
        if self._launcher not in (None, os.getppid()):
            self._heard = self._heard or signal.SIGTERM
        late = bool(self.time_limit) and time.monotonic() - self._began > self.time_limit
        # A signal reaches the ranks at different steps.
        heard, late = highest(args, self._heard, late)
        if heard:
            self.signal = heard
            control.should_save = control.should_training_stop = True
        elif late:
            self.late = True
            control.should_training_stop = control.should_log = True

    def on_train_end(self, args, state, control, **kwargs):
        while self._before:
            signal.signal(*self._before.popitem())


class StopAtNaN(TrainerCallback):
    """Ends training after `steps` steps in a row without a finite loss; 0 never does.

    Stock leaves such losses out of the mean that it logs (`logging_nan_inf_filter`): the log says
    0, and the run saves NaN.

    All ranks stop at once. Such steps save no checkpoint, and a run that ends with one saves no
    model: a ValueError.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._row = 0
        self._sum = 0.0  # of the step's losses: finite if all are

    def note(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's loss, a scalar on any device, without waiting for its value."""
        self._last = loss
        self._sum = self._sum + loss

    def on_step_end(self, args, state, control, **kwargs):
        if not self.steps:
            return
        bad = not math.isfinite(self._sum)
        self._sum = 0.0
        if not any(highest(args, bad)):
            self._row = 0
            return
        self._row += 1
        control.should_save = False  # it would take the place of a good checkpoint
        if self._row >= self.steps:
            self._refuse(state)

    def on_train_end(self, args, state, control, **kwargs):
        if self._row:
            self._refuse(state)

    def _refuse(self, state):
        raise ValueError(
            f"hfpatch: the loss must be finite, got {self._last.item()} at step "
            f"{state.global_step}, the last of {self._row} such steps in a row. Lower "
            "--learning_rate, look at the data with --show_batch, and go on from an earlier "
            "checkpoint (--nan_steps 0 trains on)."
        )


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
