"""A run whose loss is NaN ends with a sentence."""

import math

import pytest
import torch
from transformers import TrainerState
from workbench import history

from hfpatch.trainer.arguments import TrainArguments
from hfpatch.trainer.finite import StopAtNaN

BLOWN = {"learning_rate": 1e38, "max_steps": 8, "lr_scheduler_type": "constant", "warmup_steps": 0}


def test_nan_loss_stops_the_run(run_train):
    code, _, err, folder = run_train("stops", **BLOWN)
    assert code != 0 and "hfpatch: the loss must be finite, got nan at step" in err
    assert not list(folder.glob("**/*.safetensors"))


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
                stop.on_step_end(args, TrainerState(global_step=steps), None)
        else:
            stop.on_step_end(args, TrainerState(global_step=steps), None)
