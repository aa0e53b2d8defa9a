"""Rows that ranks share: each rank's part of a batch.

B batch, T tokens of whole rows.
"""

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.context.current import standard
from hfpatch.context.ranks import SHORTEST_PART
from hfpatch.decoder.stack import PatchedStack
from hfpatch.parallel.exchange import RowRanks
from hfpatch.parallel.shards import of_hosts
from hfpatch.trainer.dataset import IGNORE


def part_of(row_ranks: RowRanks, batch: dict) -> dict:
    """This rank's tokens of whole rows [B, T].

    Rows are padded to a multiple of the ranks, and to the shortest part that mixers accept. Labels
    are shifted first, because the next token may be on another rank.
    """
    B, T = batch["input_ids"].shape
    batch = dict(batch)
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORE)
    batch["shift_labels"] = labels[:, 1:]
    batch["position_ids"] = batch.get("position_ids", torch.arange(T)).expand(B, -1)
    chunks = 2 * row_ranks.size if row_ranks.zigzag else row_ranks.size
    more = max(-T % chunks, row_ranks.size * SHORTEST_PART - T)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.shape[:2] == (B, T):
            whole = torch.cat([x, _behind(name, x, more)], 1) if more else x
            batch[name] = row_ranks.dealt(whole)[row_ranks.rank].contiguous()
    return batch


def _behind(name: str, x: Tensor, tokens: int) -> Tensor:
    """Padding behind all tokens, masked and without labels."""
    last = x[:, -1:].repeat_interleave(tokens, 1)
    if name == "position_ids":
        return last + torch.arange(1, tokens + 1, device=x.device)
    fill = {"shift_labels": IGNORE, "attention_mask": 0}
    return torch.full_like(last, fill[name]) if name in fill else last


def of_all_ranks(row_ranks: RowRanks, batch: dict) -> list[dict]:
    """The batches of a group's ranks, in rank order."""
    found = [None] * row_ranks.size
    own = accelerate.utils.send_to_device(batch, "cpu")
    dist.all_gather_object(found, own, group=of_hosts(row_ranks.group))
    return found


def shares_rows(model) -> bool:
    """Whether the ranks can exchange this model's attention in evaluation: its layers can run on a
    part of each row outside training."""
    stacks = [m for m in model.modules() if isinstance(m, PatchedStack)]
    return bool(stacks) and all(map(_runs_on_a_part, stacks))


def _runs_on_a_part(stack: PatchedStack) -> bool:
    traits = stack._hfpatch.traits
    if traits.mixers and (not traits.timed or stack._hfpatch.runtime is None):
        return False
    return bool(traits.ours and standard(stack.config) and getattr(stack.config, "is_causal", True))
