"""What a layer computed with in a forward: its tensors, and the switches of its modules.

The layer runs again in backward on the tensors that forward used (`torch.func.functional_call` may
have been left by then), in training or not and with the adapters as then. Where a tensor was
written to since, or the user's hooks and forwards inside the layer changed, that is an error.
Numbers that modules hold (a rate of dropout, an epsilon) are not remembered: changed in between,
they count as they are in backward. Engines that gather weights around each call swap and refill
them as they like: there the tensors of the moment are the same weights.
"""

import dis
import inspect
import weakref
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor, nn

from hfpatch.compat import (
    ENGINE_MARKS,
    GONE,
    MADE_FROM,
    OF_ALL,
    Snapshot,
    buffers_of,
    fsdp2_units,
    hooked_by_forward,
    hooks_on_all,
    hooks_put_off,
    in_fsdp2,
    is_shard,
    is_view_of_flat,
    marks_of,
    modules_in,
    parameters_of,
    put,
    storage_of,
    switches_of,
    version,
)

STANDS_FOR = "_hfpatch_stands_for"
REPLACED = "given other values by its .data"
_MARKS = {STANDS_FOR, *ENGINE_MARKS}
_NO_TENSORS = {int, float, bool, str, type(None)}  # the classes of most other attributes


class Place:
    """Where a tensor of the layer lives. gathered: an engine puts another one there; twins: other
    places of it in the layer (tied weights).
    """

    __slots__ = ("module", "name", "buffer", "gathered", "twins")

    def __init__(self, module: nn.Module, name: str, gathered: bool, buffer: bool):
        self.module, self.name, self.buffer, self.gathered = module, name, buffer, gathered
        self.twins: list[tuple[nn.Module, str, bool]] = []

    def table(self) -> dict:
        """What holds it by its name now."""
        return _table(self.module, self.name, self.buffer)


class Places:
    """Of the tensors that stand in a layer's modules, each once. Found once for as long as the same
    stand there.
    """

    __slots__ = ("places", "at", "empty", "known")

    def __init__(self, layer: nn.Module, modules: list[nn.Module]):
        found: dict = {}
        twins, self.empty = [], []
        for module in modules:
            own, buffers, values = parameters_of(module), buffers_of(module), module.__dict__
            plain = [
                n for n in values
                if n not in OF_ALL and type(values[n]) not in _NO_TENSORS
                and isinstance(values[n], Tensor) and not values[n].is_leaf
                and n not in _written_by(MADE_FROM[module.__class__])
            ]  # fmt: skip
            for name in (*own, *buffers, *plain):
                table = own if name in own else buffers if name in buffers else values
                tensor = table[name]
                if tensor is None:
                    self.empty.append((table, name))
                    continue
                if id(tensor) in found:
                    twins.append((id(tensor), (module, name, name in buffers), (table, name)))
                    continue
                # Ctrl-C in the very moment of putting the parameters back
                if STANDS_FOR in tensor.__dict__:
                    tensor = table[name] = tensor.__dict__[STANDS_FOR]
                gathered = name in plain or is_view_of_flat(tensor)
                found[id(tensor)] = (
                    Place(module, name, gathered, name in buffers),
                    (table, name),
                    tensor,
                )
        self.places, self.at = (
            [row[0] for row in found.values()],
            [row[1] for row in found.values()],
        )
        tensors = [row[2] for row in found.values()]
        if _is_sharded(layer, tensors) or fsdp2_units(modules[1:]):
            for place in self.places:
                place.gathered = True
        for tensor, place, at in twins:
            found[tensor][0].twins.append(place)
            self.at.append(at)
            tensors.append(found[tensor][2])
        # What engines change is looked for at every call; and what holds the layer must not be held
        # by what the layer holds.
        same = not any(p.gathered or p.module is layer for p in self.places)
        same = same and all(_MARKS.isdisjoint(t.__dict__) for t in tensors)
        # Weakly: a replaced parameter goes at once.
        self.known = [weakref.ref(t) for t in tensors] if same else None

    def now(self) -> list[Tensor] | None:
        """The tensors in these places, and in their twins behind them, where they are those that
        were found, with no mark of an engine or of ours, and no others came.
        """
        if self.known is None:
            return None
        for table, name in self.empty:  # a bias that a Linear was given since
            if table.get(name) is not None:
                return None
        tensors = []
        for (table, name), known in zip(self.at, self.known):
            tensor = table.get(name)
            if tensor is None or known() is not tensor:
                return None
            if tensor.__dict__ and not _MARKS.isdisjoint(tensor.__dict__):
                return None
            tensors.append(tensor)
        return tensors


@cache
def _written_by(kind: type) -> set[str]:
    """Attributes that a module of this class writes in its forward, or in a method that this names:
    what it left there in an earlier call is no weight, and the graph of it is gone.
    """
    todo, seen, found = ["forward"], set(), set()
    while todo:
        name = todo.pop()
        code = getattr(inspect.unwrap(getattr(kind, name, None)), "__code__", None)
        if code is not None and name not in seen:
            seen.add(name)
            found |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
            todo += code.co_names
    return found


def _table(module: nn.Module, name: str, buffer: bool) -> dict:
    own = parameters_of(module)
    if name in own:
        return own
    return buffers_of(module) if buffer else module.__dict__


def edited(what: str, how: str) -> RuntimeError:
    """The error of a backward whose weights are gone."""
    return RuntimeError(
        f"hfpatch: expected the weights that forward used, {what} was {how} before its backward; "
        "step the optimizer (or edit "
        "weights) after backward."
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether an engine gathers this module's parameters around its calls (ZeRO-3, FSDP)."""
    return _is_sharded(module, module.parameters())


def _is_sharded(module: nn.Module, tensors) -> bool:
    return in_fsdp2(module) or any(map(is_shard, tensors))


class ForwardState:
    """What a layer computes with, as it was at a forward of it: every tensor, each once, and its
    modules' switches.

    Attributes:
        found: the Places; of each one the rest says:
        tensors: the tensor there, None where an engine gathers it. Sharding engines may hold the
            gathered weight as a plain attribute in place of the parameter (FSDP1 does).
        counts: how often it was written to, None where its layer writes to it.
        storages: what it lay in.
        trained: whether it wanted a gradient.
        modules: the layer's.
        units: those of them that FSDP2 gathers by themselves.
        called: whether modules inside it are called (layer/direct.py calls none): then what they
            are made of (`snapshot`) and their switches matter.

    condition: layer.condition.Condition, which has the places where they held. streamed: whether
    frozen weights wait on the host (streamed_weights.py), from where they come and go by `.data`;
    where they do not, who does that is somebody's edit.
    """

    __slots__ = (
        "layer", "kind", "modules", "called", "units", "snapshot", "on_all", "switches",
        "found", "tensors", "counts", "storages", "trained",
    )  # fmt: skip

    def __init__(
        self,
        layer: nn.Module,
        modules: list[nn.Module],
        streamed: bool,
        called: bool = True,
        condition=None,
    ):
        self.layer, self.kind, self.modules, self.called = layer, layer.__class__, modules, called
        self.units = [] if condition is None else condition.units
        if called:
            self.snapshot = Snapshot(layer) if condition is None else condition.snapshot
            self.on_all, self.switches = hooks_on_all(), switches_of(modules)
        found = None if condition is None else condition.places
        there = None if found is None else found.now()
        if there is None:
            found = Places(layer, modules)
            there = [table[name] for table, name in found.at]
            if condition is not None and found.known is not None:
                condition.places = found
        self.found = found
        tensors = there[: len(found.places)]
        self.counts, self.storages = marks_of(tensors)
        self.trained, self.tensors = [], []
        for index, (place, tensor) in enumerate(zip(found.places, tensors)):
            trained = tensor.requires_grad
            self.trained.append(trained)
            self.tensors.append(None if place.gathered else tensor)
            if place.gathered or streamed and not trained:
                self.storages[index] = None

    def wanted(self) -> list[Tensor]:
        """Its tensors that want a gradient, in the order of the places."""
        found = []
        for place, tensor, trained in zip(self.found.places, self.tensors, self.trained):
            if trained:
                found.append(place.table()[place.name] if tensor is None else tensor)
        return found

    def of(self, index: int, now: Tensor) -> Tensor:
        """The tensor that forward used in a place; now: the one that is there. RuntimeError where
        it was written to since.
        """
        tensor, storage, count = self.tensors[index], self.storages[index], self.counts[index]
        if tensor is None:
            return now
        replaced = storage is not None and storage_of(tensor) != storage
        if replaced or count not in (None, version(tensor)):
            place = self.found.places[index]
            what = f"{type(place.module).__name__}.{place.name}"
            raise edited(what, REPLACED if replaced else "modified in place")
        return tensor

    def unchanged(self) -> bool:
        """Whether every place, none of them an engine's, has what it had then, as it was."""
        if self.found.now() is None:
            return False
        counts, storages = marks_of(self.tensors)
        for tensor, trained, storage, now in zip(
            self.tensors, self.trained, self.storages, storages, strict=True
        ):
            if tensor.requires_grad != trained or storage not in (None, now):
                return False
        return counts == self.counts

    def refuse_others(self) -> None:
        """RuntimeError where the layer is made of other modules now, or has other hooks, forwards
        and merged adapters in it.
        """
        if self.layer.__class__ is not self.kind or modules_in(self.layer) != self.modules:
            raise RuntimeError(
                f"hfpatch: expected the modules that forward used, a {self.kind.__name__} has "
                "others before its backward; "
                "change the model (adapters, undo) after backward."
            )
        if self.called and not (
            self.snapshot.runs_alike(self.layer) and hooks_on_all() == self.on_all
        ):
            raise RuntimeError(
                "hfpatch: expected the hooks, forwards and merged adapters that forward used, "
                f"those inside a {self.kind.__name__} changed before its backward; "
                "change them before forward or after backward."
            )

    def ran(self) -> bool:
        """After the forward: what it writes to itself (buffers, weights that an adapter
        parametrises), or casts (NLLB-MoE's routers, the biases of bitsandbytes' layers), it will
        write to again. Whether it cast what wants a gradient.
        """
        theirs = [i for i, t in enumerate(self.tensors) if t is not None]
        counts, storages = marks_of([self.tensors[i] for i in theirs])
        cast = False
        for i, count, storage in zip(theirs, counts, storages, strict=True):
            if count != self.counts[i]:
                self.counts[i] = None
            if self.storages[i] not in (None, storage):
                self.storages[i] = None
                cast |= self.trained[i]
        return cast


@dataclass(eq=False)
class AsInForward:
    """Context in which the layer has the tensors that forward used, without a gradient of theirs,
    and its modules' switches are as they were.
    """

    then: ForwardState
    before: list = field(default_factory=list, init=False)  # what stood where this puts something

    def __enter__(self):
        self.then.refuse_others()
        try:
            if self.then.called:
                self._go_as_then()
            if self.then.units:
                for row in hooks_put_off(self.then.units):
                    self._put(*row)
            if not self._nothing_to_restore():
                self._put_back()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _nothing_to_restore(self) -> bool:
        """Whether there is nothing to put back."""
        return self.then.unchanged()

    def _put_back(self) -> None:
        for index, place in enumerate(self.then.found.places):
            table = place.table()
            # what was a parameter may be a buffer now, which this then hides
            now = table.get(place.name)
            original = self.then.of(index, now)
            tensor = self._of(self.then.trained[index], original)
            if tensor is not now:
                self._put(table, place.name, tensor)
            hooked = (
                hooked_by_forward(place.module, place.name, original)
                if tensor is not original
                else None
            )
            if hooked is not None:
                self._put(hooked, place.name, tensor)
            for module, name, buffer in place.twins:
                self._put(_table(module, name, buffer), name, tensor)
        for table, name in self.then.found.empty:
            if table.get(name) is not None:
                self._put(table, name, None)

    def _go_as_then(self) -> None:
        """Puts the switches of the layer's modules as they were."""
        for table, name, value in self.then.switches:
            now = table[name] if name in table else GONE
            # Compared with its own kind alone: a tensor that stands there now has no one answer.
            if now is not value and (now.__class__ is not value.__class__ or now != value):
                self._put(table, name, value)

    def _of(self, trained: bool, tensor: Tensor) -> Tensor:
        """What stands for the tensor: itself, unless it was trained then and is frozen now, or the
        other way round.
        """
        return (
            tensor if tensor.requires_grad == trained else tensor.detach().requires_grad_(trained)
        )

    def _put(self, table: dict, name: str, value) -> None:
        self.before.append((table, name, table.get(name, GONE)))
        put(table, name, value)

    def __exit__(self, *exc):
        for row in self.before:
            put(*row)
