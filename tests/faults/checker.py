"""A happens-before checker for copies, on a CPU: a device that only pretends to have streams.

`CheckedDevice` stands in for the CPU (store/device.py) and is a dispatch mode. Everything runs at
once and in order, so results are right whatever is missing; but each stream, thread and event
carries a vector clock, and each operation notes the addresses that it reads and writes, whichever
of several storages over the same memory it names. Reported are

- two uses of the same bytes, one of them a write, of which neither is ordered before the other;
- memory given back to its stream's allocator before that stream waited for the others' uses of it
  (the caching allocator's rule where nobody calls `record_stream`), and new memory used elsewhere
  before what its stream did to it earlier;
- pinned memory unregistered under a copy, and read or written by a thread that has not waited for
  the copy.

Threads run as late as their results allow, and files are short until then. `without` names
synchronisations to leave out: "function: call" of the caller.
"""

import ast
import functools
import gc
import inspect
import pathlib
import sys
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfpatch.store.device import DEVICES, Device

COMPUTE, HOST = "compute", "host"
THREADS = 8
MANY = 64  # pieces of a strided tensor that are told apart


@contextmanager
def standing_in(device: torch.device, other: Device):
    """Within, `other` stands for the device wherever something is begun."""
    before = DEVICES.get(device)
    DEVICES[device] = other
    try:
        yield other
    finally:
        del DEVICES[device]
        if before is not None:
            DEVICES[device] = before


def join(a: dict, b: dict) -> None:
    for actor, time in b.items():
        if a.get(actor, 0) < time:
            a[actor] = time


@functools.cache
def qualname(code) -> str:
    """Of the function that runs it; Python 3.10's code does not know, nor does what runs a
    generator's hold its function there.
    """
    if sys.version_info >= (3, 11):
        return code.co_qualname
    gc.unfreeze()  # tests/conftest.py set them aside, and does so again behind this file
    return next(
        (f.__qualname__ for f in gc.get_referrers(code) if inspect.isfunction(f)), code.co_name
    )


def pieces(x: torch.Tensor) -> tuple:
    """The ranges of addresses of x, ascending."""
    if not x.numel():
        return ()
    size, start = x.element_size(), x.data_ptr()
    dims = sorted((stride * size, n) for n, stride in zip(x.shape, x.stride()) if n > 1 and stride)
    run = size
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    starts = [start]
    for stride, n in reversed(dims):
        if len(starts) * n > MANY:
            return ((start, start + run + sum(s * (m - 1) for s, m in dims)),)
        starts = [s + i * stride for s in starts for i in range(n)]
    return tuple((s, s + run) for s in sorted(starts))


def overlap(a: tuple, b: tuple) -> bool:
    if not a or not b or a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]:
        return False
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] <= b[j][0]:
            i += 1
        elif b[j][1] <= a[i][0]:
            j += 1
        else:
            return True
    return False


class Region:
    """The uses of the memory from `start` to `stop`, addresses: {(ranges, written): {actor: (time,
    what)}}.

    owner: the stream whose allocator it is from; None for what is no device memory. storages: how
        many live ones lie in it.
    """

    def __init__(self, start: int, stop: int, owner: str | None):
        self.start, self.stop, self.storages = start, stop, 0
        self.owner, self.pinned, self.uses = owner, False, {}


class LateFuture:
    """A task that runs when somebody asks for its result."""

    def __init__(self, device, function, args):
        self.device, self.work = device, (function, args)
        self.clock, self.value, self.error, self.dropped = (
            dict(device.clocks[device.host]),
            None,
            None,
            False,
        )

    def _run(self):
        if self.work is not None:
            (function, args), self.work = self.work, None
            device = self.device
            device.tasks += 1
            caller, device.host = device.host, f"thread {device.tasks % THREADS}"
            join(device.clocks.setdefault(device.host, {}), self.clock)
            try:
                self.value = function(*args)
            except Exception as error:
                self.error = error
            finally:
                self.clock = dict(device.clocks[device.host])
                device.host = caller
        join(self.device.clocks[self.device.host], self.clock)

    def result(self):
        self._run()
        if self.error is not None:
            raise self.error
        return self.value

    def exception(self):
        self._run()
        return self.error

    def cancelled(self):
        return self.dropped


@functools.cache
def _statements(path: str) -> list[ast.Expr]:
    tree = ast.parse(pathlib.Path(path).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]


@functools.cache
def statement(path: str, line: int) -> str:
    """The call that stands on a line, on one line however the file breaks it."""
    return next(
        ast.unparse(node) for node in _statements(path) if node.lineno <= line <= node.end_lineno
    )


class CheckedDevice(TorchDispatchMode, Device):
    pins = True

    def __init__(self, without=()):
        TorchDispatchMode.__init__(self)
        Device.__init__(self, torch.device("cpu"))
        self.without, self.sites, self.problems = set(without), {}, []
        self.clocks = {COMPUTE: {}, HOST: {}}
        self.stack, self.host = [COMPUTE], HOST
        self.tasks = self.streams_made = self.host_waits = 0
        self.regions: dict[int, tuple] = {}  # id(storage) -> (weak reference, Region)
        self.memory: list[Region] = []  # those regions: no two of them overlap

    # -- the device interface ----------------------------------------------------------------------
    def stream(self):
        self.streams_made += 1
        name = f"stream {self.streams_made}"
        self.clocks[name] = {}
        return name

    def current(self):
        return self.stack[-1]

    @contextmanager
    def on(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def _issue(self, stream) -> dict:
        """The clock of a stream that is given something to do now."""
        clock = self.clocks[stream]
        join(clock, self.clocks[self.host])
        return clock

    def mark(self, stream=None):
        return dict(self._issue(stream or self.current()))

    def _left_out(self) -> bool:
        frame = sys._getframe(2)
        site = f"{qualname(frame.f_code)}: {statement(frame.f_code.co_filename, frame.f_lineno)}"
        self.sites[site] = self.sites.get(site, 0) + 1
        return site in self.without

    def wait(self, event, stream=None) -> None:
        if not self._left_out():
            join(self._issue(stream or self.current()), event)

    def synchronize(self, event=None) -> None:
        if self._left_out():
            return
        for clock in (
            [event] if event is not None else [c for a, c in self.clocks.items() if a != self.host]
        ):
            join(self.clocks[self.host], clock)

    def pin(self, block):
        self._region(block).pinned = True
        return 0

    def unpin(self, block):
        for actor, (time, what) in self._others(self._region(block), self.host):
            if self.clocks[self.host].get(actor, 0) < time:
                self.problems.append(f"pinned memory unregistered under {what} on {actor}")

    def to_host(self, values):
        join(self.clocks[self.host], self._issue(self.current()))
        return values.clone()

    def host_bytes(self, block, writes):
        self._use(block, self.host, self._tick(self.host), writes, "file")
        return super().host_bytes(block, writes)

    def threads(self, count, name):
        device = self

        class Threads:
            def submit(self, function, *args):
                return LateFuture(device, function, args)

        return Threads()

    # -- uses of memory ----------------------------------------------------------------------------
    def _tick(self, actor) -> dict:
        clock = self.clocks[actor] if actor == self.host else self._issue(actor)
        clock[actor] = clock.get(actor, 0) + 1
        return clock

    def _region(self, x, born: bool = False) -> Region:
        storage = x.untyped_storage()
        key = id(storage)
        if key not in self.regions:
            scalar = not born and x.dim() == 0  # Python's numbers come as tensors too
            start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            region = self._covering(start, stop) or Region(
                start, stop, self.current() if born else None if scalar else COMPUTE
            )
            if born:  # what its stream did to this memory before may be under way
                time = self.clocks[region.owner][region.owner]
                region.uses[((start, stop),), True] = {region.owner: (time, "an earlier owner")}
            if not region.storages:
                self.memory.append(region)
            region.storages += 1
            self.regions[key] = (weakref.ref(storage, lambda _: self._gone(key)), region)
        return self.regions[key][1]

    def _covering(self, start: int, stop: int) -> Region | None:
        """The region that this memory is part of, where another storage lies there too: grown to
        it, and one of several.
        """
        found = [r for r in self.memory if r.start < stop and start < r.stop]
        if not found:
            return None
        first, *others = found
        first.start, first.stop = (
            min(start, *(r.start for r in found)),
            max(stop, *(r.stop for r in found)),
        )
        for other in others:
            self.memory.remove(other)
            first.storages += other.storages
            first.pinned = first.pinned or other.pinned
            for use, actors in other.uses.items():
                first.uses.setdefault(use, {}).update(actors)
            for key, (reference, region) in self.regions.items():
                if region is other:
                    self.regions[key] = reference, first
        return first

    def _gone(self, key: int) -> None:
        region = self.regions.pop(key)[1]
        region.storages -= 1
        if not region.storages:
            self.memory.remove(region)
            self._freed(region)

    @staticmethod
    def _others(region: Region, actor: str):
        return [(a, use) for uses in region.uses.values() for a, use in uses.items() if a != actor]

    def _freed(self, region: Region) -> None:
        if region.pinned or region.owner is None:
            return
        clock = self._issue(region.owner)
        for actor, (time, what) in self._others(region, region.owner):
            if clock.get(actor, 0) < time:
                self.problems.append(f"freed on {region.owner} under {what} on {actor}")

    def _use(self, x, actor: str, clock: dict, writes: bool, what: str) -> None:
        region, ranges = self._region(x), pieces(x)
        for (known, wrote), uses in region.uses.items():
            if (writes or wrote) and any(a != actor for a in uses) and overlap(ranges, known):
                for other, (time, before) in uses.items():
                    if other != actor and clock.get(other, 0) < time:
                        self.problems.append(f"{what} on {actor} against {before} on {other}")
        region.uses.setdefault((ranges, writes), {})[actor] = (clock[actor], what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        known = {id(x.untyped_storage()) for x in inputs}
        fresh = [x for x in outputs if id(x.untyped_storage()) not in known]
        written = {
            id(value)
            for argument, value in [
                *zip(func._schema.arguments, args),
                *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
            ]
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value, torch.Tensor)
        }
        if outputs and not fresh and not written:
            return out  # a view
        on_host = bool(inputs) and all(self._region(x).pinned for x in inputs)
        actor = self.host if on_host else self.current()
        clock = self._tick(actor)
        name = str(func).removeprefix("aten.")
        for x in fresh:
            self._region(x, born=not on_host).pinned = on_host
        for x in inputs:
            self._use(x, actor, clock, id(x) in written, name)
        for x in fresh:
            self._use(x, actor, clock, True, name)
        if func is torch.ops.aten._local_scalar_dense.default and not on_host:
            self.host_waits += 1
            join(self.clocks[self.host], clock)  # the host has waited for the value
        return out
