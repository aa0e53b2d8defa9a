"""Ends a run whose loss is no longer finite, and keeps what was saved before.

Stock leaves such losses out of the mean that it logs (`logging_nan_inf_filter`): the log says 0,
and the run saves NaN.
"""

import torch
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

from hfpatch.trainer.stop import highest


class FiniteTrainer(StockTrainer):
    """transformers' Trainer that stops after args.nan_steps steps in a row without a finite loss.

    All ranks stop at once. Such steps save no checkpoint, and a run that ends with one saves no
    model. Raises ValueError.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._losses = StopAtNaN(self.args.nan_steps)
        self.add_callback(self._losses)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.note(loss.detach())
        return loss


class StopAtNaN(TrainerCallback):
    """Ends training after `steps` steps in a row without a finite loss; 0 never does."""

    def __init__(self, steps: int):
        self.steps, self._row, self._bad, self._last = steps, 0, None, None

    def note(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's loss, a scalar on any device, without waiting for its value."""
        bad = ~torch.isfinite(loss)
        self._bad, self._last = bad if self._bad is None else self._bad | bad, loss

    def on_step_end(self, args, state, control, **kwargs):
        bad, self._bad = self._bad, None
        if not self.steps:
            return
        self._row = self._row + 1 if any(highest(args, bad is not None and bool(bad))) else 0
        if self._row:
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
