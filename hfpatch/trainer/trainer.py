"""The Trainer of `hfpatch train`: exact evaluation, and a stop at NaN."""

import math

import torch
from transformers import TrainerCallback

from hfpatch.trainer.arguments import refusals
from hfpatch.trainer.dataset import IGNORE
from hfpatch.trainer.finite import FiniteTrainer
from hfpatch.trainer.runs import RunCheckpoints
from hfpatch.trainer.sequence import sequence_under, share_rows


class Trainer(RunCheckpoints, FiniteTrainer):
    """transformers' Trainer; args is a TrainArguments.

    The evaluation loss is the mean over tokens (stock: over batches), with perplexity and, for
    plain text, nats per byte.

    bytes_per_token: of plain text, 0.0 for other data. record: what a resume must match, written
    into each checkpoint.
    """

    def __init__(self, *args, bytes_per_token: float = 0.0, record: dict | None = None, **kwargs):
        self.bytes_per_token, self.record = bytes_per_token, record or {}
        self._eval_sum = None
        with refusals():
            super().__init__(*args, **kwargs)
        self.add_callback(_OwnSteps)

    def create_optimizer(self, *args, **kwargs):
        with refusals():
            return super().create_optimizer(*args, **kwargs)

    def _determine_best_metric(self, *args, **kwargs):
        with refusals((KeyError,)):
            return super()._determine_best_metric(*args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        """Counts the labels of rows whose tokens several ranks share."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        if samples and self._sequence() is not None:
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
        if num_items_in_batch is None or not self.model.training or self._sequence() is None:
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
        times = self.args.world_size * self.current_gradient_accumulation_steps
        loss = outputs.loss * times
        return (loss, outputs) if return_outputs else loss

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        share_rows(self)

    def _sequence(self):
        return sequence_under(self.accelerator)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._without_repeats(inputs)
        labelled = "labels" in inputs and self._eval_sum is not None
        count = (
            (inputs["labels"][..., 1:] != -100).sum().to(self._eval_sum.device)
            if labelled
            else None
        )
        ranks = self._parts()
        share = self.accelerator.gather(count).sum() / ranks if labelled and ranks > 1 else None
        result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if labelled and result[0] is not None:
            # Stock gives nan without labels.
            loss = torch.where(count > 0, result[0], 0.0).to(self._eval_sum)
            total = loss * count if share is None else loss * share.to(loss) / self.args.world_size
            self._eval_sum += torch.stack([total, count.to(self._eval_sum) / ranks])
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
        rank = getattr(state.active_dataloader.batch_sampler, "process_index", 0)
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


class _OwnSteps(TrainerCallback):
    """The state of a checkpoint holds the saving and logging steps of the flags before."""

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)
