"""The present state of one decoder layer: its modules, hooks and adapters.

A layer's traits (traits.py) are found once, at `apply`, on a small instance. Here they meet the
layer's present state. Before its layers run the stack looks at each (`look`), which settles every
reason to run untiled that needs no arguments of a call (why_whole.py). A layer called directly
looks itself.
"""

from dataclasses import dataclass, field

from torch import nn

from hfpatch.compat import Snapshot
from hfpatch.layer.adapted_experts import experts_in
from hfpatch.layer.traits import LayerTraits
from hfpatch.layer.why_whole import Why, first


@dataclass(slots=True)
class Condition:
    """Facts about the modules in a layer, valid while `snapshot` holds. No reference to the layer.

    Attributes:
        traits: the layer's traits, for which this was found.
        reason: why every call runs untiled; None if tiles are possible.
        now: why every call of the current forward runs untiled, or None.
        draws: something in the layer draws random numbers, as a call has shown.
        drops: its attention is called with dropout, as a call has shown.
        mixing: the modules that mix tokens, those that call attention first.
        experts: the fused experts inside, and PEFT's wrappers of them (adapted_experts.py).
        can_skip: names of modules -> those among them that can skip their matmul (parts/unread.py).
        kind: names and numbers of the classes inside, None until used (graph_bytes.py).
    """

    snapshot: Snapshot
    traits: LayerTraits
    reason: Why | None = None
    now: Why | None = None
    draws: bool = False
    drops: bool = False
    mixing: list[nn.Module] = field(default_factory=list)
    experts: tuple[dict, list] = field(init=False)
    can_skip: dict = field(default_factory=dict)
    kind: str | None = None

    def __post_init__(self):
        self.experts = experts_in(self.snapshot.inside)

    def __reduce__(self):  # a copy of the layer finds its own
        return type(None), ()


def look(layer: nn.Module) -> Condition:
    """The layer's condition, found anew if the layer changed."""
    known = layer._hfpatch.condition
    traits = layer._hfpatch.traits
    if known is None or known.traits is not traits or not known.snapshot.holds(layer):
        known = Condition(Snapshot(layer), traits)
        known.reason = first("layer", traits.reason, layer, known)
        if known.reason is None:
            known.mixing = [layer.get_submodule(name) for name in traits.mixing]
        layer._hfpatch.condition = known
    known.now = first("forward", known.reason, layer, known)
    return known
