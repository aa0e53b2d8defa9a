"""The load-balancing loss of experts where ranks share rows: over all tokens of a row.

The loss is a product of two means over tokens, so the mean of the ranks' losses is another number.
A family's module looks transformers' function up by name. `balance` replaces it under that name and
sends the router logits of shared rows to `of_whole_rows`.

B batch, t tokens of this rank, X experts.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.compat import balances_through
from hfpatch.context.current import current, having
from hfpatch.parallel.exchange import Sequence

_NOT_OURS = (
    "hfpatch: expected a loss that is hfpatch's where ranks share rows, the model's own came, "
    "which balances experts over each "
    "rank's tokens alone; leave apply's loss on, or set output_router_logits=False."
)
_UNKNOWN = (
    "hfpatch: expected a balancing loss of experts as most families have it where ranks share "
    "rows, {}'s own came, which counts "
    "each rank's tokens alone; set output_router_logits=False."
)


class _Summed(torch.autograd.Function):
    """The sum over ranks.

    Its backward sums the gradients, since every rank's loss reads the sum.
    """

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
    sequence: Sequence,
    gates: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    mask_Bt: Tensor | None,
) -> Tensor:
    """The balancing loss over the visible tokens of all ranks.

    Args:
        sequence: the ranks that share the rows.
        gates: this rank's router logits of each layer, [B*t, X].
        num_experts: X.
        top_k: how many experts a token is sent to.
        mask_Bt: 1 where a token is visible, None where all are.

    Returns:
        A scalar, the same on every rank.
    """
    device, wide = gates[0].device, torch.promote_types(gates[0].dtype, torch.float32)
    seen = None if mask_Bt is None else mask_Bt.reshape(-1).to(device, wide)
    picked, likely, tokens = (
        torch.zeros(n, dtype=wide, device=device) for n in (num_experts, num_experts, 1)
    )
    for gate in gates:
        weights = gate.to(device).softmax(-1)
        chosen = weights.topk(top_k, -1).indices
        one = torch.ones(len(gate), dtype=wide, device=device) if seen is None else seen
        picked = picked.scatter_add(0, chosen.flatten(), one.repeat_interleave(top_k))
        likely = likely + one @ weights.to(wide)
        tokens = tokens + one.sum()
    picked, likely, tokens = _Summed.apply(
        torch.cat([picked, likely, tokens]), sequence.group
    ).split([num_experts, num_experts, 1])
    return num_experts * (picked / tokens * (likely / tokens)).sum()


@dataclass
class Counted:
    """How many times a rank's loss contains the balancing loss of shared rows.

    times: 0 means one share of it, for losses that are summed over the ranks. sequence: the ranks
    that shared the rows of the decoder's last forward, or None for whole rows.
    """

    times: float
    sequence: Sequence | None = None

    @property
    def factor(self) -> float:
        return self.times or 1 / self.sequence.size


def counted(times: float):
    """A context in which a causal model's loss contains the balancing loss `times` times
    (Counted)."""
    return having(balance=Counted(times))


def _of_shared_rows() -> bool:
    return current.balance is not None and current.balance.sequence is not None


def balance(stock, gate_logits, num_experts=None, top_k=2, attention_mask=None):
    """Replaces a family's load_balancing_loss_func; `stock` is the family's own."""
    if not _of_shared_rows() or not isinstance(gate_logits, tuple):
        return stock(gate_logits, num_experts, top_k, attention_mask)
    return current.balance.factor * of_whole_rows(
        current.balance.sequence, gate_logits, num_experts, top_k, attention_mask
    )


def once(aux_loss):
    """The unscaled balancing loss, for callers that read it separately from the loss."""
    return aux_loss / current.balance.factor if _of_shared_rows() else aux_loss


def shares_balance(kind: type, sequence: Sequence | None) -> None:
    """Records which ranks share the rows of a decoder's router logits.

    Warns where the balancing loss cannot be computed over whole rows. kind: the decoder's class.
    sequence: None where the rows are whole.
    """
    if current.balance is not None:
        current.balance.sequence = sequence
    if sequence is not None:
        if not balances_through(kind, balance):
            warnings.warn(_UNKNOWN.format(kind.__name__), stacklevel=6)
        if current.balance is None and not current.causal:
            warnings.warn(_NOT_OURS, stacklevel=6)
