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
from hfpatch.lab.simulate.operations import tensors_in

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
        if isinstance(tree, dict):
            values = self._map([*tree.values()])
            return _UNKNOWN if values is _UNKNOWN else dict(zip(tree, values))
        if not isinstance(tree, (list, tuple)):
            return tree
        items = [self._map(item) for item in tree]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else type(tree)(items)

    def answer(self, func, args, kwargs):
        """(True, value) for an operation whose result or result's shape depends on known values,
        else (False, None).
        """
        # [Step 1] Leave operations whose result does not depend on values.
        by_mask = func is _INDEX and any(i is not None and i.dtype == torch.bool for i in args[1])
        if id(func) not in _DATA_DEPENDENT and not by_mask:
            return False, None
        # [Step 2] Index unknown values by known masks: the same gather by the masks' positions has
        # a known shape.
        if by_mask and self._map(args[0]) is _UNKNOWN:
            masks = self._map(args[1])
            if masks is _UNKNOWN:
                return False, None
            positions: list = []
            with real_tensors():
                for mask in masks:
                    by_position = mask is None or mask.dtype != torch.bool
                    positions += [mask] if by_position else mask.nonzero(as_tuple=True)
            fakes = [None if one is None else self.fake(one) for one in positions]
            return True, aten.index.Tensor(args[0], fakes)
        # [Step 3] Run the operation on the real values.
        values = self._map((args, kwargs))
        if values is _UNKNOWN:
            return False, None
        with real_tensors():
            out = func(*values[0], **values[1])
        if isinstance(out, Tensor):
            return True, self.fake(out)
        if isinstance(out, tuple):
            return True, tuple(map(self.fake, out))
        return True, out  # a number, a boolean

    def run(self, operation, args, kwargs, inputs, outputs) -> None:
        """Repeats an operation on the values behind its arguments, or forgets the values it
        overwrote.
        """
        # [Step 1] Find the outputs that have no real storage behind them yet.
        func = operation.func
        fresh = [o for o in outputs if id(o.untyped_storage()) not in self._real]
        if not operation.mutable and not fresh:
            return  # views of something known
        # [Step 2] Run the operation on the real values, and put the results behind the new outputs.
        if self._runnable(func, inputs, fresh):
            if id(func) in _LIKE and not self._known(args[0]):
                # Only the shape of this argument counts.
                like = args[0]
                with real_tensors():
                    blank = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                args = (blank, *args[1:])
            reals = self._map(args)
            real_kwargs = self._map(kwargs)
            real_kwargs.pop("pin_memory", None)
            if real_kwargs.get("device") is not None:
                real_kwargs["device"] = torch.device("cpu")
            with real_tensors(), torch.no_grad():
                out = func(*reals, **real_kwargs)
            for fake, real in zip(outputs, tensors_in([out], [])):
                if id(fake.untyped_storage()) not in self._real and fake.shape == real.shape:
                    self.put(fake, real)
            return
        # [Step 3] Otherwise forget the values that the operation overwrote.
        written = [args[at] for at in operation.written if at < len(args)]
        for value in tensors_in(written, []):
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
            most = LARGEST_FLOAT if raw else LARGEST_WHOLE
            if out.untyped_storage().nbytes() > most:
                return False
        return True


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
    own = []
    fakes: dict = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            own += [(table, name, tensor) for name, tensor in table.items() if tensor is not None]
    try:
        for table, name, tensor in own:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(tensor, shadows)
            table[name] = fakes[id(tensor)]
        yield
    finally:
        model.zero_grad()
        for table, name, tensor in own:
            table[name] = tensor
