"""A frozen base on the host. Each layer's frozen weights are copied to the device a layer ahead of
their use, into one of two slots.

A layer's frozen tensors lie in one block of pinned host memory. At rest its parameters are views of
that block: saving, loading and moving the model find them there. While the layer runs they are
views of a slot, which one copy has filled. The copies have a stream of their own: one that waits
for a slot delays no checkpoint. The next layer overwrites what autograd saves of a slot. So only
layers in tiles may be differentiated: they leave no graph behind.

Adapters and trained parameters stay on the device, as do embeddings and head.
"""

import threading
from contextlib import contextmanager

import torch
from torch import nn

from hfpatch.budget.policy import WEIGHT_SLOTS
from hfpatch.compat import (
    is_view_of_flat,
    not_for_deepspeed,
)
from hfpatch.layer.forward_state import edited, is_sharded
from hfpatch.layer.packed_weights import (
    Packed,
    frozen_tables,  # noqa: F401 (for callers of both)
    noted,
    same,
)
from hfpatch.parallel.shards import tensor_parallel_group
from hfpatch.store.transfers import Ring, Ticket, Transfers


class StreamedWeights:
    """The frozen weights of a model's layers on the host. Belongs to one LayerRuntime; layers are
    known by their index.

    on: whether the weights wait on the host.
    """

    def __init__(self, on: bool):
        self.on = on
        self.packed: dict[int, Packed] = {}
        self.transfers: Transfers | None = None
        self.ring: Ring | None = None
        self.tickets: dict[int, Ticket] = {}  # fetches into the slots, the oldest first
        # The layer that the previous forward prefetched. A forward of any other layer drops all slots
        # first, so that edits to weights at rest count.
        self.prefetched: int | None = None
        # one thread at a time uses slots and moves parameters, for as long as a layer runs
        self.lock = threading.RLock()

    # -- putting them on the host ------------------------------------------------------------------
    @torch.inference_mode(False)
    def pack(self, layers, device: torch.device) -> None:
        """Moves the frozen weights of these layers to host memory, once. ValueError if an engine or
        several ranks hold them, or if two layers have one.
        """
        if self.transfers is not None and self.transfers.on_device != device:
            self.close()  # the model is on another device now
        for layer in layers:
            packed = self.packed.get(layer._hfpatch.index)
            if packed is not None:
                if same(packed.tables, noted(layer)) and not packed.given_others():
                    continue
                self.drop()
                del self.packed[layer._hfpatch.index]
            flat = any(map(is_view_of_flat, layer.parameters()))
            if flat or is_sharded(layer) or tensor_parallel_group(layer) is not None:
                raise ValueError(
                    'hfpatch: Checkpointing(frozen_weights="host") needs whole weights, got a '
                    f"{type(layer).__name__} whose weights are sharded over ranks. Leave "
                    "frozen_weights out, or train adapters without an engine."
                )
            if self.transfers is None:
                self.transfers = Transfers(device, "host")
                self.ring = Ring(self.transfers)
            others = {id(piece.tensor) for p in self.packed.values() for piece in p.pieces}
            self.packed[layer._hfpatch.index] = Packed(layer, self.transfers, others)

    @property
    def host_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(packed.nbytes for packed in self.packed.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest layer."""
        return max((packed.nbytes for packed in self.packed.values()), default=0)

    @contextmanager
    def staying(self, layer: nn.Module, function):
        """Context in which `function`, which Module._apply applies to a layer's tensors, skips
        those that wait on the host.
        """
        taken = noted(layer) if self.on else []
        to = function(torch.empty(0, device="cpu")).device
        if not self.packed and to.type == "cpu":
            taken = []
        for table, n, tensor in taken:
            not_for_deepspeed(tensor, True)
            table[n] = None
        try:
            yield
        finally:
            for table, n, tensor in taken:
                table[n] = tensor

    # -- bringing them to the device ---------------------------------------------------------------
    @contextmanager
    def forward(self, layer: nn.Module, device: torch.device):
        """Context of a layer's forward, with its weights on the device. The next layer's are
        prefetched.
        """
        if not self.on:
            yield
            return
        index = layer._hfpatch.index
        with self.lock:
            self.pack([layer], device)
            if self.prefetched != index:
                self.drop()  # weights at rest may have changed: loaded, merged
            with self._on_device(index, index + 1, index + 1):
                yield

    @contextmanager
    def again(self, layer: nn.Module, then: nn.Module | None):
        """The same for its backward. then: the layer that runs next."""
        if not self.on:
            yield
            return
        with self.lock:
            packed = self.packed.get(layer._hfpatch.index)
            if self.packed and (packed is None or packed.given_others()):
                raise edited(f"a weight of a {type(layer).__name__}", "replaced")
            following = None if then is None else then._hfpatch.index
            with self._on_device(layer._hfpatch.index, following):
                yield

    @contextmanager
    def _on_device(self, index: int, then: int | None, prefetched: int | None = None):
        packed = self.packed.get(index)  # None after undo()
        if packed is None or not packed.nbytes:
            yield
            return
        if self.ring.stream != self.transfers.device.current():
            self.drop()
        ticket, device = None, self.transfers.device
        try:
            # tensors made in inference mode could not be written to outside it
            with torch.inference_mode(False):
                ticket = self._fetch(index)
                ticket.wait()
                packed.move_to(ticket.slot.bytes)
                if then in self.packed and self.packed[then].nbytes:
                    self._fetch(then)
            self.prefetched = prefetched
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            # The caller may write to weights at rest, so the host waits for the copy. It began
            # a layer ahead, so the device still has a layer to run.
            if ticket is not None:
                device.synchronize(ticket.ready)
            with torch.inference_mode(False):
                packed.rest()

    def _fetch(self, index: int) -> Ticket:
        """The fetch of a layer's weights: the one in flight, or a new one into the least recently
        used slot.
        """
        packed, ticket = self.packed[index], self.tickets.pop(index, None)
        if ticket is None:
            self.make_slots()
            if len(self.tickets) == WEIGHT_SLOTS:
                self.tickets.pop(next(iter(self.tickets))).done()
            free = self.ring.free
            request = (packed.saved, 0, packed.nbytes, None)
            ticket = self.transfers.fetch([request], free.popleft(), free)
        self.tickets[index] = ticket
        return ticket

    @torch.inference_mode(False)
    def make_slots(self) -> None:
        """Allocates the slots, unless the present ones serve."""
        ring = self.ring
        # an exception may have interrupted a fetch, which then has no ticket
        lost = len(ring.free) + len(self.tickets) < len(ring.slots)
        if lost or not ring.serves(WEIGHT_SLOTS, self.slot_bytes):
            self.drop()
            ring.drop_ring()
            ring.make_ring(WEIGHT_SLOTS, self.slot_bytes)

    def drop(self) -> None:
        """Drops the content of the slots."""
        while self.tickets:
            self.tickets.popitem()[1].done()
        self.prefetched = None

    def close(self) -> None:
        """Frees slots and streams. Parameters stay in host memory and keep it alive."""
        self.drop()
        self.packed, self.transfers, self.ring = {}, None, None
