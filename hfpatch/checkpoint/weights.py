"""Weight gradients of one layer over several tiles: stand-ins for its parameters while nested autograd runs.

The nested graphs are built on detached stand-ins, so the parameters' own hooks (tensor hooks, post-accumulate hooks, those of
DDP, FSDP and ZeRO) see nothing until the layer's autograd function returns the final gradients, once.

The layer runs again in backward on the tensors that forward used (`torch.func.functional_call` may have been left by then);
where one was written to since, that is said. Engines that gather weights around each call swap and refill them as they like:
there the tensors of the moment are the same weights.
"""

from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.compat import is_shard, is_view_of_flat, parameters_of, storage_of, version

STANDS_FOR = "_hfpatch_stands_for"
_OF_ALL = vars(nn.Module()).keys()  # attributes of every module


class Place:
    """Where a tensor of the layer lives, and which one it was in forward (None where an engine gathers it)."""

    __slots__ = ("module", "name", "storage", "tensor", "version", "trained")

    def __init__(self, module: nn.Module, name: str, tensor: Tensor, gathered: bool):
        self.module, self.name, self.trained = module, name, tensor.requires_grad
        self.tensor = None if gathered else tensor
        self.version = version(tensor)
        # Frozen ones may come and go by `.data` (streamed.py); a trained one that does is somebody's edit.
        self.storage = storage_of(tensor) if self.trained and not gathered else None

    def now(self) -> Tensor:
        own = parameters_of(self.module)
        return own[self.name] if self.name in own else vars(self.module)[self.name]

    def put(self, tensor: Tensor) -> None:
        own = parameters_of(self.module)
        (own if self.name in own else vars(self.module))[self.name] = tensor

    def in_forward(self) -> Tensor:
        """The tensor that forward used. RuntimeError where it was written to since."""
        if self.tensor is None:
            return self.now()
        replaced = self.storage is not None and storage_of(self.tensor) != self.storage
        if replaced or version(self.tensor) != self.version:
            how = "given other values by its .data" if replaced else "modified in place"
            raise RuntimeError(
                f"hfpatch: expected the weights that forward used, {type(self.module).__name__}.{self.name} was {how} before "
                "its backward; step the optimizer (or edit weights) after backward."
            )
        return self.tensor


def is_sharded(module: nn.Module) -> bool:
    """Whether an engine gathers this module's parameters around its calls (ZeRO-3, FSDP)."""
    return _is_sharded(module, module.parameters())


def _is_sharded(module: nn.Module, tensors) -> bool:
    return "FSDPModule" in [c.__name__ for c in type(module).__mro__] or any(map(is_shard, tensors))


def noted(layer: nn.Module, modules: list[nn.Module]) -> list[Place]:
    """Every tensor that the layer of these modules computes with, each once.

    Sharding engines may hold the gathered weight as a plain attribute in place of the parameter (FSDP1 does): those
    count too.
    """
    found = {}
    for module in modules:
        own, values = parameters_of(module), module.__dict__
        plain = [n for n in values if n not in _OF_ALL and isinstance(values[n], Tensor) and not values[n].is_leaf]
        for name in (*own, *plain):
            tensor = own[name] if name in own else values[name]
            if tensor is None or id(tensor) in found:
                continue
            if STANDS_FOR in tensor.__dict__:  # Ctrl-C in the very moment of putting the parameters back
                tensor = tensor.__dict__[STANDS_FOR]
                Place(module, name, tensor, False).put(tensor)
            found[id(tensor)] = (module, name, tensor, name not in own or is_view_of_flat(tensor))
    sharded = _is_sharded(layer, [tensor for _, _, tensor, _ in found.values()])
    return [Place(module, name, tensor, sharded or gathered) for module, name, tensor, gathered in found.values()]


class WeightGradients:
    """Context in which the layer's trained tensors are leaves of their own, whose gradients add up here.

    several: more than one tile will contribute, so gradients narrower than float32 add up in float32 and `round()` brings
    them back; with one tile they stay in the leaves until then.
    """

    def __init__(self, places: list[Place], several: bool):
        self.several, self.leaves = several, []
        self.trained = [place for place in places if place.trained]
        self.originals = [place.in_forward() for place in self.trained]
        self.frozen = [place for place in places if not place.trained]
        self.sums: list[Tensor | None] = [None] * len(self.trained)
        self.before: list[tuple[Place, Tensor]] = []

    def __enter__(self):
        try:
            with torch.no_grad():
                for index, (place, original) in enumerate(zip(self.trained, self.originals)):
                    self._swap(place, place.now(), self._stand_in(index, original))
            for place in self.frozen:
                then, now = place.in_forward(), place.now()
                if then is not now:
                    self._swap(place, now, then)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _swap(self, place: Place, now: Tensor, tensor: Tensor) -> None:
        self.before.append((place, now))
        place.put(tensor)

    def _stand_in(self, index: int, original: Tensor) -> Tensor:
        stand_in = original.detach()
        # Engines look for their own marks on a parameter (ZeRO's ds_status, tensor parallelism's plan).
        stand_in.__dict__ |= original.__dict__
        stand_in.__dict__[STANDS_FOR] = original
        stand_in.requires_grad = True
        if self.several:  # and no leaf is held here: its hook holds this, and no collector sees through it
            stand_in.register_post_accumulate_grad_hook(partial(self._take, index))
        else:
            self.leaves.append(stand_in)
        return stand_in

    def _take(self, index: int, stand_in: Tensor) -> None:
        grad, stand_in.grad = stand_in.grad, None
        if self.sums[index] is not None:
            self.sums[index].add_(grad)
        else:
            self.sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32))

    def round(self) -> None:
        """Rounds what has added up so far to each parameter's dtype, freeing the wide sums one by one."""
        if not self.several:
            self.sums = [leaf.grad for leaf in self.leaves]
            return
        for index, original in enumerate(self.originals):
            if self.sums[index] is not None:
                self.sums[index] = self.sums[index].to(original.dtype)

    def handed_over(self) -> list[Tensor | None]:
        """The gradients, of `trained`. None stays here or in a stand-in, which something may still hold (sinks that attention
        was asked for): the engine then copies each gradient and the first one lives as long as the loss."""
        sums, self.sums = self.sums, []
        for leaf in self.leaves:
            leaf.grad = None
        return sums

    def __exit__(self, *exc):
        for place, tensor in self.before:
            place.put(tensor)


class AsInForward(WeightGradients):
    """Context in which the layer has the tensors that forward used, without a gradient."""

    def __init__(self, places: list[Place]):
        super().__init__(places, several=False)
        self.frozen, self.trained, self.originals = self.frozen + self.trained, [], []
