"""Rows that ranks share: each rank's part of a batch, and evaluation of every rank's rows by all
ranks together.

In evaluation accelerate turns Ulysses off, and TRL turns context parallelism off. Each rank would
then compute whole rows, which need more memory than the parts in training. Under context
parallelism transformers' Trainer evaluates parts, and each rank gets the loss of its part.

B batch, T tokens of whole rows, t of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfpatch.compat import evaluated_by_trainer
from hfpatch.context.ranks import (
    SHORTEST_PART,
    left_alone_in_evaluation,
    parts_of_trainers_evaluation,
    sharded,
)
from hfpatch.context.router_balance import counted
from hfpatch.decoder.stack import OurAttention
from hfpatch.layer.forward_state import is_sharded
from hfpatch.parallel.exchange import Sequence
from hfpatch.parallel.shards import least_of

IGNORE = -100
_ROWS = ("input_ids", "labels", "attention_mask", "position_ids")
_WITHIN = ("output_attentions", "output_hidden_states")
_BESIDE = ("num_items_in_batch", "ignore_index", "logits_to_keep", "skip_logits", "return_dict",
           "output_router_logits",
           "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # fmt: skip


def part_of(sequence: Sequence, batch: dict) -> dict:
    """This rank's tokens of whole rows [B, T].

    Rows are padded to a multiple of the ranks, and to the shortest part that mixers accept. Labels
    are shifted first, because the next token may be on another rank.
    """
    batch, (B, T) = dict(batch), batch["input_ids"].shape
    given = batch.get("position_ids")
    batch["position_ids"] = (torch.arange(T) if given is None else given).expand(B, -1)
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORE)[
        :, 1:
    ]
    behind = {"shift_labels": IGNORE, "attention_mask": 0}
    more = -T % (sequence.size * (2 if sequence.zigzag else 1))
    more = max(more, sequence.size * SHORTEST_PART - T)

    def mine(name: str, x):
        if not isinstance(x, Tensor) or x.shape[:2] != (B, T):
            return x
        if more:  # padding behind all tokens, masked and without labels
            last = x[:, -1:].repeat_interleave(more, 1)
            if name == "position_ids":
                last = last + torch.arange(1, more + 1, device=x.device)
            x = torch.cat([x, torch.full_like(last, behind[name]) if name in behind else last], 1)
        return sequence.dealt(x)[sequence.rank].contiguous()

    return {name: mine(name, x) for name, x in batch.items()}


def of_all_ranks(sequence: Sequence, batch: dict) -> list[dict]:
    """The batches of a group's ranks, in rank order."""
    found = [None] * sequence.size
    dist.all_gather_object(
        found,
        {n: x.cpu() if isinstance(x, Tensor) else x for n, x in batch.items()},
        sequence.group,
    )
    return found


def _in_turn(sequence: Sequence, batch: dict, device, run):
    """run(part, count) for this rank's rows. All ranks compute the rows of each rank in turn.

    count: the number of labels in the rows that run() computes.
    """
    batches, mine = of_all_ranks(sequence, batch), None
    # Context parallelism gives all its ranks the same rows: one forward is enough. Engines gather
    # weights over other groups too, so all groups must run the same number of forwards.
    if least_of(None, [int(all(_same(one, batches[0]) for one in batches))], device)[0]:
        batches = batches[:1]
    for rank, whole in enumerate(batches):
        part = {
            n: x.to(device) if isinstance(x, Tensor) else x
            for n, x in part_of(sequence, whole).items()
        }
        count, items = (
            (whole["labels"][:, 1:] != IGNORE).sum().to(device),
            part.get("num_items_in_batch"),
        )
        # Each rank divides by its share, and _mean averages over the ranks: the experts' balancing
        # loss in the same sum is equal on all ranks.
        share = (
            count.clamp_min(1) if items is None else torch.as_tensor(items, device=device)
        ) / sequence.size
        part |= {"labels": part["shift_labels"], "num_items_in_batch": share, "use_cache": False}
        with torch.no_grad(), sharded(sequence), counted(1):
            found = run(part, count)
        if rank == sequence.rank or len(batches) == 1:
            mine = found
    return mine


def _same(a: dict, b: dict) -> bool:
    both = ((x, b.get(n)) for n, x in a.items())
    return all(
        isinstance(y, Tensor) and torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in both
    )


def _mean(sequence: Sequence, x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=sequence.group)
    return x / sequence.size


def evaluation_loss(model, inputs: dict, sequence: Sequence, device) -> Tensor:
    """The loss of this rank's rows: the mean over their labels (nan if they have none), or the sum
    divided by num_items_in_batch."""

    def run(part: dict, count: Tensor) -> Tensor:
        loss = _mean(sequence, model(**{**part, "skip_logits": True, "return_dict": True}).loss)
        return loss if "num_items_in_batch" in inputs else torch.where(count > 0, loss, torch.nan)

    return _in_turn(sequence, inputs, device, run)


def evaluation_scores(log_probs, inputs: dict, sequence: Sequence, device):
    """The outputs of log_probs (loss/log_probs.py) for this rank's rows, [B, T - 1]."""
    T = inputs["input_ids"].shape[1]

    def run(part: dict, count: Tensor):
        out = log_probs(part)
        for name, x in out.items():
            out[name] = (
                _mean(sequence, x) if x.dim() == 0 else sequence.in_order(sequence.all_gather(x))
            )
        return out

    out = _in_turn(sequence, inputs, device, run)
    return type(out)(**{name: x if x.dim() == 0 else x[:, : T - 1] for name, x in out.items()})


def labelled_alike(able: bool, labelled: bool, device) -> bool:
    """Whether all ranks are able.

    Raises:
        ValueError: on all ranks, if only some have labels: these would wait for the others.
    """
    able, having, lacking = least_of(None, [int(able), int(labelled), int(not labelled)], device)
    if not having and not lacking:
        raise ValueError(
            "hfpatch: expected labels on all ranks or on none in evaluation where ranks share "
            "rows, some have none; give every row "
            f"labels ({IGNORE} where a token is not to be predicted)."
        )
    return bool(able)


def unlabelled(model, kwargs: dict) -> None:
    """Reports to the other ranks that this rank's evaluation rows have no labels."""
    sequence = left_alone_in_evaluation(model.config.get_text_config())
    if (
        sequence is not None
        and evaluated_by_trainer() is not None
        and any(map(is_sharded, model.modules()))
    ):
        labelled_alike(
            False, False, next(x.device for x in kwargs.values() if isinstance(x, Tensor))
        )


def shares_rows(model) -> bool:
    """Whether the ranks can exchange this model's attention in evaluation."""
    stacks = [m for m in model.modules() if isinstance(m, OurAttention)]
    return bool(stacks) and all(m._hfpatch_shares_rows for m in stacks)


def evaluated_by_ranks(model, kwargs: dict, scores: bool):
    """The output of an evaluation forward for this rank's rows, computed by all ranks that share
    rows in training. All of them call this together.

    scores: compute the outputs of TRL's head. Returns None where each rank computes alone.
    """
    parts = parts_of_trainers_evaluation()
    return_dict = kwargs.get("return_dict")
    return_dict = getattr(model.config, "return_dict", True) if return_dict is None else return_dict
    if parts is not None:
        with sharded(parts), counted(0):
            out = model._hfpatch_forward((), {**kwargs, "return_dict": True})
        out["loss"] = _mean(parts, out["loss"])
        return out if return_dict else out.to_tuple()
    sequence = left_alone_in_evaluation(model.config.get_text_config())
    # Without sharded weights one rank may call the model alone (a judge, a run after training).
    if sequence is None or not any(map(is_sharded, model.modules())):
        return None
    labels = kwargs["labels"]
    able = _rows_alone(model, kwargs) and shares_rows(model)
    if not scores:
        able = able and model._loss_is_fused(labels, kwargs)
    if not labelled_alike(able, True, labels.device):  # of all groups, as in _in_turn
        return None
    if scores:
        return evaluation_scores(model._hfpatch_log_probs, kwargs, sequence, labels.device)
    kwargs.pop("return_dict", None)
    loss = evaluation_loss(
        lambda **part: model._hfpatch_forward((), part), kwargs, sequence, labels.device
    )
    out = CausalLMOutputWithPast(loss=loss)
    return out if return_dict else out.to_tuple()


def _rows_alone(model, kwargs: dict) -> bool:
    """Whether a forward computes the loss of token rows alone: no images, no cache, no custom
    mask."""
    ids = kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or any(getattr(model.config, n, False) for n in _WITHIN):
        return False
    for name, x in kwargs.items():
        rows = isinstance(x, Tensor) and x.shape == ids.shape
        if name in _ROWS:
            able = (
                x is None
                or rows
                or name == "position_ids"
                and isinstance(x, Tensor)
                and x.shape == ids[:1].shape
            )
        else:
            able = name in _BESIDE or x is None or x is False
        if not able:
            return False
    return kwargs.get("ignore_index", IGNORE) == IGNORE
