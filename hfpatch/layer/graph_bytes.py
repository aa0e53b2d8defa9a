"""The backward of layers as it is measured, and the graphs of their tiles (meter.py).

A tile's graph holds what its tokens would keep in a layer that keeps all: the difference of the
allocator's counter before and after it is built. Hooks on its nodes sample what its own backward
takes in addition.
"""

import threading
from collections import Counter
from contextlib import contextmanager

from hfpatch.compat import autocast_dtype


def kind_of(layer, x) -> str | None:
    """Layers of one kind keep the same bytes per token; None for one that keeps nothing."""
    trains = any(p.requires_grad for p in layer.parameters())
    if not (trains or x.requires_grad):
        return None
    condition = layer._hfpatch.condition
    if condition.kind is None:
        count = Counter(type(m).__name__ for m in layer.modules())
        names = " ".join(f"{name}*{n}" if n > 1 else name for name, n in sorted(count.items()))
        condition.kind = f"{names} {getattr(layer, 'layer_type', '')}"
    dtype = autocast_dtype(x.device.type)
    return f"{condition.kind} {'trained' if trains else 'frozen'} {x.dtype} {dtype}"


# now: (step, name of the kind, tiles measured of each part) of the layer whose backward runs here
_running = threading.local()


@contextmanager
def measured(step, layer):
    """A tiled layer's backward."""
    if step is None:
        yield
        return
    before = step.meter.backward(step)
    index = layer._hfpatch.index
    _running.now = step, step.forward.kinds[index], Counter()
    try:
        yield
    finally:
        _running.now = None
        step.meter.backed(step, before, step.first == index)


def unmeasured(outputs) -> None:
    """What tile_graph returns where nothing is measured."""


def tile_graph(part: str, x):
    """Measures the graph of a tile x [B, t, D] in a layer's backward, once for each kind of layer
    and part of it: of the second tile where there is one. The first finds no sums of the weights'
    gradients, which take the same bytes whatever its tokens. Returns a function to call with the
    graph's outputs once it is built.
    """
    now = getattr(_running, "now", None)
    kind = now and now[0].meter.kinds.get(now[1])
    if not kind or part in kind.parts and now[2][part] != 1:
        return unmeasured
    now[2][part] += 1
    return TileGraph(now[0], kind, part, x.shape[0] * x.shape[1]).built


def whole_graph(step, layer, x):
    """The same for a layer that is checkpointed whole, whose backward begins."""
    if step is None:
        return unmeasured
    step.meter.backward(step)
    kind = step.meter.kinds.get(step.forward.kinds[layer._hfpatch.index])
    if kind is None or "whole" in kind.parts:
        return unmeasured
    return TileGraph(step, kind, "whole", x.shape[0] * x.shape[1]).built


class TileGraph:
    """One tile's graph in a backward: the bytes that it keeps, and those that its own backward
    takes in addition, sampled after each of its nodes."""

    def __init__(self, step, kind, part: str, tokens: int):
        self.step, self.kind, self.part, self.tokens = step, kind, part, tokens
        self.before = step.meter.gauge.read().allocated

    def built(self, outputs) -> None:
        """The graph of these outputs is built."""
        self.stands = self.step.meter.gauge.read().allocated
        self.kind.parts[self.part] = [max(0, self.stands - self.before) / self.tokens, 0.0]
        self._sample()
        todo = [y.grad_fn for y in outputs]
        seen = set()
        while todo:
            node = todo.pop()
            # gradients of leaves are captured, and a hook would keep others from taking them over
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            node.register_hook(self._sample)
            todo += [following for following, _ in node.next_functions]

    def _sample(self, *_) -> None:
        now = self.step.meter.gauge.read().allocated
        part = self.kind.parts[self.part]
        part[1] = max(part[1], (now - self.stands) / self.tokens)
        if not self.step.backward.exact:
            self.step.backward.top = max(self.step.backward.top, now)
