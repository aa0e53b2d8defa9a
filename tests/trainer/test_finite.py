"""A run whose loss is NaN ends with a sentence."""

import math

import pytest
import torch
from transformers import TrainerControl, TrainerState
from workbench import history

from hfpatch.trainer.arguments import TrainArguments
from hfpatch.trainer.stop import StopAtNaN

BLOWN = {"learning_rate": 1e38, "max_steps": 8, "lr_scheduler_type": "constant", "warmup_steps": 0}


@pytest.mark.parametrize("steps, row", [(8, 3), (2, 1)])
def test_nan_loss_stops_the_run(run_train, steps, row):
    """No checkpoint of such a step takes the place of a good one, and no model is saved."""
    code, _, err, folder = run_train(
        "stops", **BLOWN | {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
    )
    assert code != 0 and "hfpatch: the loss must be finite, got nan at step" in err
    assert f"the last of {row} such steps" in err
    assert {path.parent.name for path in folder.glob("**/*.safetensors")} == {"checkpoint-1"}


def test_flag_trains_on_and_logs_nan(run_train):
    code, _, err, folder = run_train("on", **BLOWN, nan_steps=0)
    assert code == 0, err
    assert math.isnan(history(folder)[-2]["loss"]), "stock logs 0"


def test_only_steps_in_a_row_count():
    stop, steps, args = StopAtNaN(2), 0, TrainArguments(output_dir="unused", use_cpu=True)
    for losses in ([1.0, math.nan], [1.0, 1.0], [math.inf, 1.0], [math.nan, 1.0]):
        for loss in losses:
            stop.note(torch.tensor(loss))
        steps += 1
        if steps == 4:
            with pytest.raises(ValueError, match="the last of 2 such steps"):
                stop.on_step_end(args, TrainerState(global_step=steps), TrainerControl())
        else:
            stop.on_step_end(args, TrainerState(global_step=steps), TrainerControl())
