"""A frozen base on the host: each layer's frozen weights come to the device a layer ahead of their
use, into one of two slots.

A layer's frozen tensors lie in one block of pinned host memory, and at rest its parameters are
views of that: saving, loading and moving the model find them there. While the layer runs they are
views of a slot that one copy has filled, on a stream of its own: a copy that waits for a slot holds
up no checkpoint. What autograd would save of a slot is gone when another layer has it, so only
layers that run tile by tile may be differentiated: those leave no graph behind.

Adapters and trained parameters stay on the device, as do embeddings and head.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hfpatch.budget.formula import WEIGHT_SLOTS
from hfpatch.compat import (
    buffers_of,
    is_fake,
    is_view_of_flat,
    lock,
    modules_of,
    not_for_deepspeed,
    parameters_of,
    storage_of,
)
from hfpatch.layer.weight_gradients import REPLACED, edited, is_sharded
from hfpatch.parallel.shards import tensor_parallel_group
from hfpatch.store.pool import Shelf
from hfpatch.store.transfers import Saved, Slot, Ticket, Transfers

ALIGNED = 256  # bytes; where a tensor starts in its block


def _under_adapters(layer: nn.Module) -> list[nn.Module]:
    """The layer's modules but for adapters: of one that wraps a base, that alone."""
    found, left = [], [layer]
    while left:
        module = left.pop()
        found.append(module)
        children = modules_of(module)
        if "base_layer" in children:
            left.append(children["base_layer"])
        elif "modules_to_save" not in children:
            left += [child for child in children.values() if child is not None]
    return found


def _parts(tensor: Tensor, holder, name: str) -> list:
    """(object that holds it, its name there, tensor) of the plain tensors that a tensor is made
    of.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and not is_fake(tensor):
        return [row for n in flatten()[0] for row in _parts(getattr(tensor, n), tensor, n)]
    return [(holder, name, tensor)]


def _state(value, depth: int = 2) -> list:
    """The same of what bitsandbytes keeps beside a weight: scales and codes."""
    if type(value).__module__.partition(".")[0] != "bitsandbytes" or not depth:
        return []
    own = [(value, n, t) for n, t in vars(value).items() if isinstance(t, Tensor)]
    return own + [row for other in vars(value).values() for row in _state(other, depth - 1)]


def frozen_tables(layer: nn.Module) -> list[tuple[dict, str]]:
    """(table, name) of the layer's frozen parameters, and of the buffers of what projects by frozen
    weights: codes and scales.
    """
    found = []
    for module in _under_adapters(layer):
        own = {n: p for n, p in parameters_of(module).items() if p is not None}
        found += [(parameters_of(module), n) for n, p in own.items() if not p.requires_grad]
        if "in_features" in vars(module) and not any(p.requires_grad for p in own.values()):
            found += [
                (buffers_of(module), n) for n, b in buffers_of(module).items() if b is not None
            ]
    return found


def _travelling(layer: nn.Module) -> list:
    """What `_parts` says of all that is frozen, and of what lies beside it."""
    rows = [row for table, n in frozen_tables(layer) for row in _parts(table[n], table, n)]
    frozen = [table[n] for table, n in frozen_tables(layer)]
    beside = [
        v for holder in (*frozen, *_under_adapters(layer)) for v in (holder, *vars(holder).values())
    ]
    rows += [row for value in beside for row in _state(value)]
    return list(
        {(id(holder), name): (holder, name, tensor) for holder, name, tensor in rows}.values()
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _own_storage(bytes_N: Tensor) -> Tensor:
    """The same bytes as a storage that starts and ends with them: what is saved of a block is saved
    alone.
    """
    return bytes_N if is_fake(bytes_N) else torch.from_numpy(bytes_N.numpy())


@dataclass
class _Piece:
    """A tensor that travels, where it lies in its layer's block, and itself at rest."""

    tensor: Tensor
    start: int
    nbytes: int
    strides: tuple
    host: Tensor | None = None
    storage: int | None = None  # of `host`

    def cut(self, bytes_N: Tensor) -> Tensor:
        """Its bytes of a block or slot."""
        return bytes_N[self.start : self.start + self.nbytes]

    def of(self, own_N: Tensor) -> Tensor:
        """Its own bytes as the tensor that they are."""
        return own_N.view(self.tensor.dtype).as_strided(self.tensor.shape, self.strides)


class _Packed:
    """A layer's frozen tensors in one host block, but for those that it shares with layers packed
    before: they lie in theirs.

    nbytes: what it takes of a slot; requests: what fills that (offload.Transfers.fetch).
    """

    def __init__(self, layer: nn.Module, transfers: Transfers, others: list["_Packed"]):
        self.kind, self.pieces, self.nbytes, starts = type(layer).__name__, [], 0, {}
        theirs = {id(piece.tensor): (piece, other.saved) for other in others for piece in other.own}
        shared = []
        for holder, name, tensor in _travelling(layer):
            if id(tensor) in theirs:
                shared.append(theirs[id(tensor)])
                continue
            if not isinstance(tensor, nn.Parameter):
                # A table of levels may be one for all layers: this layer's is its own.
                tensor = tensor.detach()
                holder.__setitem__(name, tensor) if isinstance(holder, dict) else setattr(
                    holder, name, tensor
                )
            strides = (
                tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor).stride()
            )
            nbytes = tensor.numel() * tensor.element_size()
            # One place for two names of the same memory (an 8-bit weight and its state's).
            known = id(tensor) if is_fake(tensor) else (tensor.data_ptr(), nbytes)
            if starts.setdefault(known, self.nbytes) == self.nbytes:
                self.nbytes += _aligned(nbytes)
            self.pieces.append(_Piece(tensor, starts[known], nbytes, strides))
        self.tables, self.requests, self.saved = _noted(layer), [], None
        self.own, self.host_bytes = list(self.pieces), self.nbytes
        if self.nbytes:
            self._to_host(transfers)
        for piece, saved in shared:
            self.requests.append((saved, piece.start, piece.start + piece.nbytes, None))
            self.pieces.append(replace(piece, start=self.nbytes))
            self.nbytes += _aligned(piece.nbytes)

    def _to_host(self, transfers: Transfers) -> None:
        self.saved = Saved((1, self.nbytes), torch.uint8, block=transfers.pool.take(self.nbytes))
        self.requests.append((self.saved, 0, self.nbytes, None))
        block, device = self.saved.block.thing.bytes, transfers.device
        with torch.no_grad():
            for piece in self.pieces:
                piece.of(piece.cut(block)).copy_(piece.tensor, non_blocking=device.pins)
        device.synchronize(device.mark())
        for piece in self.pieces:
            piece.tensor.data = piece.host = piece.of(_own_storage(piece.cut(block)))
            not_for_deepspeed(piece.tensor, True)
        for piece in self.pieces:  # only now: two names may be one tensor's
            piece.storage = storage_of(piece.tensor)

    def blocks(self) -> set[int]:
        """What tells the blocks apart that its tensors lie in."""
        return {id(saved) for saved, *_ in self.requests}

    def trained_by_now(self) -> str | None:
        """A parameter that was frozen and is not any more."""
        return next((name for _, name, tensor in self.tables if tensor.requires_grad), None)

    def given_others(self) -> bool:
        """Whether something of this, at rest, was given other values by its `.data`: they lie
        elsewhere.
        """
        return any(storage_of(piece.tensor) != piece.storage for piece in self.pieces)

    def move_to(self, bytes_N: Tensor) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.of(piece.cut(bytes_N))

    def rest(self) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.host


def _noted(layer: nn.Module) -> list:
    return [(table, n, table[n]) for table, n in frozen_tables(layer)]


def _same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x is y for row, other in zip(a, b) for x, y in zip(row, other))


class StreamedWeights:
    """The frozen weights of a model's layers where they wait on the host: of each session one,
    which knows layers by their index.

    on: whether they do.
    """

    def __init__(self, on: bool):
        self.on = on
        self.packed: dict[int, _Packed] = {}
        self.transfers: Transfers | None = None
        self.slots, self.stream = Shelf(), None
        self.tickets: dict[int, Ticket] = {}  # what the slots hold, the older one first
        self.promised: int | None = None  # what comes next, where nothing is done in between
        # slots, and where parameters lie, are one thread's for the time of a layer
        self.lock = lock()

    # -- putting them on the host ------------------------------------------------------------------
    @torch.inference_mode(False)
    def pack(self, layers, device: torch.device) -> None:
        """Frozen weights of these layers into host memory, once. ValueError where an engine or
        several ranks hold them.
        """
        if self.transfers is not None and self.transfers.on_device != device:
            self.close()  # the model has moved
        for layer in layers:
            packed = self.packed.get(layer._hfpatch_index)
            if packed is not None:
                if name := packed.trained_by_now():
                    raise ValueError(
                        "hfpatch: expected the weights that wait on the host to stay frozen, "
                        f"{packed.kind}'s {name} wants a "
                        "gradient now; call hfpatch.undo(model) and hfpatch.apply(model) again."
                    )
                if _same(packed.tables, _noted(layer)) and not packed.given_others():
                    continue
                self.drop()
                # And those that borrow a tensor of it, or lent it one that lies elsewhere now.
                blocks, own = packed.blocks(), id(packed.saved)
                for index, other in list(self.packed.items()):
                    theirs = other.blocks()
                    if (
                        other is packed
                        or own in theirs
                        or (blocks & theirs and other.given_others())
                    ):
                        del self.packed[index]
            flat = any(map(is_view_of_flat, layer.parameters()))
            if flat or is_sharded(layer) or tensor_parallel_group(layer) is not None:
                raise ValueError(
                    f'hfpatch: expected whole weights for Checkpointing(frozen_weights="host"), a '
                    f"{type(layer).__name__} came whose weights are sharded over ranks; "
                    "leave frozen_weights out, or train adapters without an engine."
                )
            if self.transfers is None:
                self.transfers = Transfers(device, "host")
            self.packed[layer._hfpatch_index] = _Packed(
                layer, self.transfers, list(self.packed.values())
            )

    @property
    def host_bytes(self) -> int:
        """Of all layers."""
        return sum(packed.host_bytes for packed in self.packed.values())

    @property
    def slot_bytes(self) -> int:
        """Of one slot: the largest layer."""
        return max((packed.nbytes for packed in self.packed.values()), default=0)

    @contextmanager
    def staying(self, layer: nn.Module, function):
        """Within, `function`, by which Module._apply changes a layer's tensors, does not see those
        that wait on the host.
        """
        taken = _noted(layer) if self.on else []
        made = [
            (t.dtype, function(torch.empty(0, dtype=t.dtype, device="cpu"))) for _, _, t in taken
        ]
        if any(new.dtype != dtype for dtype, new in made) and self.packed:
            raise ValueError(
                "hfpatch: expected weights that wait on the host to keep their dtype, a cast "
                "came; cast the model before its "
                "first forward, or call hfpatch.undo(model)."
            )
        if not self.packed and all(new.device.type == "cpu" for _, new in made):
            taken = []
        for table, n, tensor in taken:
            not_for_deepspeed(tensor, True)
            table[n] = None
        try:
            yield
        finally:
            for table, n, tensor in taken:
                table[n] = tensor

    def at_rest(self) -> list[Tensor]:
        """All tensors that wait there."""
        return [piece.tensor for packed in self.packed.values() for piece in packed.pieces]

    def refuse_a_graph(self, layer: nn.Module) -> None:
        """ValueError: of a layer that runs whole autograd would save views of a slot."""
        raise ValueError(
            "hfpatch: expected layers that run tile by tile for "
            'Checkpointing(frozen_weights="host"), a '
            f"{type(layer).__name__} came that runs whole, whose backward would find other "
            "weights; "
            "leave frozen_weights out, or call it under torch.no_grad()."
        )

    def _refuse_no_base(self, kind: str) -> None:
        if torch.is_grad_enabled() and not self.host_bytes:
            raise ValueError(
                'hfpatch: expected frozen weights for Checkpointing(frozen_weights="host"), '
                f"every parameter of {kind} "
                "is trained; freeze the base (PEFT does, or hfpatch.freeze_base), or leave "
                "frozen_weights out."
            )

    # -- bringing them to the device ---------------------------------------------------------------
    def forward(self, layer: nn.Module, device: torch.device):
        """Context in which a layer's weights are on the device, for a forward; the next layer's are
        under way.
        """
        return self._forward(layer, device) if self.on else nullcontext()

    @contextmanager
    def _forward(self, layer: nn.Module, device: torch.device):
        index = layer._hfpatch_index
        with self.lock:
            self.pack([layer], device)
            if self.promised != index:
                self.drop()  # at rest they may have been written to: loaded, merged
            with self._on_device(index, index + 1, index + 1):
                yield

    def again(self, layer: nn.Module, then: nn.Module | None):
        """The same in backward. then: whose turn it is next."""
        return self._again(layer, then) if self.on else nullcontext()

    @contextmanager
    def _again(self, layer: nn.Module, then: nn.Module | None):
        with self.lock:
            packed = self.packed.get(layer._hfpatch_index)
            if self.packed and (packed is None or packed.given_others()):
                raise edited(f"a weight of a {type(layer).__name__}", REPLACED)
            with self._on_device(
                layer._hfpatch_index, None if then is None else then._hfpatch_index
            ):
                yield

    @contextmanager
    def _on_device(self, index: int, then: int | None, promised: int | None = None):
        with self.lock:
            packed = self.packed.get(index)  # None after undo()
            if packed is None or not packed.nbytes:
                if packed is not None:
                    self._refuse_no_base(packed.kind)
                yield
                return
            if self.stream != self.transfers.device.current():
                self.drop()
            ticket, device = None, self.transfers.device
            try:
                # what is made in it could not be written to outside
                with torch.inference_mode(False):
                    ticket = self._fetch(index)
                    ticket.wait()
                    packed.move_to(ticket.slot.thing.bytes)
                    if then in self.packed and self.packed[then].nbytes:
                        self._fetch(then)
                self.promised = promised
                yield
            except BaseException:
                self.drop()
                raise
            finally:
                # At rest the caller may write to them. The copy came a layer ahead, so the device
                # still has a layer to run.
                if ticket is not None:
                    device.synchronize(ticket.ready)
                with torch.inference_mode(False):
                    packed.rest()
                # At rest the caller may write to them. The copy came a layer ahead, so the device
                # still has a layer to run.
                if ticket is not None:
                    device.synchronize(ticket.ready)

    def _fetch(self, index: int) -> Ticket:
        """A layer's weights on their way into a slot: the one that was asked for longest ago."""
        packed, ticket = self.packed[index], self.tickets.pop(index, None)
        if ticket is None:
            self.make_slots()
            if len(self.tickets) == WEIGHT_SLOTS:
                self.tickets.pop(next(iter(self.tickets))).done()
            ticket = self.transfers.fetch(packed.requests, self.slots.take())
        self.tickets[index] = ticket
        return ticket

    @torch.inference_mode(False)
    def make_slots(self) -> None:
        """The slots, kept while they serve."""
        device, rows = self.transfers.device, self.slots.rows
        if rows and rows[0][0].bytes.numel() >= self.slot_bytes and self.stream == device.current():
            return
        self.drop()
        buffers = [
            torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.transfers.on_device)
            for _ in range(WEIGHT_SLOTS)
        ]
        made = device.mark()
        self.slots, self.stream = (
            Shelf([Slot(buffer, made) for buffer in buffers]),
            device.current(),
        )

    def drop(self) -> None:
        """Forgets what the slots hold."""
        while self.tickets:
            self.tickets.popitem()[1].done()
        self.promised = None

    def close(self) -> None:
        """Gives back slots and streams; parameters stay in host memory, which lives as long as they
        do.
        """
        self.drop()
        self.slots, self.packed, self.transfers = Shelf(), {}, None
