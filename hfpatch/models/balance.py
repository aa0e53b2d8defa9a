"""The load-balancing loss of experts where ranks share rows: of all tokens of a row, not of each rank's own.

It is a product of two means over tokens, so that no mean of the ranks' losses is it. transformers' function for it is asked by
name in each family's module; what stands there hands routers' logits that belong to shared rows to `of_whole_rows`.

B batch, t tokens of this rank, X experts.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.checkpoint.exchange import Sequence
from hfpatch.compat import balances_through
from hfpatch.models.asking import having, here

_NOT_OURS = (
    "hfpatch: expected a loss that is hfpatch's where ranks share rows, the model's own came, which balances experts over each "
    "rank's tokens alone; leave apply's loss on, or set output_router_logits=False."
)
_UNKNOWN = (
    "hfpatch: expected a balancing loss of experts as most families have it where ranks share rows, {}'s own came, which counts "
    "each rank's tokens alone; set output_router_logits=False."
)


class _Summed(torch.autograd.Function):
    """The sum over ranks, and of its gradients in backward: every rank's loss takes part in it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def of_whole_rows(
    sequence: Sequence, gates: tuple[Tensor, ...], num_experts: int, top_k: int, mask_Bt: Tensor | None
) -> Tensor:
    """Of each layer's routers' logits [B*t, X] of this rank: the loss over the tokens of all ranks that the mask shows."""
    device, wide = gates[0].device, torch.promote_types(gates[0].dtype, torch.float32)
    seen = None if mask_Bt is None else mask_Bt.reshape(-1).to(device, wide)
    picked, likely, tokens = (torch.zeros(n, dtype=wide, device=device) for n in (num_experts, num_experts, 1))
    for gate in gates:
        weights = gate.to(device).softmax(-1)
        chosen = weights.topk(top_k, -1).indices
        one = torch.ones(len(gate), dtype=wide, device=device) if seen is None else seen
        picked = picked.scatter_add(0, chosen.flatten(), one.repeat_interleave(top_k))
        likely = likely + one @ weights.to(wide)
        tokens = tokens + one.sum()
    picked, likely, tokens = _Summed.apply(torch.cat([picked, likely, tokens]), sequence.group).split(
        [num_experts, num_experts, 1]
    )
    return num_experts * (picked / tokens * (likely / tokens)).sum()


@dataclass
class Counted:
    """How often a rank's loss is to hold the balancing loss of shared rows; 0: its share of one, for losses that are added up over
    the ranks. sequence: whose rows the last forward of a stack had, None where they were whole."""

    times: float
    sequence: Sequence | None = None

    @property
    def factor(self) -> float:
        return self.times or 1 / self.sequence.size


def counted(times: float):
    """Within, a causal model's loss holds the balancing loss so often (Counted)."""
    return having(balance=Counted(times))


def _of_shared_rows() -> bool:
    return here.balance is not None and here.balance.sequence is not None


def balance(stock, gate_logits, num_experts=None, top_k=2, attention_mask=None):
    """load_balancing_loss_func of a family, whose own is `stock`."""
    if not _of_shared_rows() or not isinstance(gate_logits, tuple):
        return stock(gate_logits, num_experts, top_k, attention_mask)
    return here.balance.factor * of_whole_rows(here.balance.sequence, gate_logits, num_experts, top_k, attention_mask)


def once(aux_loss):
    """The balancing loss itself, for who reads it beside the loss."""
    return aux_loss / here.balance.factor if _of_shared_rows() else aux_loss


def shares_balance(kind: type, sequence: Sequence | None) -> None:
    """Told by a stack of this class whose rows its routers' logits are of."""
    if here.balance is not None:
        here.balance.sequence = sequence
    if sequence is not None:
        if not balances_through(kind, balance):
            warnings.warn(_UNKNOWN.format(kind.__name__), stacklevel=6)
        if here.balance is None and not here.causal:
            warnings.warn(_NOT_OURS, stacklevel=6)
