"""Weight gradients of one layer over several tiles: stand-ins for its parameters while nested autograd runs.

The nested graphs are built on detached stand-ins, so the parameters' own hooks (tensor hooks, post-accumulate hooks, those of
DDP, FSDP and ZeRO) see nothing until the layer's autograd function returns the final gradients, once.
"""

import torch
from torch import Tensor, nn


def trainable(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where each trainable tensor of the layer lives: (module, attribute), each tensor once.

    Sharding engines may hold the gathered weight as a plain attribute in place of the parameter (FSDP1 does): those
    count too.
    """
    places, seen = [], set()
    for module in layer.modules():
        plain = ((n, t) for n, t in vars(module).items() if isinstance(t, Tensor) and not t.is_leaf)
        for name, tensor in (*module._parameters.items(), *plain):
            if tensor is not None and tensor.requires_grad and id(tensor) not in seen:
                seen.add(id(tensor))
                places.append((module, name))
    return places


def current(place: tuple[nn.Module, str]) -> Tensor:
    """The tensor that stands at a place now."""
    module, name = place
    return module._parameters[name] if name in module._parameters else vars(module)[name]


def _put(place, tensor) -> None:
    module, name = place
    (module._parameters if name in module._parameters else vars(module))[name] = tensor


class WeightGradients:
    """Context in which the layer's trainable tensors are leaves of their own, whose gradients add up here.

    several: more than one tile will contribute, so gradients narrower than float32 add up in float32 and `round()` brings
    them back; with one tile they are kept as they come.
    """

    def __init__(self, places: list[tuple[nn.Module, str]], several: bool):
        self.places, self.several = places, several
        self.sums: list[Tensor | None] = [None] * len(places)
        self.originals: list[Tensor] = []

    def __enter__(self):
        for index, place in enumerate(self.places):
            original = current(place)
            self.originals.append(original)
            with torch.no_grad():
                stand_in = original.detach()
            # Engines look for their own marks on a parameter (ZeRO's ds_status, tensor parallelism's plan).
            stand_in.__dict__.update(vars(original))
            stand_in.requires_grad_(True)
            stand_in.register_post_accumulate_grad_hook(lambda t, i=index: self._take(i, t))
            _put(place, stand_in)
        return self

    def _take(self, index: int, stand_in: Tensor) -> None:
        grad, stand_in.grad = stand_in.grad, None
        wide = torch.promote_types(grad.dtype, torch.float32)
        if self.sums[index] is None:
            self.sums[index] = grad.to(wide) if self.several else grad
        else:
            self.sums[index].add_(grad)

    def round(self) -> None:
        """Rounds what has added up so far to each parameter's dtype, freeing the wide sums one by one."""
        for index, original in enumerate(self.originals):
            if self.sums[index] is not None:
                self.sums[index] = self.sums[index].to(original.dtype)

    def __exit__(self, *exc):
        for place, original in zip(self.places, self.originals):
            _put(place, original)
