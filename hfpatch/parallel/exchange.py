"""Sequence parallelism: attention over rows whose tokens lie on several ranks, by exchanging tokens
for heads.

Of P ranks, rank p has chunk p of every row (`zigzag`: chunks p and 2P-1-p of 2P, as in torch's
context parallelism) and all heads of those tokens. Attention needs whole rows of few heads: rank p
owns query heads [pH/P, (p+1)H/P) and their KV heads. Attention runs in rounds of a few query heads:
an all-to-all gathers whole rows, the kernel runs, a second all-to-all returns the result. The next
round's exchange overlaps the kernel. The layer keeps only its own tokens,
except lse, which the kernel needs whole and which is never sent. Ranks that share a KV head each
compute a part of its dk and dv, summed in float32. The ranks must divide the
heads evenly.

B batch, T tokens of whole rows, t = T/P of this rank, H query heads, K KV heads, E head dim; w
query heads of a round.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from hfpatch.attention.attention import attention_backward, attention_forward, pick
from hfpatch.attention.heads import Attention, Heads
from hfpatch.budget.sequence import Rounds, rounds_of
from hfpatch.parallel.shards import least_of, of_hosts, together
from hfpatch.store.device import device_for, on_host

# Limit of states in flight to the next rank, which bounds how far a rank runs ahead.
LEAVING = 16


class Sequence:
    """The ranks that share each row's tokens, and the tokens of each rank.

    group: a process group of torch.distributed.
    """

    def __init__(self, group, zigzag: bool = False):
        self.group, self.zigzag = group, zigzag
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._leaving: deque = deque()  # (handle, tensor) of each send() in flight

    # -- communication -----------------------------------------------------------------------------
    def all_to_all(self, send: Tensor):
        """Sends part p of `send` [P, ...] to rank p. Returns (the received parts, a handle)."""
        got = torch.empty_like(send)
        return got, dist.all_to_all_single(got, send, group=self.group, async_op=True)

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

    def together(self, work):
        """Runs work() on every rank; if one raises, all raise."""
        return together(self.group, work)

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


class _Coming:
    """An all-to-all in flight. finish: called on the received tensor."""

    def __init__(self, sequence: Sequence, send: Tensor, finish):
        self.send = send  # alive until it is sent
        self.finish = finish
        self.got, self.handle = sequence.all_to_all(send)

    def wait(self) -> Tensor:
        if self.handle is not None:
            self.handle.wait()
        got, self.got, self.send = self.got, None, None
        return self.finish(got)


class ExchangedAttention(Attention):
    """Every attention call of a layer, in rounds of exchanged heads. Inputs and outputs hold this
    rank's tokens.
    """

    def __init__(self, sequence: Sequence):
        super().__init__()
        self.sequence = sequence
        self.rounds: list[Rounds] = []  # of each call

    # -- exchange of heads -------------------------------------------------------------------------
    def _to_rows(self, xs_PBtwE: list[Tensor]) -> list[_Coming]:
        """Sends every rank's heads of this rank's tokens; receives whole rows [B, T, w, E] of the
        heads that this rank owns."""
        return [_Coming(self.sequence, x.contiguous(), self.sequence.in_order) for x in xs_PBtwE]

    def _to_tokens(self, x_BTwE: Tensor, finish=lambda got: got) -> _Coming:
        """Sends whole rows of this rank's heads; receives all ranks' heads of this rank's tokens,
        [P, B, t, w, E]."""
        return _Coming(self.sequence, self.sequence.dealt(x_BTwE).contiguous(), finish)

    def _by_rank(self, x_BtHE: Tensor, heads: slice) -> Tensor:
        """These heads of each rank's, [P, B, t, w, E]."""
        return x_BtHE.unflatten(2, (self.sequence.size, -1))[:, :, :, heads].movedim(2, 0)

    def _queries(self, x_BtHE: Tensor, rounds: Rounds, r: int) -> Tensor:
        """A round's query heads of every rank, [P, B, t, w, E]."""
        return self._by_rank(x_BtHE, slice(r * rounds.width, (r + 1) * rounds.width))

    def _keys(self, x_BtKE: Tensor, rounds: Rounds, r: int) -> Tensor:
        """A round's KV heads of every rank, [P, B, t, n, E]; a shared head once per rank."""
        if rounds.sharing > 1:
            return x_BtKE.movedim(2, 0).repeat_interleave(rounds.sharing, 0)[:, :, :, None]
        return self._by_rank(x_BtKE, rounds.keys(r))

    def _ahead(self, n_rounds: int, send):
        """Yields (r, the received tensors) of every round. Sends the next round first."""
        coming = send(0)
        for r in range(n_rounds):
            got = [one.wait() for one in coming]
            coming = send(r + 1) if r + 1 < n_rounds else None
            yield r, got
            del got

    # -- the layer's side --------------------------------------------------------------------------
    def join(self, outs: list[Tensor]) -> list[Tensor]:
        """Each call's out [B, t, H, E] from its rounds' [B, t, P*w, E]."""
        joined, rest = [], list(outs)
        for rounds in self.rounds:
            mine, rest = rest[: rounds.count], rest[rounds.count :]
            by_rank = [out.unflatten(2, (self.sequence.size, -1)) for out in mine]
            joined.append(torch.stack(by_rank, 3).flatten(2, 4) if len(mine) > 1 else mine[0])
        return joined + rest

    def forward(
        self, asked: list, mixers: list, parts: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """out [B, t, P*w, E] of this rank's tokens and lse [B, w, T] of its heads, of every round.
        The mixers' outputs [B, t, D] follow.

        mixers: mixers that pass their states from rank to rank (layer/time_ranks.py).
        """
        self.heads, self.rounds, self.states = [], [], []
        self.mixers = mixers
        outs, lses = [], []
        for call, q, k, v in zip(asked, parts[::3], parts[1::3], parts[2::3]):
            self._forward_of(call, q, k, v, outs, lses)
        return outs + self.mixed(parts) if mixers else outs, lses

    def _forward_of(self, call, q: Tensor, k: Tensor, v: Tensor, outs: list, lses: list) -> None:
        """One call's rounds, appended to outs and lses."""
        # 1. The query and KV heads that this rank owns in each round.
        B, t, H, _ = q.shape
        rounds = rounds_of(B, t * self.sequence.size, H, k.shape[2], self.sequence.size)
        first = self.sequence.rank * rounds.own
        starts = range(first, first + rounds.count * rounds.width, rounds.width)
        groups = [(slice(a, a + rounds.width), rounds.keys(r)) for r, a in enumerate(starts)]

        def send(r):
            mine = [self._queries(q, rounds, r)]
            if rounds.new_keys(r):
                mine += [self._keys(x, rounds, r) for x in (k, v)]
            return self._to_rows(mine)

        # 2. A round's result returns while the next round's kernel runs.
        keys = back = heads = None
        for r, (q_w, *new) in self._ahead(rounds.count, send):
            keys = new or keys
            if heads is None:
                heads = Heads(call, groups, pick(q_w))
            out, lse, state = attention_forward(q_w, *keys, **heads.part(groups[r][0]))
            lses.append(lse)
            self.states.append(state)
            if back is not None:
                outs.append(back.wait())
            back = self._to_tokens(out, lambda got: got.movedim(0, 2).flatten(2, 3))
            del q_w, new, out, lse
        outs.append(back.wait())
        self.heads.append(heads)
        self.rounds.append(rounds)

    def backward(self, parts, douts, outs, lses, into) -> list:
        into[:] = [torch.empty_like(part) if dx is None else dx for part, dx in zip(parts, into)]
        dsinks = []
        first = 0  # the call's first round
        for n, rounds in enumerate(self.rounds):
            dsinks.append(self._backward_of(n, first, parts, douts[n], outs, lses, into))
            first += rounds.count
        if self.mixers:
            self.mixed_backward(parts, douts, into)
        return dsinks

    def _backward_of(self, n: int, first: int, parts, dout, outs, lses, into) -> Tensor | None:
        """Writes dq, dk and dv of call n. Returns the gradient of its sinks, None without sinks."""
        heads, rounds = self.heads[n], self.rounds[n]
        q, k, v = parts[3 * n : 3 * n + 3]
        dq_whole, *dkv_whole = into[3 * n : 3 * n + 3]
        dsinks = None if heads.call.sinks_H is None else torch.zeros_like(heads.call.sinks_H)

        def send(r):
            mine = [self._queries(x, rounds, r) for x in (q, dout)]
            mine.append(self._by_rank(outs(first + r), slice(None)))
            if rounds.new_keys(r):
                mine += [self._keys(x, rounds, r) for x in (k, v)]
            return self._to_rows(mine)

        keys = sums = back = None
        for r, (q_w, dout_w, out_w, *new) in self._ahead(rounds.count, send):
            # 1. The kernel, on whole rows of this rank's heads.
            keys = new or keys
            owned = heads.groups[r][0]
            dq, dk, dv, *dsink = attention_backward(
                dout_w,
                q_w,
                *keys,
                out_w,
                lses[first + r],
                self.states[first + r],
                **heads.part(owned),
            )
            lses[first + r] = None
            if dsink:
                dsinks[owned] = dsink[0]
            del q_w, dout_w, out_w, new
            # 2. dq returns while the next round's kernel runs.
            if back is not None:
                self._queries(dq_whole, rounds, r - 1).copy_(back.wait())
            back = self._to_tokens(dq)
            del dq
            # 3. dk and dv return once every round of their heads ran.
            sums = _added(sums, [dk, dv], rounds.of_keys > 2)
            del dk, dv
            if rounds.last_keys(r):
                for whole, grad, like in zip(dkv_whole, sums, keys):
                    self._put_keys(self._to_tokens(grad.to(like.dtype)), whole, rounds, r)
                sums = grad = None
        self._queries(dq_whole, rounds, rounds.count - 1).copy_(back.wait())
        return dsinks

    def _put_keys(self, back: _Coming, whole_BtKE: Tensor, rounds: Rounds, r: int) -> None:
        got_PBtnE = back.wait()
        if rounds.sharing == 1:
            return self._keys(whole_BtKE, rounds, r).copy_(got_PBtnE)
        wide = torch.promote_types(got_PBtnE.dtype, torch.float32)
        summed = got_PBtnE.unflatten(0, (-1, rounds.sharing)).sum(1, dtype=wide)
        whole_BtKE.copy_(summed[:, :, :, 0].movedim(0, 2))


def _added(sums, grads, wide: bool):
    """The sums over a KV head's rounds. wide: in float32, for more than two rounds; a sum of two is
    rounded once either way.
    """
    if sums is not None:
        return [total.add_(grad) for total, grad in zip(sums, grads)]
    return [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads] if wide else grads
