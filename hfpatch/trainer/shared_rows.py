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

from hfpatch.context.ranks import SHORTEST_PART, sharded
from hfpatch.decoder.stack import OurAttention
from hfpatch.parallel.exchange import Sequence
from hfpatch.parallel.shards import least_of, of_hosts

IGNORE = -100


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
    own = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in batch.items()}
    dist.all_gather_object(found, own, group=of_hosts(sequence.group))
    return found


def _in_turn(sequence: Sequence, batch: dict, device, run):
    """run(part, count) for this rank's rows. All ranks compute the rows of each rank in turn.

    count: the number of labels in the rows that run() computes.
    """
    batches, mine = of_all_ranks(sequence, batch), None
    # Context parallelism gives all its ranks the same rows: one forward is enough. Engines gather
    # weights over other groups too, so all groups must run the same number of forwards.
    if least_of(None, [int(all(_same(one, batches[0]) for one in batches))])[0]:
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
        with torch.no_grad(), sharded(sequence):
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


def labelled_alike(able: bool, labelled: bool) -> bool:
    """Whether all ranks are able.

    Raises:
        ValueError: on all ranks, if only some have labels: these would wait for the others.
    """
    able, having, lacking = least_of(None, [int(able), int(labelled), int(not labelled)])
    if not having and not lacking:
        raise ValueError(
            "hfpatch: in evaluation all ranks that share a sequence must have labels, and some "
            f"have none. Give every sequence labels ({IGNORE} where a token is not to be "
            "predicted)."
        )
    return bool(able)


def shares_rows(model) -> bool:
    """Whether the ranks can exchange this model's attention in evaluation."""
    stacks = [m for m in model.modules() if isinstance(m, OurAttention)]
    return bool(stacks) and all(m._hfpatch_shares_rows for m in stacks)
