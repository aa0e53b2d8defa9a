"""Weight gradients of one layer over several tiles: stand-ins for its parameters while nested
autograd runs.

The nested graphs are built on detached stand-ins, so the parameters' own hooks (tensor hooks,
post-accumulate hooks, those of DDP, FSDP and ZeRO) see nothing until the layer's autograd function
returns the final gradients, once.

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
from functools import cache, partial
from operator import is_

import torch
from torch import Tensor, nn

from hfpatch.compat import (
    ENGINE_MARKS,
    GONE,
    MADE_FROM,
    OF_ALL,
    buffers_of,
    fsdp2_units,
    hooked_by_forward,
    in_fsdp2,
    is_shard,
    is_view_of_flat,
    merged_into,
    modules_in,
    parameters_of,
    storage_of,
    switches_of,
    users_around,
    version,
    versions,
)
from hfpatch.ops._wide_sums import into, sums_in_matmul
from hfpatch.ops.experts import EXPERT_SUMS

STANDS_FOR = "_hfpatch_stands_for"
REPLACED = "given other values by its .data"
_MARKS = {STANDS_FOR, *ENGINE_MARKS}
_WIDE = {torch.float32, torch.float64}  # what sums of them are in
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
        same = not any(p.gathered or p.module is layer for p in self.places) and not _marked(
            tensors
        )
        # Weakly: a replaced parameter goes at once.
        self.known = [weakref.ref(t) for t in tensors] if same else None

    def now(self) -> list[Tensor] | None:
        """The tensors in these places, and in their twins behind them, where they are those that
        were found.
        """
        if self.known is None or _filled(self.empty):
            return None
        tensors = [table[name] for table, name in self.at]
        for tensor, known in zip(tensors, self.known):
            if known() is not tensor:
                return None
        return None if _marked(tensors) else tensors


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


def _filled(empty: list[tuple[dict, str]]) -> list[tuple[dict, str]]:
    """Those of these places where something stands now and nothing did (a bias that a Linear was
    given since).
    """
    return [(table, name) for table, name in empty if table.get(name) is not None]


def _marked(tensors: list[Tensor]) -> bool:
    """Whether an engine's mark is on one of them, or ours of what stands in for another."""
    return bool([1 for t in tensors if (own := t.__dict__) and not _MARKS.isdisjoint(own)])


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


class AsThen:
    """What a layer computes with, as it was at a forward of it: every tensor, each once, and its
    modules' switches.

    places: where the tensors are; looked: layer.layer.Looked, which has them where it held. Of each
    place: tensors, the one there (None where an engine gathers it), counts, how often it was
    written to (None where its layer writes to it), storages, what it lay in, trained, whether it
    wanted a gradient. Sharding engines may hold the gathered weight as a plain attribute in place
    of the parameter (FSDP1 does): those count too. forwards: what each class ran; modules: the
    layer's; streamed: whether its frozen weights wait on the host (streamed.py), from where they
    come and go by `.data`; where they do not, who does that is somebody's edit. called: whether
    modules inside it are called (layer/direct.py calls none), whose switches and hooks matter then.
    """

    __slots__ = (
        "layer",
        "kind",
        "modules",
        "tables",
        "merged",
        "switches",
        "around",
        "forwards",
        "called",
        "at",
        "empty",
        "there",
    )
    __slots__ += ("places", "tensors", "counts", "storages", "trained")

    def __init__(
        self,
        layer: nn.Module,
        modules: list[nn.Module],
        streamed: bool,
        called: bool = True,
        looked=None,
    ):
        self.layer, self.kind, self.modules, self.called = layer, layer.__class__, modules, called
        if called:
            self.tables = [module.__dict__ for module in modules]
            self.forwards = {
                (kind := MADE_FROM[module.__class__]): kind.forward for module in modules
            }
            self.switches, self.merged = switches_of(self.tables), merged_into(self.tables)
            self.around = users_around(self.tables)
        found = None if looked is None else looked.places
        there = None if found is None else found.now()
        if there is None:
            found = Places(layer, modules)
            there = [table[name] for table, name in found.at]
            if looked is not None and found.known is not None:
                looked.places = found
        self.places, self.at, self.empty = found.places, found.at, found.empty
        self.there = None if found.known is None else there
        tensors = there[: len(self.places)]
        self.counts: list[int | None] = versions(tensors)
        self.trained = [t.requires_grad for t in tensors]
        self.tensors = [None if p.gathered else t for p, t in zip(self.places, tensors)]
        moves = streamed and not all(self.trained)
        self.storages = [
            None if t is None or moves and not trained else storage_of(t)
            for t, trained in zip(self.tensors, self.trained)
        ]

    def wanted(self) -> list[Tensor]:
        """Its tensors that want a gradient, in the order of the places."""
        rows = zip(self.places, self.tensors, self.trained)
        return [p.table()[p.name] if t is None else t for p, t, trained in rows if trained]

    def of(self, index: int, now: Tensor) -> Tensor:
        """The tensor that forward used in a place; now: the one that is there. RuntimeError where
        it was written to since.
        """
        tensor, storage, count = self.tensors[index], self.storages[index], self.counts[index]
        if tensor is None:
            return now
        replaced = storage is not None and storage_of(tensor) != storage
        if replaced or count not in (None, version(tensor)):
            what = f"{type(self.places[index].module).__name__}.{self.places[index].name}"
            raise edited(what, REPLACED if replaced else "modified in place")
        return tensor

    def stands(self) -> bool:
        """Whether every place, none of them an engine's, has what it had then, as it was."""
        if self.there is None:
            return False
        now = [table.get(name) for table, name in self.at]
        return (
            all(map(is_, now, self.there))
            and not _filled(self.empty)
            and versions(self.tensors) == self.counts
            and [t.requires_grad for t in self.tensors] == self.trained
            and [s if s is None else storage_of(t) for t, s in zip(self.tensors, self.storages)]
            == self.storages
        )

    def refuse_others(self) -> None:
        """RuntimeError where the layer is made of other modules now, or has other hooks and
        forwards of the user's in it.
        """
        if self.layer.__class__ is not self.kind or modules_in(self.layer) != self.modules:
            raise RuntimeError(
                f"hfpatch: expected the modules that forward used, a {self.kind.__name__} has "
                "others before its backward; "
                "change the model (adapters, undo) after backward."
            )
        if not self.called:
            return
        if merged_into(self.tables) != self.merged:
            raise edited(f"a weight of a {self.kind.__name__}", "merged with an adapter")
        around = users_around(self.tables)
        same = len(around) == len(self.around) and all(map(is_, around, self.around))
        if not same or any(kind.forward is not forward for kind, forward in self.forwards.items()):
            raise RuntimeError(
                "hfpatch: expected the hooks and forwards that forward used, those inside a "
                f"{self.kind.__name__} changed before "
                "its backward; add and remove them before forward or after backward."
            )

    def ran(self) -> bool:
        """After the forward: what it writes to itself (buffers, weights that an adapter
        parametrises), or casts (NLLB-MoE's routers, the biases of bitsandbytes' layers), it will
        write to again. Whether it cast what wants a gradient.
        """
        theirs = [i for i, t in enumerate(self.tensors) if t is not None]
        cast = False
        for i, now in zip(theirs, versions([self.tensors[i] for i in theirs]), strict=True):
            if now != self.counts[i]:
                self.counts[i] = None
            if self.storages[i] not in (None, storage_of(self.tensors[i])):
                self.storages[i] = None
                cast |= self.trained[i]
        return cast


class AsInForward:
    """Context in which the layer has the tensors that forward used, without a gradient of theirs,
    and its modules' switches are as they were.
    """

    def __init__(self, then: AsThen):
        self.then, self.before = then, []

    def __enter__(self):
        self.then.refuse_others()
        try:
            if self.then.called:
                self._go_as_then()
            if not self._stands():
                self._put_back()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _stands(self) -> bool:
        """Whether there is nothing to put back."""
        return self.then.stands()

    def _put_back(self) -> None:
        for index, place in enumerate(self.then.places):
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
        for table, name in _filled(self.then.empty):
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
        self.before.append((table, name, table[name] if name in table else GONE))
        _set(table, name, value)

    def __exit__(self, *exc):
        for row in self.before:
            _set(*row)


def _set(table: dict, name: str, value) -> None:
    if value is GONE:
        table.pop(name, None)
    else:
        table[name] = value


class WeightGradients(AsInForward):
    """Context in which the layer's trained tensors are leaves of their own, whose gradients add up
    here.

    several: more than one tile will contribute, so gradients narrower than float32 add up in
    float32 (those of matrices in their matmuls, where the device can: `adding`) and `round()`
    brings them back; with one tile they stay in the leaves until then. by_hand: there is no nested
    graph, nor leaves; who computes the gradients adds them (`add`, `add_product`).
    """

    def __init__(self, then: AsThen, several: bool, by_hand: bool = False):
        super().__init__(then)
        self.several, self.by_hand, self.leaves, self.originals = several, by_hand, [], []
        self.sums: list[Tensor | None] = [None] * sum(then.trained)
        self.index: dict[int, int] = {}  # of what stands in their place, by their ids

    def _stands(self) -> bool:
        if not (self.by_hand and super()._stands()):
            return False
        self.originals = self.then.wanted()
        self.index = {id(tensor): index for index, tensor in enumerate(self.originals)}
        return True

    def _of(self, trained: bool, tensor: Tensor) -> Tensor:
        if not trained:
            return super()._of(trained, tensor)
        index = len(self.originals)
        self.originals.append(tensor)
        if not self.by_hand:
            return self._stand_in(index, tensor)
        tensor = super()._of(trained, tensor)
        self.index[id(tensor)] = index
        return tensor

    def _stand_in(self, index: int, original: Tensor) -> Tensor:
        stand_in = original.detach()
        # Engines look for their own marks on a parameter (ZeRO's ds_status, tensor parallelism's
        # plan).
        stand_in.__dict__ |= original.__dict__
        stand_in.__dict__[STANDS_FOR] = original
        stand_in.requires_grad = True
        self.index[id(stand_in)] = index
        # and no leaf is held here: its hook holds this, and no collector sees through it
        if self.several:
            stand_in.register_post_accumulate_grad_hook(partial(self._take, index))
        else:
            self.leaves.append(stand_in)
        return stand_in

    def _take(self, index: int, stand_in: Tensor) -> None:
        grad, stand_in.grad = stand_in.grad, None
        if grad is not None:  # else it has gone to `_add`
            self._add_gradient(index, grad)

    def _sum(self, index: int) -> Tensor | None:
        """What has added up; wide again where `round` was between (a weight that stands before
        attention and behind it).
        """
        found = self.sums[index]
        if found is not None and self.several and found.dtype not in _WIDE:
            found = self.sums[index] = found.to(torch.promote_types(found.dtype, torch.float32))
        return found

    def _add_gradient(self, index: int, grad: Tensor) -> None:
        found = self._sum(index)
        if found is not None:
            found.add_(grad)
        elif self.several and grad.dtype not in _WIDE:
            self.sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32))
        else:
            self.sums[index] = grad

    def adding(self, stand_in: Tensor):
        """A function that adds dy_NO^T x_NI to the sum of a matrix, in the matmul, or of a matrix an
        expert, of the rows up to offs_E of each; None where that is not to be, or cannot.
        """
        index = self.index.get(id(stand_in))
        if index is None or not self.several:
            return None
        if stand_in.dim() == 3:
            return partial(self._add_by_expert, index)
        return partial(self._add, index) if sums_in_matmul(stand_in, stand_in.dtype) else None

    def _add(self, index: int, dy_NO: Tensor, x_NI: Tensor) -> None:
        first = self._sum(index) is None
        if first:
            self.sums[index] = dy_NO.new_empty(dy_NO.shape[1], x_NI.shape[1], dtype=torch.float32)
        into(self.sums[index], dy_NO.t(), x_NI, first)

    def _add_by_expert(self, index: int, a_SM: Tensor, b_SN: Tensor, offs_E: Tensor) -> None:
        first = self._sum(index) is None
        if first:
            wide = torch.promote_types(a_SM.dtype, torch.float32)
            shape = len(offs_E), a_SM.shape[1], b_SN.shape[1]
            self.sums[index] = a_SM.new_empty(shape, dtype=wide)
        EXPERT_SUMS(self.sums[index], a_SM, b_SN, offs_E, first)

    def add(self, tensor: Tensor, grad: Tensor) -> None:
        """By hand: the gradient of a tensor that the layer has now."""
        index = self.index.get(id(tensor))
        # a leaf of somebody's own, no parameter, which no graph holds but a tile's
        if index is None:
            tensor.backward(grad)
        else:
            self._add_gradient(index, grad)

    def add_product(self, weight: Tensor, dy_NO: Tensor, x_NI: Tensor) -> None:
        """By hand: dy_NO^T x_NI, of a matrix."""
        index = self.index[id(weight)]
        if self.several and sums_in_matmul(weight, weight.dtype):
            self._add(index, dy_NO, x_NI)
        else:
            self._add_gradient(index, dy_NO.t().mm(x_NI))

    def round(self) -> None:
        """Rounds what has added up so far to each parameter's dtype, freeing the wide sums one by
        one.
        """
        if not self.several:
            self.sums = [leaf.grad for leaf in self.leaves] if self.leaves else self.sums
            return
        for index, original in enumerate(self.originals):
            if self.sums[index] is not None:
                self.sums[index] = self.sums[index].to(original.dtype)

    def handed_over(self) -> list[Tensor | None]:
        """The gradients, of `trained`. None stays here or in a stand-in, which something may still
        hold (sinks that attention was asked for): the engine then copies each gradient and the
        first one lives as long as the loss.
        """
        sums, self.sums = self.sums, []
        for leaf in self.leaves:
            leaf.grad = None
        return sums
