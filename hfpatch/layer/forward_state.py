"""The tensors and module switches that a layer's forward used.

A backward runs the layer again in the same mode (training or not) and with the same adapters, on
the same tensors. If one of them was replaced or written to in place, or if modules, hooks or
forwards inside the layer changed, backward raises RuntimeError. A write through `.data` goes
unnoticed. Engines that gather weights around each call swap and refill them at will: their current
tensors are the same weights.
"""

from contextlib import contextmanager

from torch import Tensor, nn

from hfpatch.compat import (
    GONE,
    Snapshot,
    buffers_of,
    hooks_on_all,
    in_fsdp2,
    is_shard,
    is_view_of_flat,
    modules_in,
    parameters_of,
    switches_of,
    values_for_now,
    version,
)


def edited(what: str, how: str) -> RuntimeError:
    """The error of a backward whose weights changed."""
    return RuntimeError(
        f"hfpatch: {what} was {how} between a layer's forward and its backward. Step the "
        "optimizer, or edit weights, after backward."
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether an engine gathers this module's parameters around its calls (ZeRO-3, FSDP)."""
    return in_fsdp2(module) or any(map(is_shard, module.parameters()))


def places_in(modules: list[nn.Module]) -> list[tuple[nn.Module, dict, str]]:
    """(module, table, name) of each parameter and buffer, and of FSDP1's views beside them."""
    found = []
    for module in modules:
        for table in (parameters_of(module), buffers_of(module)):
            found += [(module, table, name) for name, x in table.items() if x is not None]
        own = module.__dict__
        for name, x in own.items():
            if isinstance(x, Tensor) and x.requires_grad and is_view_of_flat(x):
                found.append((module, own, name))
    return found


def tensor_at(module: nn.Module, table: dict, name: str) -> Tensor | None:
    """The tensor of a place now. FSDP1 takes its views out of the parameters for a backward."""
    return table.get(name, module.__dict__.get(name))


class ForwardState:
    """A layer's tensors, each once, and its modules' switches, as of one forward.

    Attributes:
        places: (module, table, name) of each tensor.
        tensors: the tensors there. Empty if gathered.
        counts: their versions, None where the forward itself wrote. Empty if gathered, so that
            refuse_others compares modules, hooks and switches only.
        wanted: the tensors that require a gradient.
        trained: their places.
        gathered: whether an engine swaps the tensors.
    """

    def __init__(self, layer: nn.Module, snapshot: Snapshot):
        modules = [layer, *snapshot.inside]
        self.layer = layer
        self.kind = layer.__class__
        self.snapshot = snapshot
        self.on_all = hooks_on_all()
        self.switches = switches_of(modules)
        found = {}
        for place in places_in(modules):
            _, table, name = place
            x = table[name]
            found.setdefault(id(x), (place, x))
        self.places = [place for place, _ in found.values()]
        self.tensors = [x for _, x in found.values()]
        sharded = any(is_shard(x) or is_view_of_flat(x) for x in self.tensors)
        self.gathered = sharded or any(map(in_fsdp2, modules))
        self.wanted = [x for x in self.tensors if x.requires_grad]
        self.trained = [place for place, x in found.values() if x.requires_grad]
        if self.gathered:
            # The engine puts other tensors there. refuse_others then has no tensors to compare.
            self.tensors = []
        self.counts = list(map(version, self.tensors))

    def ran(self) -> None:
        """Called after the forward: what the layer itself wrote to, each of its runs writes to."""
        self.counts = [n if version(x) == n else None for x, n in zip(self.tensors, self.counts)]

    def refuse_others(self) -> None:
        """Raises RuntimeError if the layer has other modules, hooks, forwards, merged adapters or
        tensors now.
        """
        layer = self.layer
        as_made = layer.__class__ is self.kind and modules_in(layer)[1:] == self.snapshot.inside
        if not (as_made and self.snapshot.runs_alike(layer)) or hooks_on_all() != self.on_all:
            raise RuntimeError(
                f"hfpatch: modules, hooks, forwards or merged adapters of a {self.kind.__name__} "
                "changed between its forward and its backward. Change the model (adapters, hooks, "
                "undo) before forward or after backward."
            )
        for (module, table, name), x, count in zip(self.places, self.tensors, self.counts):
            if tensor_at(module, table, name) is not x or count not in (None, version(x)):
                raise edited(f"{type(module).__name__}.{name}", "replaced or modified in place")


@contextmanager
def as_in_forward(state: ForwardState):
    """A context in which the layer's modules have the switches of its forward."""
    state.refuse_others()
    rows = [row for row in state.switches if row[0].get(row[1], GONE) != row[2]]
    with values_for_now(rows):
        yield
