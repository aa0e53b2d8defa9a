"""The backward of layers as it is measured, and the graphs of their tiles (meter.py).

A tile's graph holds what its tokens would keep in a layer that keeps all: the difference of the
allocator's counter before and after it is built. Hooks on its nodes sample what its own backward
takes in addition.
"""

import threading
from collections import Counter
from contextlib import contextmanager

from hfpatch.budget.measured import Kind
from hfpatch.compat import autocast_dtype


def meter_kind(layer, x) -> str | None:
    """Layers of one kind keep the same bytes per token; None for one that keeps nothing."""
    trains = any(p.requires_grad for p in layer.parameters())
    if not (trains or x.requires_grad):
        return None
    condition = layer._hfpatch.condition
    if condition.kind is None:
        count = Counter(type(m).__name__ for m in layer.modules())
        names = " ".join(f"{name}*{n}" for name, n in sorted(count.items()))
        condition.kind = f"{names} {getattr(layer, 'layer_type', '')}"
    dtype = autocast_dtype(x.device.type)
    return f"{condition.kind} {'trained' if trains else 'frozen'} {x.dtype} {dtype}"


NONE = (0.0, 0.0, 0)  # of a part that was not measured
# now: (step, Kind, tiles measured of each part) of the layer whose backward runs here
_running = threading.local()


@contextmanager
def measured(step, layer):
    """A tiled layer's backward."""
    if step is None:
        yield
        return
    before = step.meter.layer_backward_begins(step)
    index = layer._hfpatch.index
    _running.now = step, step.meter.kinds.get(step.forward.kinds[index], Kind()), Counter()
    try:
        yield
    finally:
        _running.now = None
        step.meter.layer_backward_ended(step, before, step.first == index)


def unmeasured(outputs) -> None:
    """What tile_graph returns where nothing is measured."""


def tile_graph(part: str, x):
    """Measures the graph of a tile x [B, t, D] in a layer's backward, once for each kind of layer
    and part of it, and again for a larger tile: of the second tile where there is one. The first finds
    no sums of the weights' gradients, which take the same bytes whatever its tokens. Returns a
    function to call with the graph's outputs once it is built.
    """
    now = getattr(_running, "now", None)
    if now is None:
        return unmeasured
    step, kind, tiles = now
    # Not measured: a tile shorter than the one that was, and one as long that is not the second.
    if (x.shape[0] * x.shape[1], tiles[part] == 1) <= (kind.parts.get(part, NONE)[2], False):
        return unmeasured
    tiles[part] += 1
    return _watched(step, kind, part, x)


def whole_graph(step, layer, x):
    """The same for a layer that is checkpointed whole, whose backward begins."""
    if step is None:
        return unmeasured
    step.meter.layer_backward_begins(step)
    kind = step.meter.kinds.get(step.forward.kinds[layer._hfpatch.index], Kind())
    if x.shape[0] * x.shape[1] <= kind.parts.get("whole", NONE)[2]:
        return unmeasured
    return _watched(step, kind, "whole", x)


def _watched(step, kind, part: str, x):
    """As tile_graph. What the tile's own backward takes in addition is sampled after each node."""
    gauge = step.meter.gauge
    tokens = x.shape[0] * x.shape[1]
    before = gauge.read().allocated

    def built(outputs) -> None:
        stands = gauge.read().allocated
        costs = [max(0, stands - before) / tokens, 0.0, tokens]
        kind.parts[part] = costs

        def sample(*_) -> None:
            now = gauge.read().allocated
            costs[1] = max(costs[1], (now - stands) / tokens)
            if not step.backward.exact:
                step.backward.top = max(step.backward.top, now)

        sample()
        # Hook each node of the tile's graph once.
        todo = [y.grad_fn for y in outputs]
        seen = set()
        while todo:
            node = todo.pop()
            # gradients of leaves are captured, and a hook would keep others from taking them over
            if node is None or node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            node.register_hook(sample)
            todo += [following for following, _ in node.next_functions]

    return built
