"""Trainer with what scripts/train.py adds: decay by dimensions, the cosine's floor, exact evaluation, a clean stop."""

import json
import math
import os
import signal
import time
from functools import partial

import torch
from transformers import TrainerCallback

from hfpatch.checkpoint.device import arrived
from hfpatch.training import schedule
from hfpatch.training.positions import PositionTrainer

RUN_FILE = "hfpatch_run.json"


class Trainer(PositionTrainer):
    """transformers' Trainer; args is a TrainArguments.

    Weight decay touches tensors of two dimensions and more. The cosine schedule has a floor and restarts. The
    evaluation loss is the mean over tokens (stock: over batches), with perplexity and, for plain text, nats per byte.
    """

    def __init__(self, *args, bytes_per_token: float = 0.0, **kwargs):
        self.bytes_per_token = bytes_per_token
        self._eval_sum = None
        super().__init__(*args, **kwargs)
        # Noted before an engine wraps the model: FSDP1 flattens parameters, ZeRO-3 empties them.
        shapes = ((n, getattr(p, "ds_shape", p.shape)) for n, p in self.model.named_parameters())
        self._decayed = schedule.decayed(shapes)

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, _ in model.named_parameters() if schedule.plain_name(name) in self._decayed]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None and self.args.lr_scheduler_type == "cosine":
            factor = partial(
                schedule.cosine,
                warmup=self.args.get_warmup_steps(num_training_steps),
                total=num_training_steps,
                floor=self.args.lr_floor,
                restarts=self.args.lr_restarts,
            )
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, *args, **kwargs):
        """Notes that a step's batches are here before its first is queued: later ones then wait for nothing but themselves."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        for batch in samples:
            arrived(batch)
        return samples, count

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._eval_sum is not None and result[0] is not None and "labels" in inputs:
            count = (inputs["labels"][..., 1:] != -100).sum().to(self._eval_sum.device)
            loss = torch.where(count > 0, result[0], 0.0).to(self._eval_sum)  # stock gives nan where no label is
            self._eval_sum += torch.stack([loss * count, count.to(self._eval_sum)])
        return result

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        dtype = torch.float32 if self.args.device.type == "mps" else torch.float64
        self._eval_sum = torch.zeros(2, dtype=dtype, device=self.args.device)
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, count = self.accelerator.reduce(self._eval_sum, reduction="sum").tolist()
        self._eval_sum = None
        if count and f"{metric_key_prefix}_loss" in output.metrics:
            loss = total / count
            output.metrics[f"{metric_key_prefix}_loss"] = loss
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
            if self.bytes_per_token:
                output.metrics[f"{metric_key_prefix}_nats_per_byte"] = loss / self.bytes_per_token
        return output


class StopCleanly(TrainerCallback):
    """SIGTERM and the time limit end training after the step in hand; SIGTERM saves a checkpoint first.

    time_limit: minutes of training, 0 for none. After training, `reason` is None, "SIGTERM" or "time limit".
    """

    def __init__(self, time_limit: float = 0.0):
        self.time_limit, self.reason = time_limit * 60, None
        self._signal, self._before, self._began = False, None, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()

        def note(number, frame):
            self._signal = True
            signal.signal(number, self._before)  # a second signal ends the process at once

        self._before = signal.signal(signal.SIGTERM, note)

    def on_step_end(self, args, state, control, **kwargs):
        late = bool(self.time_limit) and time.monotonic() - self._began > self.time_limit
        told, late = self._agree(args, self._signal, late)
        if told:
            self.reason, control.should_save, control.should_training_stop = "SIGTERM", True, True
        elif late:
            self.reason, control.should_training_stop = "time limit", True
            control.should_log = True

    def on_train_end(self, args, state, control, **kwargs):
        signal.signal(signal.SIGTERM, self._before)

    def _agree(self, args, *flags):
        """A signal reaches the ranks at different steps: all stop at the step at which any of them knows."""
        if args.world_size <= 1:
            return flags
        flags = torch.tensor(flags, dtype=torch.int32, device=args.device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        return tuple(bool(f) for f in flags.tolist())


class KeepRunFile(TrainerCallback):
    """Writes what a resume must match (data, lengths, batch, seed, model sizes) into each checkpoint."""

    def __init__(self, record: dict):
        self.record = record

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, RUN_FILE), "w", encoding="utf-8") as file:
                json.dump(self.record, file, indent=1)
