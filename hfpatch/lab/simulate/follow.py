"""Follows every storage of a run from birth to death, on the device and on the host.

A TorchDispatchMode sees each operation and holds weak references to the storages it makes; the
storage, not the tensor, is what an allocator hands out, so views, in-place operations, saved
tensors and `.data` swaps need no cases of their own. It works on fake tensors, and is entered above
their FakeTensorMode. Where a dispatch mode makes PyTorch behave differently from a bare
run, the bare run's behaviour is restored here.
"""

import bisect
import contextlib
import sys
import weakref

import torch
from torch import Tensor

from hfpatch.lab.compat import (
    autograd_node,
    fakes_like,
    holders,
    meta_tensor,
    run_on_meta,
    sequence_number,
    simulation_parts,
)
from hfpatch.lab.simulate import kernels_cost
from hfpatch.lab.simulate.kernels_cost import Work
from hfpatch.lab.simulate.ledger import ROUNDING, Block, Ledger, round_up
from hfpatch.lab.simulate.operations import (
    is_dense,
    key_of,
    operation,
    tensors_in,
)
from hfpatch.lab.simulate.shadow import Shadows
from hfpatch.ops._library import IMPLEMENTATIONS

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
_, FakeTensor, TorchDispatchMode = simulation_parts()
# Operations whose fake kernels read values or symbols, or return something other than tensors.
_BY_VALUE = set(map(id, (aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor,
             aten.index_put_.default,
             aten.index_put.default, aten.equal.default, aten.lift_fresh.default,
             aten.set_.source_Storage_storage_offset)))  # fmt: skip
# Operations that torch decomposes in Python -> others of the same result
_EQUIVALENT = {id(aten._unsafe_view.default): aten.view.default}
# key of an operation (key_of) -> (shape, strides, dtype) of each result; on CUDA, and elsewhere
_SHAPES: dict = {True: {}, False: {}}


_current: list = []


def current() -> "Follower | None":
    """The innermost active Follower, None if there is none."""
    return _current[-1] if _current else None


class Follower(TorchDispatchMode):
    """Context in which storages are followed. Result in `.ledger`.

    Args:
        cuda: storage sizes are rounded up to 512 bytes, and the scratch memory of CUDA's kernels
            counts, which no operation of this run allocates.
        shadows: real values of small tensors, so that `.item()` works.
        most_operations: a ValueError is raised beyond this number of operations; None for no limit.
    """

    def __init__(
        self, *, shadows: Shadows, cuda: bool = True, most_operations: int | None = None
    ):  # fmt: skip
        super().__init__()
        self.ledger = Ledger()
        self.rounding = ROUNDING if cuda else 1
        self.cuda = cuda
        self.shadows = shadows
        self.operations = 0
        self.most_operations = most_operations
        # Bytes on the device, now and at most, as an allocator counts them.
        self.alive = 0
        self.top = 0
        # Counts of an operation are multiplied by this (scan.few_blocks).
        self.times = 1
        self._refs: dict = {}  # id(storage) -> (weak reference, block index)
        self._modules: list = []
        # Autograd sequence numbers at module borders, and the module that begins at each.
        self._sequence: tuple = ([], [])
        self.phase = "setup"
        self._host = 0
        self._alone: tuple | None = None
        self._calibrating = False
        self._slow: set = set(_BY_VALUE)  # ids of operations
        self._works: dict = {}  # key_of -> Work
        self._shapes = _SHAPES[cuda]
        self._makes: dict = {}  # device -> fakes_like

    def __enter__(self):
        super().__enter__()
        _current.append(self)
        if self._alone is None:
            try:
                self._calibrate()
            except BaseException:  # the mode would stay on
                self.__exit__(*sys.exc_info())
                raise
        return self

    def __exit__(self, *exception):
        _current.remove(self)
        return super().__exit__(*exception)

    # -- storages ----------------------------------------------------------------------------------

    def track(self, tensor: Tensor, op: str = "given", category: str | None = None) -> Block | None:
        """Records the tensor's storage if it is new or has a new size. Returns its block."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # sparse tensors and wrappers have no storage, their parts have
            return None
        key = id(storage)
        nbytes = round_up(storage.nbytes(), self.rounding)
        if key in self._refs:
            index = self._refs[key][1]
            block = self.ledger.blocks[index]
            if nbytes != block.nbytes:
                self._event(index, nbytes - block.nbytes)
                block.nbytes = nbytes
        else:
            index = self._birth(nbytes, op)
            block = self.ledger.blocks[index]

            def dead(_):
                self._refs.pop(key, None)
                self._death(index)

            self._refs[key] = (weakref.ref(storage, dead), index)
        if category:
            block.category = category
        return block

    def _birth(self, nbytes: int, op: str, category: str = "activations") -> int:
        born = len(self.ledger.events)
        index = len(self.ledger.blocks)
        on_host = self._host > 0
        block = Block(nbytes, born, op, self._where(), self.phase, on_host, category)
        self.ledger.blocks.append(block)
        self._event(index, nbytes)
        return index

    def _death(self, index: int) -> None:
        block = self.ledger.blocks[index]
        block.died = len(self.ledger.events)
        self._event(index, -block.nbytes)

    def _event(self, index: int, more: int) -> None:
        """A block takes more bytes, or fewer."""
        self.ledger.events.append((index, more))
        if not self.ledger.blocks[index].host:
            self.alive += more
            self.top = max(self.top, self.alive)

    @contextlib.contextmanager
    def host(self):
        """Storages born inside are host memory."""
        self._host += 1
        try:
            yield
        finally:
            self._host -= 1

    # -- where we are ------------------------------------------------------------------------------

    def set_phase(self, name: str) -> None:
        """Begins a phase: "forward", "backward" or "optimizer"."""
        self.phase = name
        self.ledger.phases.append((len(self.ledger.events), name))

    def enter_module(self, name: str) -> None:
        self._modules.append(name)
        self._border()

    def leave_module(self) -> None:
        self._modules.pop()
        self._border()

    def _border(self) -> None:
        if self.phase == "forward":
            numbers, names = self._sequence
            numbers.append(sequence_number())
            names.append(self._modules[-1] if self._modules else "")

    def _where(self) -> str:
        if self._modules:
            return self._modules[-1]
        node = autograd_node()
        if node is None:
            return ""
        numbers, names = self._sequence
        at = bisect.bisect_right(numbers, sequence_number(node)) - 1
        # AccumulateGrad nodes carry the largest number there is: their gradients belong to no one
        #     module.
        return names[at] if 0 <= at < len(names) - 1 else ""

    @classmethod
    def _should_skip_dynamo(cls):
        # Nothing is compiled here, and Dynamo's wrapper would add half of our own cost.
        return False

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # [Step 1] Count the operation. `x.device` of a fake tensor does not count: it is as
        # frequent as all the rest.
        if func is DEVICE:
            return args[0].fake_device
        self.operations += 1
        if self.most_operations is not None and self.operations > self.most_operations:
            raise ValueError(
                f"hfpatch: a simulated step must have at most {self.most_operations:,} operations, "
                "and plain code that goes through the tokens one by one has more. Ask for fewer "
                "tokens, or run it."
            )
        # [Step 2] Answer what makes no record of its own: autograd's sums of gradients, views of
        # fake tensors, and operations whose result depends on known values.
        if func is aten.add.Tensor and self._accumulates(args, kwargs):
            return aten.add_.Tensor(*args)
        op = operation(func)
        if op.view and type(args[0]) is FakeTensor and id(func) not in self._slow:
            return self._fakes(op, args, kwargs, args[:1], None)
        answered, value = self.shadows.answer(func, args, kwargs)
        if answered:
            return value
        # [Step 3] Record the inputs, run the operation on fake tensors, and record its outputs.
        inputs = tensors_in(args, [])
        if kwargs:
            tensors_in(kwargs.values(), inputs)
        for tensor in inputs:
            if id(tensor.untyped_storage()) not in self._refs:
                self.track(tensor)
        key = None if id(func) in _BY_VALUE else key_of(func, args, kwargs)
        if func.namespace == "hfpatch" and not self.cuda:
            # A kernel on CUDA allocates its outputs, which the fake gives; the plain version has
            # temporaries.
            with self:
                out = IMPLEMENTATIONS[func](*args, **kwargs)
        else:
            out = self._fakes(op, args, kwargs, inputs, key)
        name = func.__name__
        outputs = tensors_in((out,), [])
        for tensor in outputs:
            self.track(tensor, name)
        if op.mutable:
            for tensor in inputs:  # resize_, set_ and out= change the storage of an argument
                self.track(tensor, name)
        # [Step 4] Count its work, computed once for each key.
        work = self._works.get(key)
        if work is None:
            work = self._work(func, args, kwargs, inputs, outputs)
            if key is not None:
                self._works[key] = work
        self._did(work, func, args)
        # [Step 5] Repeat it on the real values, where they are known.
        self.shadows.run(op, args, kwargs, inputs, outputs)
        return out

    def moves(self, tensors: list) -> None:
        """Counts the traffic of a kernel that no dispatcher sees, each tensor as often as listed."""
        self._moved(sum(map(kernels_cost.bytes_of, tensors)))

    def _moved(self, nbytes: int, work: Work | None = None, direction: str | None = None) -> None:
        self.ledger.traffic[self.phase] += nbytes * self.times

    def _fakes(self, operation, args, kwargs, inputs, key):
        """operation.func on fake tensors.

        FakeTensorMode's cache lookup costs more than the call. Operations whose results are on the
        device of their arguments call their meta kernels directly, as FakeTensorMode would.
        """
        # [Step 1] Leave other operations to FakeTensorMode.
        func = operation.func
        mode = self.shadows.fake_mode
        by_meta = (
            operation.ours and inputs and "device" not in kwargs and id(func) not in self._slow
        )
        if not by_meta or any(type(t) is not FakeTensor for t in inputs):
            return func(*args, **kwargs)
        # The result is the argument that it writes to.
        if operation.writes:
            return kwargs.get("out", args[0])
        # [Step 2] Take the results' shapes from an earlier call, or run the meta kernel.
        device = inputs[0].fake_device
        if layouts := self._shapes.get(key):
            out = tuple(map(meta_tensor, layouts))
            if len(out) == 1:
                out = out[0]
        else:
            try:
                out = run_on_meta(mode, _EQUIVALENT.get(id(func), func), args, kwargs)
            except NotImplementedError:
                self._slow.add(id(func))
                return func(*args, **kwargs)
            if operation.fresh and key:
                self._note_shape(key, inputs, out)

        # [Step 3] Turn the meta tensors into fake tensors on the arguments' device.
        make = self._makes.get(device)
        if make is None:
            bare = meta_tensor(((0,), (1,), torch.float32))
            make = self._makes[device] = fakes_like(FakeTensor(mode, bare, device))

        def fake(o):
            return make(o) if isinstance(o, Tensor) and type(o) is not FakeTensor else o

        return type(out)(map(fake, out)) if isinstance(out, (tuple, list)) else fake(out)

    def _note_shape(self, key: tuple, inputs: list, out) -> None:
        """Remembers the shapes of results that own their whole storages."""
        outs = out if isinstance(out, tuple) else (out,)
        if not all(isinstance(x, Tensor) for x in outs):
            return
        given = {id(x.untyped_storage()) for x in inputs}
        layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in outs]
        for x, layout in zip(outs, layouts):
            own = x.untyped_storage()
            full = meta_tensor(layout).untyped_storage().nbytes()
            # aten._unsafe_view hides its alias
            if id(own) in given or full != own.nbytes():
                return
        self._shapes[key] = layouts

    def _accumulates(self, args, kwargs) -> bool:
        """Whether this addition is autograd's sum of gradients, which a bare run does in place.

        While a dispatch mode is on, the engine reuses no buffer. Without one it would add in place
        if it held the last reference to the old gradient and to its storage. Where Python code
        adds, its frame holds one reference more.
        """
        if kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        old, new = args
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            return False
        alike = old.shape == new.shape and old.dtype == new.dtype and is_dense(old)
        if not alike or autograd_node() is None:
            return False
        found = _holders(args)
        if self._calibrating:
            self._alone = found
            return False
        return all(have <= alone for have, alone in zip(found, self._alone))

    def _calibrate(self) -> None:
        """Measures `_holders` of a gradient that only the engine holds, in a ledger of its own."""
        noted = (self.ledger, self._refs)
        self.ledger = Ledger()
        self._refs = {}
        self._calibrating = True
        with torch.enable_grad():
            x = torch.ones(2, requires_grad=True)
            h = x * 2
            (torch.sin(h) + h * 3).sum().backward()
        self._calibrating = False
        self.ledger, self._refs = noted

    def _work(self, func, args, kwargs, inputs, outputs) -> Work:
        return Work(
            kernels_cost.matmul_flops(func, args), kernels_cost.attention(func, args, kwargs),
            kernels_cost.scratch_bytes(func, args) if self.cuda else 0,
            kernels_cost.moved_bytes(func, args, kwargs, inputs, outputs),
        )  # fmt: skip

    def _did(self, work: Work, func, args) -> None:
        """Counts an operation that ran."""
        if work.products:
            self.ledger.matmul_flops[self.phase] += work.products * self.times
        if work.attention is not None:
            kind, flops = work.attention
            self.ledger.attention_flops[kind] += flops
            self.ledger.attention_calls[kind] += 1
        if work.scratch:  # alive beside the inputs and outputs, gone as the operation returns
            nbytes = round_up(work.scratch, self.rounding)
            self._death(self._birth(nbytes, f"{func.__name__} scratch", "workspace"))
        self._moved(work.moved, work, self._direction(func, args))

    def _direction(self, func, args) -> str | None:
        """Of a copy between host and device, for a clock."""


def _holders(args) -> tuple[int, int, int]:
    """Reference counts of the first argument: in Python, in C++, and of its storage."""
    return sys.getrefcount(args[0]), *holders(args[0])
