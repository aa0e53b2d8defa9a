"""One layer's frozen weights in one block of host memory (layer/streamed_weights.py).

The tensors lie one after another in the block, each aligned. At rest the layer's parameters are
views of it. A quantised weight takes its scales, codes and bitsandbytes' state along.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    buffers_of,
    is_fake,
    modules_of,
    not_for_deepspeed,
    parameters_of,
    storage_of,
)
from hfpatch.store.transfers import Saved, Transfers

ALIGNED = 256  # bytes; a tensor starts at a multiple of it


def _under_adapters(layer: nn.Module) -> list[nn.Module]:
    """The layer's modules without adapters: of a wrapper's children, only its base."""
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
    """(holder, name, tensor) of the plain tensors that make up a tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and not is_fake(tensor):
        return [row for n in flatten()[0] for row in _parts(getattr(tensor, n), tensor, n)]
    return [(holder, name, tensor)]


def _state(value, depth: int = 2) -> list:
    """The same for bitsandbytes' state of a weight: scales and codes."""
    if type(value).__module__.partition(".")[0] != "bitsandbytes" or not depth:
        return []
    own = [(value, n, t) for n, t in vars(value).items() if isinstance(t, Tensor)]
    return own + [row for other in vars(value).values() for row in _state(other, depth - 1)]


def frozen_tables(layer: nn.Module) -> list[tuple[dict, str]]:
    """(table, name) of the layer's frozen parameters, and of the buffers of frozen projections:
    codes and scales.
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
    """(holder, name, tensor) of all frozen tensors and of their quantisation state, each once."""
    rows = [row for table, n in frozen_tables(layer) for row in _parts(table[n], table, n)]
    frozen = [table[n] for table, n in frozen_tables(layer)]
    beside = [
        v for holder in (*frozen, *_under_adapters(layer)) for v in (holder, *vars(holder).values())
    ]
    rows += [row for value in beside for row in _state(value)]
    return list(
        {(id(holder), name): (holder, name, tensor) for holder, name, tensor in rows}.values()
    )


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
    storage: int | None = None  # of `host`

    def cut(self, bytes_N: Tensor) -> Tensor:
        """Its bytes in a block or slot."""
        return bytes_N[self.start : self.start + self.nbytes]

    def of(self, own_N: Tensor) -> Tensor:
        """Its bytes, viewed as the tensor."""
        return own_N.view(self.tensor.dtype).as_strided(self.tensor.shape, self.strides)


class Packed:
    """A layer's frozen tensors in one host block.

    nbytes: its size; saved: the block, None without such tensors.

    Raises:
        ValueError: a tensor is among `others`, those of the layers packed before.
    """

    def __init__(self, layer: nn.Module, transfers: Transfers, others: set[int]):
        self.kind, self.pieces, self.nbytes, starts = type(layer).__name__, [], 0, {}
        for holder, name, tensor in _travelling(layer):
            if id(tensor) in others:
                raise ValueError(
                    f'hfpatch: frozen_weights="host" needs weights of one layer each, and {name} '
                    f"of a {self.kind} is shared with another layer. Pass "
                    'Checkpointing(frozen_weights="gpu").'
                )
            if not isinstance(tensor, nn.Parameter):
                # All layers may share a table of levels: this layer gets its own alias.
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
                self.nbytes += -(-nbytes // ALIGNED) * ALIGNED
            self.pieces.append(_Piece(tensor, starts[known], nbytes, strides))
        self.tables, self.saved = noted(layer), None
        if self.nbytes:
            self._to_host(transfers)

    def _to_host(self, transfers: Transfers) -> None:
        block = transfers.pool.take(self.nbytes)
        self.saved = Saved((1, self.nbytes), torch.uint8, block=block, row_bytes=1, resident=False)
        block, device = self.saved.block.thing.bytes, transfers.device
        with torch.no_grad():
            for piece in self.pieces:
                piece.of(piece.cut(block)).copy_(piece.tensor, non_blocking=device.pins)
        device.synchronize(device.mark())
        for piece in self.pieces:
            own_N = piece.cut(block)
            if not is_fake(own_N):
                # A storage of its own: saving a tensor must not save the whole block.
                own_N = torch.from_numpy(own_N.numpy())
            piece.tensor.data = piece.host = piece.of(own_N)
            not_for_deepspeed(piece.tensor, True)
        for piece in self.pieces:  # in a second loop: two names may be one tensor's
            piece.storage = storage_of(piece.tensor)

    def given_others(self) -> bool:
        """Whether a tensor at rest lies in other memory now: its `.data` was replaced."""
        return any(storage_of(piece.tensor) != piece.storage for piece in self.pieces)

    def move_to(self, bytes_N: Tensor) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.of(piece.cut(bytes_N))

    def rest(self) -> None:
        for piece in self.pieces:
            piece.tensor.data = piece.host


def noted(layer: nn.Module) -> list:
    return [(table, n, table[n]) for table, n in frozen_tables(layer)]


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x is y for row, other in zip(a, b) for x, y in zip(row, other))
