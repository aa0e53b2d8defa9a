"""The tensors and module switches that a layer's forward used.

In backward the layer reruns on the tensors of its forward (`torch.func.functional_call` may have
ended by then), in the same mode (training or not) and with the same adapters. It is an error if a
tensor was written to since, or if the user's hooks and forwards inside the layer changed. Numbers
that modules hold (a dropout rate, an epsilon) are not saved: backward uses their current values.
Engines that gather weights around each call swap and refill them at will: their current tensors are
the same weights.
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
    switches_of,
)

STANDS_FOR = "_hfpatch_stands_for"
REPLACED = "given other values by its .data"
_MARKS = {STANDS_FOR, *ENGINE_MARKS}
_NO_TENSORS = {int, float, bool, str, type(None)}  # the classes of most other attributes


class Place:
    """The place of one of the layer's tensors. gathered: an engine swaps the tensor there; twins:
    its other places in the layer (tied weights).
    """

    __slots__ = ("module", "name", "buffer", "gathered", "twins")

    def __init__(self, module: nn.Module, name: str, gathered: bool, buffer: bool):
        self.module, self.name, self.buffer, self.gathered = module, name, buffer, gathered
        self.twins: list[Place] = []

    def table(self) -> dict:
        """The dict that holds it under its name now."""
        own = parameters_of(self.module)
        if self.name in own:
            return own
        return buffers_of(self.module) if self.buffer else self.module.__dict__


class Places:
    """The places of the tensors in a layer's modules, each tensor once. Reused while the tensors
    are the same.

    can_skip: names of modules -> those among them that can skip their matmul (parts/unread.py).
    """

    __slots__ = ("places", "at", "empty", "known", "can_skip")

    def __init__(self, layer: nn.Module, modules: list[nn.Module]):
        found: dict = {}
        twins, self.empty, self.can_skip = [], [], {}
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
                # a stand-in that Ctrl-C left here, while parameters were put back
                if STANDS_FOR in tensor.__dict__:
                    tensor = table[name] = tensor.__dict__[STANDS_FOR]
                gathered = name in plain or is_view_of_flat(tensor)
                place = Place(module, name, gathered, name in buffers)
                if id(tensor) in found:
                    twins.append((id(tensor), place, (table, name)))
                    continue
                found[id(tensor)] = (place, (table, name), tensor)
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
        # Engines' tensors are looked up at every call. So is a tensor of the layer itself: the
        # layer holds its condition, which must not refer back to it.
        same = not any(p.gathered or p.module is layer for p in self.places)
        same = same and all(_MARKS.isdisjoint(t.__dict__) for t in tensors)
        # Weak references: a replaced parameter is freed at once.
        self.known = [weakref.ref(t) for t in tensors] if same else None

    def now(self) -> list[Tensor] | None:
        """The tensors in these places, then those of the twins. None if one was replaced or added,
        or has a mark of an engine or of ours.
        """
        if self.known is None:
            return None
        for table, name in self.empty:  # a bias added to a Linear since
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
    """Attributes that a class writes in its forward, or in methods that the forward names. A tensor
    that an earlier call left there is no weight, and its graph is gone.
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


def edited(what: str, how: str) -> RuntimeError:
    """The error of a backward whose weights changed."""
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
    """A layer's tensors, each once, and its modules' switches, as of one forward.

    Attributes:
        found: the Places. The next four have an entry for each:
        tensors: its tensor, None if an engine gathers it. Sharding engines may hold the gathered
            weight as a plain attribute in place of the parameter (FSDP1 does).
        counts: its version, None if the layer itself writes to it.
        storages: its storage, None if that may change.
        trained: whether it required a gradient.
        modules: the layer's modules.
        units: modules that FSDP2 gathers separately.
        snapshot, switches: of the modules inside the layer.

    condition: layer.condition.Condition, which caches the places. streamed: whether frozen weights
    wait on the host (streamed_weights.py), which swaps their `.data`. Otherwise a swapped `.data`
    is a user's edit.
    """

    __slots__ = (
        "layer", "kind", "modules", "units", "snapshot", "on_all", "switches",
        "found", "tensors", "counts", "storages", "trained",
    )  # fmt: skip

    def __init__(
        self,
        layer: nn.Module,
        modules: list[nn.Module],
        streamed: bool,
        condition=None,
    ):
        self.layer, self.kind, self.modules = layer, layer.__class__, modules
        self.units = [] if condition is None else condition.units
        self.snapshot = Snapshot(layer) if condition is None else condition.snapshot
        # A layer with such hooks runs whole (condition.py).
        self.on_all = hooks_on_all() if condition is None else []
        self.switches = switches_of(modules)
        found = None if condition is None else condition.places
        there = None if found is None else found.now()
        if there is None:
            found = Places(layer, modules)
            there = [table[name] for table, name in found.at]
            if condition is not None:
                condition.places = found if found.known is not None else None
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
        """The tensors that require a gradient, in the order of the places."""
        found = []
        for place, tensor, trained in zip(self.found.places, self.tensors, self.trained):
            if trained:
                found.append(place.table()[place.name] if tensor is None else tensor)
        return found

    def of(self, index: int, now: Tensor, count: int, storage: int | None) -> Tensor:
        """The tensor that forward used in a place; now: the current one. RuntimeError if forward's
        tensor was written to since: it has this version and storage.
        """
        tensor = self.tensors[index]
        if tensor is None:
            return now
        replaced = self.storages[index] not in (None, storage)
        if replaced or self.counts[index] not in (None, count):
            place = self.found.places[index]
            what = f"{type(place.module).__name__}.{place.name}"
            raise edited(what, REPLACED if replaced else "modified in place")
        return tensor

    def unchanged(self) -> bool:
        """Whether every place has its tensor of the forward, unmodified. False if an engine gathers
        any.
        """
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
        """Raises RuntimeError if the layer has other modules, hooks, forwards or merged adapters
        now.
        """
        if self.layer.__class__ is not self.kind or modules_in(self.layer) != self.modules:
            raise RuntimeError(
                f"hfpatch: expected the modules that forward used, a {self.kind.__name__} has "
                "others before its backward; "
                "change the model (adapters, undo) after backward."
            )
        if not (self.snapshot.runs_alike(self.layer) and hooks_on_all() == self.on_all):
            raise RuntimeError(
                "hfpatch: expected the hooks, forwards and merged adapters that forward used, "
                f"those inside a {self.kind.__name__} changed before its backward; "
                "change them before forward or after backward."
            )

    def ran(self) -> bool:
        """Called after the forward. Exempts tensors that the layer itself writes to (buffers,
        weights that an adapter parametrises) or casts (NLLB-MoE's routers, the biases of
        bitsandbytes' layers): a rerun does so again. Returns whether it cast a trained tensor.
        """
        counts, storages = marks_of(self.tensors)
        cast = False
        for i, (count, storage) in enumerate(zip(counts, storages, strict=True)):
            if self.tensors[i] is None:
                continue
            if count != self.counts[i]:
                self.counts[i] = None
            if self.storages[i] not in (None, storage):
                self.storages[i] = None
                cast |= self.trained[i]
        return cast


@dataclass(eq=False)
class AsInForward:
    """Context in which the layer has the tensors and switches that forward used."""

    then: ForwardState
    # (table, name, earlier value) of each change
    before: list = field(default_factory=list, init=False)

    def __enter__(self):
        self.then.refuse_others()
        try:
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
        """Whether all tensors are still in their places."""
        return self.then.unchanged()

    def _put_back(self) -> None:
        rows = zip(self.then.found.places, *marks_of(self.then.tensors), strict=True)
        for index, (place, count, storage) in enumerate(rows):
            table = place.table()
            # a parameter may be a buffer now, which this then hides
            now = table.get(place.name)
            original = self.then.of(index, now, count, storage)
            trained = self.then.trained[index]
            tensor = self._of(trained, original) if trained or original.requires_grad else original
            if tensor is not now:
                self._put(table, place.name, tensor)
            if tensor is not original and "forward" in place.module.__dict__:
                hooked = hooked_by_forward(place.module, place.name, original)
                if hooked is not None:
                    self._put(hooked, place.name, tensor)
            for twin in place.twins:
                self._put(twin.table(), twin.name, tensor)
        for table, name in self.then.found.empty:
            if table.get(name) is not None:
                self._put(table, name, None)

    def _go_as_then(self) -> None:
        """Restores the switches of the layer's modules."""
        for table, name, value in self.then.switches:
            now = table[name] if name in table else GONE
            # Compared within one class only: `!=` on a tensor gives no single bool.
            if now is not value and (now.__class__ is not value.__class__ or now != value):
                self._put(table, name, value)

    def _of(self, trained: bool, tensor: Tensor) -> Tensor:
        """The tensor, or an alias of it if it was trained then and is frozen now, or the
        reverse.
        """
        return (
            tensor if tensor.requires_grad == trained else tensor.detach().requires_grad_(trained)
        )

    def _put(self, table: dict, name: str, value) -> None:
        self.before.append((table, name, table.get(name, GONE)))
        put(table, name, value)

    def __exit__(self, *exc):
        for row in reversed(self.before):
            put(*row)
