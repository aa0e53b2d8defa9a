"""A frozen base on the host. Each layer's frozen weights are copied to the device a layer ahead of
their use, into one of two slots.

A layer's frozen tensors lie one after another in one block of pinned host memory (`Packed`), each
aligned. A quantised weight takes its scales, codes and bitsandbytes' state along. At rest the
layer's parameters are views of that block: saving, loading and moving the model find them there.
While the layer runs they are views of a slot, which one copy has filled. The copies have a stream
of their own: one that waits for a slot delays no checkpoint. The next layer overwrites what
autograd saves of a slot. So only layers in tiles may be differentiated: they leave no graph behind.

Adapters and trained parameters stay on the device, as do embeddings and head.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.budget.policy import WEIGHT_SLOTS
from hfpatch.compat import (
    buffers_of,
    is_fake,
    is_view_of_flat,
    modules_of,
    not_for_deepspeed,
    parameters_of,
    storage_of,
    values_for_now,
)
from hfpatch.context.classes import home_of
from hfpatch.layer.forward_state import edited, is_sharded
from hfpatch.parallel.shards import tensor_parallel_group
from hfpatch.store.transfers import Ring, Saved, Ticket, Transfers

# --- one layer's block ---------------------------------------------------------------------------

ALIGNED = 256  # bytes; a tensor starts at a multiple of it


def _under_adapters(layer: nn.Module) -> list[nn.Module]:
    """The layer's modules without adapters: of a wrapper's children, only its base."""
    found = []
    left = [layer]
    while left:
        module = left.pop()
        found.append(module)
        children = modules_of(module)
        if "base_layer" in children:
            left.append(children["base_layer"])
        elif "modules_to_save" not in children:
            left += [child for child in children.values() if child is not None]
    return found


def _parts(table: dict, name: str) -> list:
    """(table, name) of the plain tensors that make up the tensor table[name]."""
    tensor = table[name]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or is_fake(tensor):
        return [(table, name)]
    names, _ = flatten()
    return [row for n in names for row in _parts(vars(tensor), n)]


def _state(value, depth: int = 2) -> list:
    """The same for bitsandbytes' state of a weight: scales and codes."""
    if home_of(type(value)) != "bitsandbytes" or not depth:
        return []
    own = vars(value)
    found = [(own, n) for n, x in own.items() if isinstance(x, Tensor)]
    for inner in own.values():
        found += _state(inner, depth - 1)
    return found


def frozen_tables(layer: nn.Module) -> list[tuple[dict, str]]:
    """(table, name) of the layer's frozen parameters, and of the buffers of frozen projections:
    codes and scales.
    """
    found = []
    for module in _under_adapters(layer):
        own = parameters_of(module)
        frozen = [n for n, p in own.items() if p is None or not p.requires_grad]
        found += [(own, n) for n in frozen if own[n] is not None]
        if "in_features" in vars(module) and len(frozen) == len(own):
            buffers = buffers_of(module)
            found += [(buffers, n) for n, b in buffers.items() if b is not None]
    return found


def _travelling(layer: nn.Module) -> list[tuple[dict, str]]:
    """(table, name) of all frozen tensors and of their quantisation state, each once."""
    rows = []
    owners = _under_adapters(layer)
    for table, name in frozen_tables(layer):
        rows += _parts(table, name)
        owners.append(table[name])
    for owner in owners:
        for value in (owner, *vars(owner).values()):
            rows += _state(value)
    return list({(id(table), name): (table, name) for table, name in rows}.values())


@dataclass
class _Piece:
    """A frozen tensor, its place in the layer's block, and its view of the block at rest
    (`host`).
    """

    tensor: Tensor
    start: int
    nbytes: int
    strides: tuple
    host: Tensor | None = None

    def of(self, bytes_N: Tensor, alone: bool = False) -> Tensor:
        """Its bytes in a block or slot, viewed as the tensor. alone: in a storage of its own."""
        own_N = bytes_N[self.start : self.start + self.nbytes]
        if alone and not is_fake(own_N):
            own_N = torch.from_numpy(own_N.numpy())
        return own_N.view(self.tensor.dtype).as_strided(self.tensor.shape, self.strides)


class Packed:
    """A layer's frozen tensors in one host block.

    nbytes: its size; saved: the block, None without such tensors.

    Raises:
        ValueError: a tensor is among `others`, those of the layers packed before.
    """

    def __init__(self, layer: nn.Module, transfers: Transfers, others: set[int]):
        self.pieces = []
        self.nbytes = 0
        self.saved = None
        starts = {}
        for table, name in _travelling(layer):
            tensor = table[name]
            if id(tensor) in others:
                raise ValueError(
                    f'hfpatch: frozen_weights="host" needs weights of one layer each, and {name} '
                    f"of a {type(layer).__name__} is shared with another layer. Pass "
                    'Checkpointing(frozen_weights="gpu").'
                )
            if not isinstance(tensor, nn.Parameter):
                # All layers may share a table of levels: this layer gets its own alias.
                table[name] = tensor = tensor.detach()
            strides = torch.empty_like(tensor, device="meta").stride()
            nbytes = tensor.numel() * tensor.element_size()
            # One place for two names of the same memory (an 8-bit weight and its state's).
            key = id(tensor) if is_fake(tensor) else (tensor.data_ptr(), nbytes)
            if starts.setdefault(key, self.nbytes) == self.nbytes:
                self.nbytes += -(-nbytes // ALIGNED) * ALIGNED
            self.pieces.append(_Piece(tensor, starts[key], nbytes, strides))
        self.frozen = frozen_in(layer)
        if self.nbytes:
            self._to_host(transfers)

    def _to_host(self, transfers: Transfers) -> None:
        loan = transfers.pool.take(self.nbytes)
        self.saved = Saved((1, self.nbytes), torch.uint8, block=loan, row_bytes=1, resident=False)
        block = loan.bytes
        device = transfers.device
        with torch.no_grad():
            for piece in self.pieces:
                # A storage of its own: saving a tensor must not save the whole block.
                piece.host = piece.of(block, alone=True)
                piece.host.copy_(piece.tensor, non_blocking=device.pins)
                not_for_deepspeed(piece.tensor, True)
        device.synchronize(device.mark())
        self.rest()

    def given_others(self) -> bool:
        """Whether a tensor at rest lies in other memory now: its `.data` was replaced."""
        return any(storage_of(piece.tensor) != storage_of(piece.host) for piece in self.pieces)

    def move_to(self, bytes_N: Tensor) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.of(bytes_N)

    def rest(self) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.host


def frozen_in(layer: nn.Module) -> list[Tensor]:
    return [table[n] for table, n in frozen_tables(layer)]


# --- all layers' blocks and the slots -------------------------------------------------------------


class StreamedWeights:
    """The frozen weights of a model's layers on the host. Belongs to one LayerRuntime; layers are
    known by their index.

    on: whether the weights wait on the host.
    """

    def __init__(self, on: bool):
        self.on = on
        self.packed: dict[int, Packed] = {}
        self.ring: Ring | None = None
        self.tickets: dict[int, Ticket] = {}  # fetches into the slots, the oldest first
        # The layer that the previous forward prefetched. A forward of any other layer drops all slots
        # first, so that edits to weights at rest count.
        self.prefetched: int | None = None

    # -- putting them on the host ------------------------------------------------------------------
    @torch.inference_mode(False)
    def pack(self, layers, device: torch.device) -> None:
        """Moves the frozen weights of these layers to host memory, once. ValueError if an engine or
        several ranks hold them, or if two layers have one.
        """
        if self.ring is not None and self.ring.transfers.on_device != device:
            self.close()  # the model is on another device now
        for layer in layers:
            index = layer._hfpatch.index
            packed = self.packed.get(index)
            if packed is not None:
                as_packed = list(map(id, frozen_in(layer))) == list(map(id, packed.frozen))
                if as_packed and not packed.given_others():
                    continue
                self.drop()
                del self.packed[index]
            flat = any(map(is_view_of_flat, layer.parameters()))
            if flat or is_sharded(layer) or tensor_parallel_group(layer) is not None:
                raise ValueError(
                    'hfpatch: Checkpointing(frozen_weights="host") needs whole weights, got a '
                    f"{type(layer).__name__} whose weights are sharded over ranks. Leave "
                    "frozen_weights out, or train adapters without an engine."
                )
            if self.ring is None:
                self.ring = Ring(Transfers(device, "host"))
            others = {id(piece.tensor) for p in self.packed.values() for piece in p.pieces}
            self.packed[index] = Packed(layer, self.ring.transfers, others)

    @property
    def host_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(packed.nbytes for packed in self.packed.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest layer."""
        return max((packed.nbytes for packed in self.packed.values()), default=0)

    @contextmanager
    def staying(self, layer: nn.Module, to: torch.device):
        """Context in which Module._apply, which moves a layer's tensors to a device, skips those that
        wait on the host.
        """
        staying = []
        if self.on and (self.packed or to.type != "cpu"):
            staying = frozen_tables(layer)
        for table, n in staying:
            not_for_deepspeed(table[n], True)
        with values_for_now([(table, n, None) for table, n in staying]):
            yield

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
        self.pack([layer], device)
        if self.prefetched != index:
            self.drop()  # weights at rest may have changed: loaded, merged
        with self._on_device(index, following=index + 1, prefetched=index + 1):
            yield

    @contextmanager
    def backward(self, layer: nn.Module, next_layer: nn.Module | None):
        """The same for its backward."""
        if not self.on:
            yield
            return
        packed = self.packed.get(layer._hfpatch.index)
        if self.packed and (packed is None or packed.given_others()):
            raise edited(f"a weight of a {type(layer).__name__}", "replaced")
        following = None if next_layer is None else next_layer._hfpatch.index
        with self._on_device(layer._hfpatch.index, following=following, prefetched=None):
            yield

    @contextmanager
    def _on_device(self, index: int, *, following: int | None, prefetched: int | None):
        """Context with a layer's weights on the device. following: the layer to fetch meanwhile;
        prefetched: what the attribute becomes.
        """
        packed = self.packed.get(index)  # None after undo()
        if packed is None or not packed.nbytes:
            yield
            return
        # [Step 1] Drop the slots' content if another stream allocated them.
        device = self.ring.transfers.device
        if self.ring.stream != device.current():
            self.drop()
        ticket = None
        try:
            # [Step 2] Bring the layer's weights to the device, and start to fetch those of the next
            # layer. Tensors made in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                ticket = self._fetch(index)
                ticket.wait()
                packed.move_to(ticket.slot.bytes)
                if following in self.packed and self.packed[following].nbytes:
                    self._fetch(following)
            self.prefetched = prefetched
            yield
        except BaseException:
            self.drop()
            raise
        finally:
            # [Step 3] Put the weights at rest again. The caller may write to the host weights, so
            # the CPU waits for this layer's copy, not for its kernels, which are already queued.
            if ticket is not None:
                device.synchronize(ticket.ready)
            with torch.inference_mode(False):
                packed.rest()

    def _fetch(self, index: int) -> Ticket:
        """The fetch of a layer's weights: the one in flight, or a new one into the least recently
        used slot.
        """
        packed = self.packed[index]
        ticket = self.tickets.pop(index, None)
        if ticket is None:
            self.make_slots()
            if len(self.tickets) == WEIGHT_SLOTS:
                self.tickets.pop(next(iter(self.tickets))).done()
            free = self.ring.free
            request = (packed.saved, 0, packed.nbytes, None)
            ticket = self.ring.transfers.fetch([request], free.popleft(), free)
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
        self.packed = {}
        self.ring = None
