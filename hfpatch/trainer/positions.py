"""The evaluation loss by position, which shows whether a longer context is used.

A token's position is that in its document. The first bucket holds `width` positions, each next one
as many as all before it: with 1024, positions 0 to 1023, 1024 to 2047, 2048 to 4095, and so on.
"""

from dataclasses import replace

import torch

from hfpatch.compat import hooked_forward
from hfpatch.loss.head import Call, linear_of
from hfpatch.trainer.dataset import IGNORE
from hfpatch.trainer.finite import FiniteTrainer

_BUCKETS = 32
_CHUNK = 1 << 26  # logits that are upcast at a time


class PositionTrainer(FiniteTrainer):
    """Trainer whose evaluation adds `eval_loss_at_<first position>` for each of several buckets.

    Logits are read if the model returns them. If its head returns the loss itself (hfpatch's fused
    one), the head is called once more for each bucket with the bucket's labels alone; it skips
    other tokens, so that is one more pass over the head, without logits.
    """

    _sums = None  # [2, buckets]: losses and labels, while an evaluation runs
    _at_BT = None  # the bucket of each token of the current batch

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        if self._sums is None or not return_outputs or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        labels_BT, self._head_said = inputs["labels"], False
        self._at_BT = buckets(inputs.get("position_ids"), labels_BT, self.args.eval_positions)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        if not self._head_said and logits is not None:
            self._add_logits(logits, labels_BT)
        return loss, outputs

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        head = self._head() if self.args.eval_positions else None
        if head is None:
            return super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        dtype = torch.float32 if self.args.device.type == "mps" else torch.float64
        self._sums = torch.zeros(2, _BUCKETS, dtype=dtype, device=self.args.device)
        # Registered after the engines' hooks, so weights are gathered.
        hook = head.register_forward_pre_hook(self._ask_head)
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            losses, counts = self.accelerator.reduce(self._sums, reduction="sum").tolist()
        finally:
            hook.remove()
            self._sums = self._at_BT = None
        means = {
            first(i, self.args.eval_positions): losses[i] / n for i, n in enumerate(counts) if n
        }
        if len(means) > 1:
            output.metrics.update(
                {f"{metric_key_prefix}_loss_at_{start}": loss for start, loss in means.items()}
            )
        return output

    def _head(self):
        try:
            return self.accelerator.unwrap_model(self.model).get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return None

    def _ask_head(self, head, args):
        inner = linear_of(head)
        call = vars(inner).get(hooked_forward(inner))  # a Call while the head computes a loss
        if not isinstance(call, Call) or self._at_BT is None:
            return
        self._head_said = True
        labels_BT = call.args[0]
        one = torch.ones((), device=labels_BT.device)  # what the sum of the losses is divided by
        options = call.options | {"num_items": one, "num_valid": None}
        for i in range(_bucket(self._at_BT.shape[1] - 1, self.args.eval_positions) + 1):
            here = (self._at_BT == i).to(labels_BT.device)
            loss = replace(call, args=(labels_BT.where(here, IGNORE),), options=options)(*args)
            self._sums[0, i] += loss.detach().to(self._sums)
        self._count(labels_BT)

    def _add_logits(self, logits_BTV, labels_BT):
        rows = max(1, _CHUNK // logits_BTV.shape[-1])
        for logits_TV, labels_T, at_T in zip(logits_BTV, labels_BT, self._at_BT):
            for start in range(0, len(labels_T) - 1, rows):
                end = min(start + rows, len(labels_T) - 1)
                scores, target = (
                    logits_TV[start:end].float(),
                    labels_T[start + 1 : end + 1].to(logits_TV.device),
                )
                loss_T = torch.nn.functional.cross_entropy(
                    scores, target, reduction="none", ignore_index=IGNORE
                )
                self._sums[0].index_add_(
                    0, at_T[start + 1 : end + 1].to(self._sums.device), loss_T.to(self._sums)
                )
        self._count(labels_BT)

    def _count(self, labels_BT):
        at, seen = self._at_BT[:, 1:].flatten(), (labels_BT[:, 1:] != IGNORE).flatten()
        self._sums[1].index_add_(0, at.to(self._sums.device), seen.to(self._sums))


def buckets(position_ids, labels_BT, width: int):
    """The bucket of each token, int64 [B, T]: 0 below `width`, then one for each doubling."""
    if position_ids is None:
        position_ids = torch.arange(labels_BT.shape[1], device=labels_BT.device).expand_as(
            labels_BT
        )
    edges = torch.tensor([first(i, width) for i in range(1, _BUCKETS)], device=position_ids.device)
    return torch.bucketize(position_ids.contiguous(), edges, right=True)


def first(bucket: int, width: int) -> int:
    """The first position of a bucket."""
    return 0 if bucket == 0 else width << (bucket - 1)


def _bucket(position: int, width: int) -> int:
    return (position // width).bit_length()
