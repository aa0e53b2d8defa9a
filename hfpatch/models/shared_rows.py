"""Rows that ranks share: each rank's part of a batch, and evaluation of every rank's own rows by all of them in turn.

accelerate leaves evaluation out of Ulysses, and TRL out of context parallelism, so that each rank would compute whole rows, which
do not fit where training's do. In that of transformers' Trainer under context parallelism each rank has its part's loss.

B batch, T tokens of whole rows, t of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfpatch.checkpoint.exchange import Sequence
from hfpatch.models.parallel import left_alone_in_evaluation, parts_of_trainers_evaluation, sharded
from hfpatch.models.stack import OurAttention

IGNORE = -100


def part_of(sequence: Sequence, batch: dict) -> dict:
    """This rank's tokens of whole rows [B, T], made longer where they do not go evenly over the ranks.

    Labels are shifted first, for the next token may lie with another rank.
    """
    batch, (B, T) = dict(batch), batch["input_ids"].shape
    batch.setdefault("position_ids", torch.arange(T).expand(B, -1))
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORE)[:, 1:]
    more = -T % (sequence.size * (2 if sequence.zigzag else 1))

    def mine(name: str, x):
        if not isinstance(x, Tensor) or x.shape[:2] != (B, T):
            return x
        if more:  # tokens behind all others, which nobody sees and no label follows
            last = x[:, -1:].repeat_interleave(more, 1)
            if name == "position_ids":
                last = last + torch.arange(1, more + 1, device=x.device)
            x = torch.cat([x, torch.full_like(last, IGNORE) if name == "shift_labels" else last], 1)
        return sequence.dealt(x)[sequence.rank].contiguous()

    return {name: mine(name, x) for name, x in batch.items()}


def of_all_ranks(sequence: Sequence, batch: dict) -> list[dict]:
    """The batches that the ranks of a group hold, in order: each has rows of its own."""
    found = [None] * sequence.size
    dist.all_gather_object(
        found, {n: x.cpu() if isinstance(x, Tensor) else x for n, x in batch.items()}, sequence.group
    )
    return found


def _in_turn(sequence: Sequence, batch: dict, device, run):
    """run(part, count) of this rank's own rows, each rank's in turn computed by all of them. count: of their labels."""
    found, before, mine = None, None, None
    for rank, whole in enumerate(of_all_ranks(sequence, batch)):
        if rank and _same(whole, before):  # context parallelism gives all ranks the same rows
            mine = found if rank == sequence.rank else mine
            continue
        before = whole
        part = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in part_of(sequence, whole).items()}
        count, items = (whole["labels"][:, 1:] != IGNORE).sum().to(device), part.get("num_items_in_batch")
        # Each rank divides by its share, and all take the mean: experts' balancing loss, beside it, is a mean already.
        share = (count.clamp_min(1) if items is None else torch.as_tensor(items, device=device)) / sequence.size
        part |= {"labels": part["shift_labels"], "num_items_in_batch": share, "use_cache": False}
        with torch.no_grad(), sharded(sequence):
            found = run(part, count)
        if rank == sequence.rank:
            mine = found
    return mine


def _same(a: dict, b: dict) -> bool:
    tensors = [n for n, x in a.items() if isinstance(x, Tensor)]
    return all(
        isinstance(b.get(n), Tensor) and a[n].shape == b[n].shape and bool((a[n] == b[n]).all()) for n in tensors
    )


def _mean(sequence: Sequence, x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=sequence.group)
    return x / sequence.size


def evaluation_loss(model, inputs: dict, sequence: Sequence, device) -> Tensor:
    """The loss of this rank's own rows: the mean over their labels, nan where there is none; or over num_items_in_batch."""

    def run(part: dict, count: Tensor) -> Tensor:
        loss = _mean(sequence, model(**{**part, "skip_logits": True, "return_dict": True}).loss)
        return loss if "num_items_in_batch" in inputs else torch.where(count > 0, loss, torch.nan)

    return _in_turn(sequence, inputs, device, run)


def evaluation_scores(log_probs, inputs: dict, sequence: Sequence, device):
    """What log_probs (models/log_probs.py) gives of this rank's own rows: fields of their tokens whole, [B, T - 1]."""
    T = inputs["input_ids"].shape[1]

    def run(part: dict, count: Tensor):
        out = log_probs(part)
        for name, x in out.items():
            out[name] = _mean(sequence, x) if x.dim() == 0 else sequence.in_order(sequence.all_gather(x))
        return out

    out = _in_turn(sequence, inputs, device, run)
    return type(out)(**{name: x if x.dim() == 0 else x[:, : T - 1] for name, x in out.items()})


def evaluated_by_ranks(model, kwargs: dict, scores: bool):
    """What a causal model's forward without gradients gives of this rank's rows, computed by all ranks that share rows in
    training, which have all come here; None where each computes its own. scores: TRL's, of each token, are asked for."""
    parts = parts_of_trainers_evaluation()
    if parts is not None:
        with sharded(parts):
            out = model._hfpatch_forward((), kwargs)
        out.loss = _mean(parts, out.loss)
        return out
    sequence = left_alone_in_evaluation(model.config.get_text_config())
    if sequence is None:
        return None
    ids, labels = kwargs.get("input_ids"), kwargs["labels"]
    asked = ("inputs_embeds", "past_key_values", "shift_labels", "output_attentions", "output_hidden_states")
    able = isinstance(ids, Tensor) and ids.shape == labels.shape and not any(kwargs.get(n) is not None for n in asked)
    able = able and any(isinstance(module, OurAttention) for module in model.modules())
    if not scores:
        able = able and model._fused_loss_serves(kwargs) and not model._wants_logits(labels, kwargs)
    if not sequence.least([int(able)], labels.device)[0]:
        return None
    if scores:
        return evaluation_scores(model._hfpatch_log_probs, kwargs, sequence, labels.device)
    return_dict = kwargs.pop("return_dict", None)
    loss = evaluation_loss(lambda **part: model._hfpatch_forward((), part), kwargs, sequence, labels.device)
    out = CausalLMOutputWithPast(loss=loss)
    return out if getattr(model.config, "return_dict", True) and return_dict is not False else out.to_tuple()
