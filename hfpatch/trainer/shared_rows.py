"""Rows that ranks share: each rank's part of a batch.

B batch, T tokens of whole rows.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.context.current import standard
from hfpatch.context.ranks import SHORTEST_PART
from hfpatch.decoder.stack import PatchedStack
from hfpatch.parallel.exchange import Sequence
from hfpatch.parallel.shards import of_hosts
from hfpatch.trainer.dataset import IGNORE


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


def shares_rows(model) -> bool:
    """Whether the ranks can exchange this model's attention in evaluation: its layers can run on a
    part of each row outside training."""
    stacks = [m for m in model.modules() if isinstance(m, PatchedStack)]
    return bool(stacks) and all(map(_runs_on_a_part, stacks))


def _runs_on_a_part(stack: PatchedStack) -> bool:
    traits, config = stack._hfpatch.traits, stack.config
    timed = traits.timed and stack._hfpatch.runtime is not None
    ours = traits.ours and (timed or not traits.mixers) and standard(config)
    return bool(ours and getattr(config, "is_causal", True))
