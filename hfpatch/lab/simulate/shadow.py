"""Real values behind small fake tensors, so that `.item()`, `bool()`, `equal` and `nonzero` have an
answer.

Token ids, labels, position ids and masks are small even at a million tokens, and control flow
depends on them alone. The shadow of a storage is a real storage of the same size; views and
in-place operations need no cases of their own.
"""

import weakref
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hfpatch.compat import buffers_of, parameters_of, real_tensors
from hfpatch.lab.compat import simulation_parts

LARGEST_WHOLE = 128 << 20  # bytes, integer and boolean tensors
# bytes, floating-point tensors (scalars, counts, frequencies) and raw bytes of buffers
LARGEST_FLOAT = 1 << 16

aten = torch.ops.aten
_DATA_DEPENDENT = set(map(id, (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default,
                   aten.masked_select.default,
                   aten.repeat_interleave.Tensor, aten._unique2.default,
                   aten.unique_consecutive.default,
                   aten.unique_dim.default, aten.bincount.default)))  # fmt: skip
# Their results do not depend on the values of their tensor argument.
_LIKE = set(map(id, (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
         aten.empty_like.default,
         aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
         aten.new_empty.default)))  # fmt: skip
_INDEX = aten.index.Tensor
_UNKNOWN = object()
FakeTensor = simulation_parts()[1]


class Shadows:
    """The real storages behind fake ones. fake_mode: the FakeTensorMode of the fakes."""

    def __init__(self, fake_mode):
        self.fake_mode = fake_mode
        self._real: dict = {}  # id(fake storage) -> (weak reference, real storage)

    def put(self, fake: Tensor, real: Tensor) -> None:
        """Puts a copy of real (same shape, dtype) behind fake, which must own its whole storage."""
        storage = fake.untyped_storage()
        key = id(storage)
        with real_tensors():
            copy = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            copy.copy_(real)
            gone = weakref.ref(storage, lambda _: self._real.pop(key, None))
            self._real[key] = (gone, copy.untyped_storage())

    def get(self, fake: Tensor):
        """The real tensor behind fake, which shares memory with the other views of its storage.
        None if the values are unknown.
        """
        if not isinstance(fake, FakeTensor):
            return fake  # a constant made from Python numbers
        found = self._real.get(id(fake.untyped_storage()))
        if found is None:
            return None
        with real_tensors():
            real = torch.empty(0, dtype=fake.dtype)
            return real.set_(found[1], fake.storage_offset(), fake.shape, fake.stride())

    def fake(self, real: Tensor) -> Tensor:
        """A fake tensor like real, with real behind it."""
        out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        self.put(out, real)
        return out

    def _map(self, tree):
        if isinstance(tree, Tensor):
            real = self.get(tree)
            return _UNKNOWN if real is None else real
        if isinstance(tree, (list, tuple)):
            items = [self._map(item) for item in tree]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else type(tree)(items)
        if isinstance(tree, dict):
            items = {k: self._map(v) for k, v in tree.items()}
            return _UNKNOWN if any(item is _UNKNOWN for item in items.values()) else items
        return tree

    def answer(self, func, args, kwargs):
        """(True, value) for an operation whose result or result's shape depends on known values,
        else (False, None).
        """
        by_mask = func is _INDEX and any(i is not None and i.dtype == torch.bool for i in args[1])
        if id(func) not in _DATA_DEPENDENT and not by_mask:
            return False, None
        if by_mask and self._map(args[0]) is _UNKNOWN:
            # Values unknown, mask known: the same gather by positions has a known shape.
            masks = [None if i is None else self.get(i) for i in args[1]]
            if any(m is None and i is not None for m, i in zip(masks, args[1])):
                return False, None
            with real_tensors():
                cut = [
                    m.nonzero(as_tuple=True) if m is not None and m.dtype == torch.bool else (m,)
                    for m in masks
                ]
            return True, aten.index.Tensor(
                args[0], [m if m is None else self.fake(m) for part in cut for m in part]
            )
        reals, real_kwargs = self._map(args), self._map(kwargs)
        if reals is _UNKNOWN or real_kwargs is _UNKNOWN:
            return False, None
        with real_tensors():
            out = func(*reals, **real_kwargs)
        if isinstance(out, Tensor):
            return True, self.fake(out)
        # a number, a boolean
        return True, tuple(self.fake(o) for o in out) if isinstance(out, tuple) else out

    def run(self, operation, args, kwargs, inputs, outputs) -> None:
        """Repeats an operation on the values behind its arguments, or forgets the values it
        overwrote.
        """
        func = operation.func
        fresh = [o for o in outputs if id(o.untyped_storage()) not in self._real]
        if not operation.mutable and not fresh:
            return  # views of something known
        if self._runnable(func, inputs, fresh):
            if id(func) in _LIKE and not self._known(args[0]):
                args = (self._blank(args[0]), *args[1:])
            reals, real_kwargs = self._map(args), self._map(kwargs)
            real_kwargs = {k: v for k, v in real_kwargs.items() if k != "pin_memory"}
            if real_kwargs.get("device") is not None:
                real_kwargs["device"] = torch.device("cpu")
            with real_tensors(), torch.no_grad():
                out = func(*reals, **real_kwargs)
            outs = (
                [out]
                if isinstance(out, Tensor)
                else [o for o in out or () if isinstance(o, Tensor)]
            )
            for fake, real in zip(outputs, outs):
                if id(fake.untyped_storage()) not in self._real and fake.shape == real.shape:
                    self.put(fake, real)
        else:
            for value in (args[at] for at in operation.written if at < len(args)):
                if isinstance(value, Tensor):
                    self._real.pop(id(value.untyped_storage()), None)

    def _known(self, tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or id(tensor.untyped_storage()) in self._real

    def _runnable(self, func, inputs, fresh) -> bool:
        if id(func) not in _LIKE and not all(map(self._known, inputs)):
            return False
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        for out in fresh:
            raw = out.is_floating_point() or out.dtype == torch.uint8
            if out.untyped_storage().nbytes() > (LARGEST_FLOAT if raw else LARGEST_WHOLE):
                return False
        return True

    @staticmethod
    def _blank(fake: Tensor) -> Tensor:
        with real_tensors():
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


def _fake(tensor: Tensor, shadows: Shadows) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() <= 1 << 20:
        shadows.put(made, tensor)
    return made


@contextmanager
def fake_weights(model: nn.Module, shadows: Shadows):
    """A context in which the model has fake parameters and buffers in place of its own."""
    tables = [
        table for module in model.modules() for table in (parameters_of(module), buffers_of(module))
    ]
    own = [
        (table, name, tensor)
        for table in tables
        for name, tensor in table.items()
        if tensor is not None
    ]
    fakes = {id(tensor): tensor for *_, tensor in own}
    fakes = {key: _fake(tensor, shadows) for key, tensor in fakes.items()}
    try:
        for table, name, tensor in own:
            table[name] = fakes[id(tensor)]
        yield
    finally:
        model.zero_grad()
        for table, name, tensor in own:
            table[name] = tensor
