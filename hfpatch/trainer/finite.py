"""Ends a run whose loss or weights are no longer finite, and keeps what was saved before.

Stock leaves such losses out of the mean that it logs (`logging_nan_inf_filter`): the log says 0,
and the run saves NaN.
"""

import sys

import torch
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

from hfpatch.trainer.stop import highest


class FiniteTrainer(StockTrainer):
    """transformers' Trainer that stops after args.nan_steps steps in a row without a finite loss.

    All ranks stop at once. It saves no weights that are not finite; with nan_steps 0 it saves them
    and says so. Raises ValueError.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._losses = StopAtNaN(self.args.nan_steps)
        self.add_callback(self._losses)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.note(loss.detach())
        return loss

    def save_model(self, *args, **kwargs):
        # Here rather than in _save, where one rank alone would know, and where stock catches
        # ValueError under ZeRO-3.
        name = next(
            (n for n, p in self.model.named_parameters() if p.requires_grad and not _finite(p)), ""
        )
        if any(highest(self.args, bool(name))):
            found = f"{name or 'a weight of another rank'} holds nan or infinity"
            if self.args.nan_steps:
                raise ValueError(
                    f"hfpatch: the weights to save at step {self.state.global_step} must be "
                    f"finite, and {found}. Lower --learning_rate and go on from an earlier "
                    "checkpoint (--nan_steps 0 saves them all the same)."
                )
            print(
                f"hfpatch: saving at step {self.state.global_step} although {found}.",
                file=sys.stderr,
                flush=True,
            )
        return super().save_model(*args, **kwargs)


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
        if self._row >= self.steps:
            raise ValueError(
                f"hfpatch: the loss must be finite, got {self._last.item()} at step "
                f"{state.global_step}, the last of {self._row} such steps in a row. Lower "
                "--learning_rate, look at the data with --show_batch, and go on from an earlier "
                "checkpoint (--nan_steps 0 trains on)."
            )


def _finite(parameter) -> bool:
    """Whether this rank's part of a parameter (all of it, or its shard) is finite."""
    part = getattr(parameter, "ds_tensor", parameter).detach()
    part = part.to_local() if hasattr(part, "to_local") else part
    if part.numel() == 0 or not part.is_floating_point():
        return True
    # aminmax carries nan along and allocates nothing of the weight's size.
    return bool(torch.isfinite(torch.stack(part.aminmax())).all())
