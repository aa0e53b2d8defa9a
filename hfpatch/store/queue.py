"""The order in which a backward's tiles come back: a queue of fetches over a ring of buffers."""

from collections import deque

import torch

from hfpatch.compat import graph_task
from hfpatch.store.transfers import Slot, Ticket, Transfers


class Ring:
    """Device buffers for fetches under way, taken in turn.

    A slot is free again as soon as its ticket is done, or goes: wherever an exception ends a step,
    nothing has to be handed back.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.drop_ring()

    def drop_ring(self) -> None:
        """Frees the slots, each when its last ticket goes."""
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()
        self.stream = None

    def serves(self, count: int, nbytes: int) -> bool:
        """Whether there are so many slots of that size, of the current stream's memory."""
        slots = self.slots
        large = len(slots) >= count and slots[0].bytes.numel() >= nbytes
        return large and self.stream == self.transfers.device.current()

    def make_ring(self, count: int, nbytes: int) -> None:
        """`count` buffers of nbytes, kept while they serve."""
        if self.serves(count, nbytes):
            return
        self.drop_ring()
        device, buffers = self.transfers.device, []
        for _ in range(count):
            buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=self.transfers.on_device))
        made, self.stream = device.mark(), device.current()
        self.slots = [Slot(buffer, made) for buffer in buffers]
        self.free.extend(self.slots)


class FetchQueue(Ring):
    """The tiles that one backward pass will want, in order: as many under way as its ring has
    slots, across layers.

    What is left in it when another pass (or a forward) begins belongs to a pass that was cut short:
    begin() drops it.
    """

    def __init__(self, transfers: Transfers):
        super().__init__(transfers)
        self.task = -1
        self.pending: deque = deque()
        self.under_way: deque = deque()

    def begin(self) -> None:
        """Called where a pass may begin: starts clean where it is not the pass that filled the
        queue.
        """
        task = graph_task()
        if task != self.task:
            self.transfers.settle()  # what this pass reads has been written
            self.reset()
            self.drop_ring()
            self.task = task

    def push(self, owner, requests) -> None:
        """requests: one function a tile, returning the pieces for Transfers.fetch when its turn has
        come.
        """
        for request in requests:
            self.pending.append((owner, request))
        self._fill()

    def _fill(self) -> None:
        while self.pending and self.free:
            owner, request = self.pending[0]
            ticket = self.transfers.fetch(request(), self.free.popleft(), self.free)
            self.under_way.append((owner, ticket))
            self.pending.popleft()

    def is_for(self, owner) -> bool:
        """Whether the owner, whose turn it is, has something here. What others have goes: one who
        was promised the next turn, where graphs that two threads made take turns in one pass.
        """
        mine = [deque(), deque()]
        for queue, kept in zip((self.under_way, self.pending), mine):
            for item in queue:
                if item[0] is owner:
                    kept.append(item)
        others = len(mine[0]) < len(self.under_way) or len(mine[1]) < len(self.pending)
        self.under_way, self.pending = mine
        if others:
            queue = kept = item = None
            self._fill()
        return bool(self.under_way or self.pending)

    def reset(self) -> None:
        """Forgets everything: the backward took another order than the forward promised, or ended
        early.
        """
        self.pending.clear()
        self.under_way.clear()

    def next(self) -> Ticket:
        """The ticket of the next tile; call release() with it when the last use of its tensors is
        launched.
        """
        return self.under_way.popleft()[1]

    def release(self, ticket: Ticket) -> None:
        ticket.done()
        self._fill()
