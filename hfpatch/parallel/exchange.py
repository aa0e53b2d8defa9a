"""Sequence parallelism: attention over rows whose tokens lie on several ranks, by exchanging tokens
for heads.

Of P ranks, rank p has chunk p of every row (`zigzag`: chunks p and 2P-1-p of 2P, as in torch's
context parallelism) and all heads of those tokens. Attention needs whole rows of few heads: rank p
owns query heads [pH/P, (p+1)H/P) and their KV heads: an all-to-all gathers whole rows, the kernel runs,
a second all-to-all returns the result. The layer keeps only its own tokens, except lse, which the
kernel needs whole and which is never sent. Ranks that share a KV head each compute a part of its
dk and dv, summed in float32. The ranks must divide the heads evenly.

B batch, T tokens of whole rows, t = T/P of this rank, H heads (query or KV), w of one rank, E head
dim.
"""

from collections import deque
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hfpatch.attention.heads import Attention
from hfpatch.budget.sequence import why_not_shared_out
from hfpatch.parallel.shards import least_of, of_hosts
from hfpatch.store.device import device_for, on_host

# Limit of states in flight to the next rank, which bounds how far a rank runs ahead.
LEAVING = 16


class RowRanks:
    """The ranks that share each row's tokens, and the tokens of each rank.

    group: a process group of torch.distributed.
    """

    def __init__(self, group, zigzag: bool = False):
        self.group = group
        self.zigzag = zigzag
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._leaving: deque = deque()  # (handle, tensor) of each send() in flight

    # -- communication -----------------------------------------------------------------------------
    def all_to_all(self, send: Tensor) -> Tensor:
        """Sends part p of `send` [P, ...] to rank p. Returns the received parts."""
        got = torch.empty_like(send)
        dist.all_to_all_single(got, send, group=self.group)
        return got

    def all_gather(self, x: Tensor) -> Tensor:
        """x, on the host, of every rank, stacked along a new first axis."""
        got = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(got), x.contiguous(), group=of_hosts(self.group))
        return got

    def send(self, x: Tensor, rank: int) -> None:
        """Sends x to a rank, which calls receive(). Returns before x is sent."""
        while len(self._leaving) >= LEAVING:
            self._leaving.popleft()[0].wait()
        x = x.contiguous()
        self._leaving.append((dist.isend(x, group=self.group, group_dst=rank), x))

    def receive(self, into: Tensor, rank: int) -> Tensor:
        """Receives the next tensor from a rank, in the order of its send() calls."""
        dist.recv(into, group=self.group, group_src=rank)
        return into

    def least(self, numbers: list[int | None]) -> list[int | None]:
        """The least of each number over the ranks; None if one rank has None."""
        return least_of(self.group, numbers)

    # -- order of tokens ---------------------------------------------------------------------------
    def chunks(self, t: int) -> list[tuple[int, int, int]]:
        """(number in the whole row, start, end in this rank's t tokens) of each chunk of this rank,
        in order.
        """
        if not self.zigzag:
            return [(self.rank, 0, t)]
        return [(self.rank, 0, t // 2), (2 * self.size - 1 - self.rank, t // 2, t)]

    def owner(self, chunk: int) -> int:
        """The rank that has this chunk."""
        return chunk if chunk < self.size else 2 * self.size - 1 - chunk

    def in_order(self, parts_PBt: Tensor) -> Tensor:
        """Whole rows [B, T, ...] from each rank's tokens [P, B, t, ...]. No copy for one row of
        plain chunks."""
        if self.zigzag:
            first, second = parts_PBt.unflatten(2, (2, -1)).unbind(2)
            parts_PBt = torch.cat([first, second.flip(0)])
        return parts_PBt.transpose(0, 1).flatten(1, 2)

    def dealt(self, whole_BT: Tensor) -> Tensor:
        """Each rank's tokens [P, B, t, ...] of whole rows [B, T, ...]: the inverse of in_order."""
        if not self.zigzag:
            return whole_BT.unflatten(1, (self.size, -1)).transpose(0, 1)
        chunks = whole_BT.unflatten(1, (2 * self.size, -1)).transpose(0, 1)
        return torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], 2)

    def whole(self, *xs_Bt: Tensor) -> list[Tensor]:
        """Whole rows [B, T] of small tensors [B, t], gathered by the hosts, which read them."""
        parts = self.all_gather(on_host(torch.stack(xs_Bt)))
        device = device_for(xs_Bt[0].device)
        return [device.from_host(self.in_order(part)) for part in parts.unbind(1)]


class ExchangedAttention(Attention):
    """Every attention call of a layer, on whole rows of this rank's heads. Inputs and outputs hold
    this rank's tokens of all heads.
    """

    def __init__(self, row_ranks: RowRanks):
        super().__init__()
        self.row_ranks = row_ranks
        self.calls: list = []  # AttentionOptions of the layer's calls, with all heads' sinks

    def _to_rows(self, x_BtHE: Tensor) -> Tensor:
        """[B, T, H/P, E]: whole rows of this rank's heads, from this rank's tokens of all heads."""
        size = self.row_ranks.size
        n_heads = x_BtHE.shape[2]
        if size > n_heads:  # ranks share a KV head: each gets a copy
            x_BtHE = x_BtHE.repeat_interleave(size // n_heads, 2)
        send_PBtwE = x_BtHE.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
        return self.row_ranks.in_order(self.row_ranks.all_to_all(send_PBtwE))

    def _to_tokens(self, x_BTwE: Tensor, n_heads: int) -> Tensor:
        """The inverse: [B, t, H, E]. The copies of a shared KV head are summed in float32."""
        got_PBtwE = self.row_ranks.all_to_all(self.row_ranks.dealt(x_BTwE).contiguous())
        x_BtHE = got_PBtwE.movedim(0, 2).flatten(2, 3)
        if x_BtHE.shape[2] == n_heads:
            return x_BtHE
        wide = torch.promote_types(x_BtHE.dtype, torch.float32)
        return x_BtHE.unflatten(2, (n_heads, -1)).sum(3, dtype=wide).to(x_BtHE.dtype)

    def _of_this_rank(self, call, n_heads: int):
        """A call with the sinks of this rank's heads alone."""
        if call.sinks_H is None:
            return call
        own = n_heads // self.row_ranks.size
        return replace(call, sinks_H=call.sinks_H.narrow(0, self.row_ranks.rank * own, own))

    def forward(
        self, calls: list, mixers: list, parts: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """As Attention.forward. lse has whole rows of this rank's heads, and stays here.

        mixers: mixers that pass their states from rank to rank (layer/time_ranks.py).
        """
        self.calls = calls
        n = 3 * len(calls)  # q, k and v of each call
        mine = []
        for call, q, k in zip(calls, parts[:n:3], parts[1:n:3]):
            why = why_not_shared_out(q.shape[2], k.shape[2], self.row_ranks.size)
            if why:
                raise ValueError(f"hfpatch: {why}. Take another number of ranks.")
            mine.append(self._of_this_rank(call, q.shape[2]))
        outs, lses = super().forward(mine, mixers, [*map(self._to_rows, parts[:n]), *parts[n:]])
        for i, q in enumerate(parts[:n:3]):
            outs[i] = self._to_tokens(outs[i], q.shape[2])
        return outs, lses

    def backward(self, parts, douts, outs, lses, into) -> list:
        n_calls = len(self.calls)
        n = 3 * n_calls
        # [Step 1] The kernels run on whole rows of this rank's heads. Their gradients overwrite q,
        # k and v.
        whole = [*map(self._to_rows, parts[:n]), *parts[n:]]
        douts = [*map(self._to_rows, douts[:n_calls]), *douts[n_calls:]]
        grads = whole[:n] + into[n:]
        own_dsinks = super().backward(whole, douts, lambda: self._to_rows(outs()), lses, grads)
        del whole, douts
        # [Step 2] Each rank gets the gradients of its tokens.
        into[n:] = grads[n:]
        for i in range(n):
            into[i] = self._to_tokens(grads[i], parts[i].shape[2])
            grads[i] = None
        # [Step 3] A rank knows the gradients of its heads' sinks; the others' are zero here.
        dsinks = []
        for call, own in zip(self.calls, own_dsinks):
            if own is not None:
                before = self.row_ranks.rank * len(own)
                own = pad(own, (before, len(call.sinks_H) - before - len(own)))
            dsinks.append(own)
        return dsinks
