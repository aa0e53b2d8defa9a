"""A run whose loss is NaN ends with a sentence; what is not finite is never saved in silence."""

import math

import pytest
import tiny
import torch
from transformers import TrainerState
from workbench import history

from hfpatch.trainer import trainer
from hfpatch.trainer.arguments import TrainArguments
from hfpatch.trainer.finite import StopAtNaN

BLOWN = {"learning_rate": 1e38, "max_steps": 8, "lr_scheduler_type": "constant", "warmup_steps": 0}


def test_nan_loss_stops_the_run(run_train):
    code, _, err, folder = run_train("stops", **BLOWN)
    assert code != 0 and "hfpatch: the loss must be finite, got nan at step" in err
    assert not list(folder.glob("**/*.safetensors"))


def test_flag_trains_on_logs_nan_and_says_what_it_saves(run_train):
    code, _, err, folder = run_train("on", **BLOWN, nan_steps=0)
    assert code == 0 and "hfpatch: saving at step 8 although model." in err
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    model = tiny.llama()
    args = TrainArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    run = trainer.Trainer(model, args)
    model.model.norm.weight.data[3] = value
    with pytest.raises(
        ValueError,
        match="the weights to save at step 0 must be finite, and model.norm.weight holds nan or infinity",
    ):
        run.save_model()
    assert not list(tmp_path.glob("**/*.safetensors"))
