"""The Trainer of `hfpatch train`: exact evaluation, and a stop at NaN."""

import json
import math
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from hfpatch.trainer.arguments import refusals
from hfpatch.trainer.dataset import IGNORE
from hfpatch.trainer.runs import RUN_FILE
from hfpatch.trainer.sequence import row_ranks_under, share_rows
from hfpatch.trainer.stop import StopAtNaN


class Trainer(StockTrainer):
    """transformers' Trainer; args is a TrainArguments.

    The evaluation loss is the mean over tokens (stock: over batches), with perplexity and, for
    plain text, nats per byte. It stops after args.nan_steps steps in a row without a finite loss.

    bytes_per_token: of plain text, 0.0 for other data. record: what a resume must match, written
    into each checkpoint.
    """

    def __init__(self, *args, bytes_per_token: float = 0.0, record: dict | None = None, **kwargs):
        self.bytes_per_token = bytes_per_token
        self.record = record or {}
        self._eval_sum = None
        with refusals():
            super().__init__(*args, **kwargs)
        self._losses = StopAtNaN(self.args.nan_steps)
        self.add_callback(self._losses)
        self.add_callback(_OwnSteps)

    def create_optimizer(self, *args, **kwargs):
        with refusals():
            return super().create_optimizer(*args, **kwargs)

    def _determine_best_metric(self, *args, **kwargs):
        with refusals((KeyError,)):
            return super()._determine_best_metric(*args, **kwargs)

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except _Finished:
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                self._load_best_model()
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self.is_in_train = False
            return TrainOutput(self.state.global_step, 0.0, {"train_runtime": 0.0})

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.note(loss.detach())
        return loss

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / RUN_FILE).write_text(json.dumps(self.record))

    def save_model(self, output_dir=None, _internal_call=False):
        """As Trainer's, which saves nothing where FSDP's state_dict_type is sharded. Checkpoints
        then hold shards. The model of the run is whole."""
        super().save_model(output_dir, _internal_call)
        kind = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.state_dict_type
        if not _internal_call and "SHARDED" in str(kind):
            self._save(output_dir, self.accelerator.get_state_dict(self.model))

    def _save(self, output_dir=None, state_dict=None):
        """As Trainer's. If a config or the tokenizer cannot be written, the weights still are."""
        try:
            super()._save(output_dir, state_dict)
        except Exception:
            weights = self.model.state_dict() if state_dict is None else state_dict
            if self.args.should_save and weights:  # save_pretrained empties what it has written
                save_torch_state_dict(weights, output_dir or self.args.output_dir)
            raise

    def get_batch_samples(self, *args, **kwargs):
        """Counts the labels of rows whose tokens several ranks share."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        if samples and row_ranks_under(self.accelerator) is not None:
            labelled = sum((batch["shift_labels"] != IGNORE).sum() for batch in samples)
            count = self.accelerator.gather(labelled.to(self.args.device)).sum()
        return samples, count

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **kwargs):
        """The mean over a step's tokens under Ulysses too, where stock averages the rows' means.

        In evaluation the mean over this rank's tokens: stock divides by the mean count of all
        ranks, whose rows differ in length.
        """
        if self._eval_sum is not None and self._parts() == 1:
            num_items_in_batch = None
        whole = num_items_in_batch is None or row_ranks_under(self.accelerator) is None
        if whole or not self.model.training:
            return super().compute_loss(
                model,
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        items = num_items_in_batch.clamp_min(1)
        outputs = model(**inputs, labels=inputs["shift_labels"], num_items_in_batch=items)
        # ZeRO takes the mean of the ranks' gradients, Trainer that of their losses, which it
        # divides by the micro-batches.
        loss = outputs.loss * self.args.world_size * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        share_rows(self)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._without_repeats(inputs)
        if "labels" not in inputs or self._eval_sum is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        count = (inputs["labels"][..., 1:] != IGNORE).sum().to(self._eval_sum.device)
        weight = count.to(self._eval_sum)
        ranks = self._parts()
        if ranks > 1:
            weight = self.accelerator.gather(count).sum().to(weight) / ranks / self.args.world_size
        result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if result[0] is None:
            return result
        # Stock gives nan without labels.
        loss = torch.where(count > 0, result[0], 0.0).to(self._eval_sum)
        self._eval_sum += torch.stack([loss * weight, count.to(self._eval_sum) / ranks])
        return result

    def _parts(self) -> int:
        """The number of ranks that each compute a part of a row's loss in evaluation."""
        config = self.accelerator.parallelism_config
        return 1 if config is None else config.cp_size

    def _without_repeats(self, inputs):
        """The batch without labels in the rows that accelerate repeats to fill the last batch."""
        state = self.accelerator.gradient_state
        if "labels" not in inputs or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        labels = inputs["labels"].clone()
        rank = getattr(
            state.active_dataloader.batch_sampler, "process_index", self.args.process_index
        )
        labels[max(0, state.remainder - rank * len(labels)) :] = IGNORE
        return {**inputs, "labels": labels}

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        dtype = torch.float32 if self.args.device.type == "mps" else torch.float64
        self._eval_sum = torch.zeros(2, dtype=dtype, device=self.args.device)
        output = super().evaluation_loop(
            dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
        )
        total, count = self.accelerator.reduce(self._eval_sum, reduction="sum").tolist()
        self._eval_sum = None
        if count and f"{metric_key_prefix}_loss" in output.metrics:
            loss = total / count
            output.metrics[f"{metric_key_prefix}_loss"] = loss
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss, 700.0))
            if self.bytes_per_token:
                output.metrics[f"{metric_key_prefix}_nats_per_byte"] = loss / self.bytes_per_token
        return output


class _Finished(Exception):
    """The resumed run has had all of its steps."""


class _OwnSteps(TrainerCallback):
    """The state of a checkpoint holds the saving and logging steps of the flags before. After the
    last step of --max_steps stock would take one more."""

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)
        if state.global_step >= state.max_steps:
            raise _Finished
