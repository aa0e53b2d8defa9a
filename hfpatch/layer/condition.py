"""The present state of one decoder layer (modules, hooks, adapters), and why it may forbid tiles.

A layer's traits (traits.py) are found once, at `apply`, on a small instance. Here they meet the
layer's present state: adapters, hooks, modules added later. The stack looks at all layers once per
forward (`look`), which settles every rule that needs no arguments of a call. A layer called
directly looks itself.
"""

from dataclasses import dataclass, field

from torch import nn

from hfpatch.compat import (
    MADE_FROM,
    Snapshot,
    engine_hook,
    forward_hooks,
    fsdp2_units,
    hooks_on_all,
    other_hooks,
    submodule,
    watched_by_user,
)
from hfpatch.context.class_code import as_asked
from hfpatch.context.classes import other_forward, package_of, replaced_forward
from hfpatch.layer.adapted_experts import experts_in
from hfpatch.layer.adapters import add_a_bias
from hfpatch.layer.adapters import look as look_at_adapters
from hfpatch.layer.strangers import stranger_in
from hfpatch.layer.traits import LayerTraits
from hfpatch.parts.quantised import holds_packed, scales_over_tokens

_CAPTURING = "transformers.utils.output_capturing"
_NO_MASK = "_attach_context_parallel_hooks."


@dataclass(slots=True)
class Condition:
    """Facts about the modules in a layer, valid while `snapshot` holds. No reference to the layer.

    Attributes:
        traits: the layer's traits, for which this was found.
        inside: the modules in the layer, without itself.
        reason: why every call runs whole; None if tiles are possible.
        now: why every call of the current forward runs whole, or None.
        unknown: the module that the small instance did not have, and its class; None without one.
        adapter: the property of an adapter that tiles would change, or None.
        draws: whether adapters may draw random numbers.
        biased: whether adapters add a bias, in a layer with mixers.
        contiguous: whether a module in it takes only contiguous gradients, as some of torchao's.
        mixing: the modules that mix tokens, those that call attention first.
        head_dim: the largest of its attention modules, 0 if they name none.
        experts: the fused experts inside, and PEFT's wrappers of them (adapted_experts.py).
        hooked: the modules inside that have a hook of accelerate's.
        packed: whether experts of 4 bits are among them.
        block: layer.block.Block, None until used.
        can_skip: names of modules -> those among them that can skip their matmul (parts/unread.py).
        read: keys that the layer reads from earlier ones, None if not known yet.
        leaves: whether later layers read its keys and values.
        units: modules in it whose weights FSDP2 gathers separately.
    """

    snapshot: Snapshot
    traits: LayerTraits
    reason: str | None = None
    now: str | None = None
    unknown: str | None = None
    adapter: str | None = None
    draws: bool = False
    biased: bool = False
    contiguous: bool = False
    mixing: list[nn.Module] = field(default_factory=list)
    head_dim: int = 0
    experts: tuple[dict, list] = ((), ())
    hooked: list[nn.Module] = field(default_factory=list)
    packed: bool = False
    block: object = None
    can_skip: dict = field(default_factory=dict)
    read: tuple | None = None
    leaves: bool = False
    units: list[nn.Module] = field(default_factory=list)
    inside: list[nn.Module] = field(init=False)

    def __post_init__(self):
        self.inside = self.snapshot.inside

    def __reduce__(self):  # a copy of the layer finds its own
        return type(None), ()


def look(layer: nn.Module) -> Condition:
    """The layer's condition, found anew if the layer changed."""
    known, traits = layer._hfpatch_condition, layer._hfpatch_traits
    if known is None or known.traits is not traits or not known.snapshot.holds(layer):
        known = layer._hfpatch_condition = _condition_of(layer)
    known.now = known.reason or _why_now(layer, known)
    return known


def _why_now(layer: nn.Module, condition: Condition) -> str | None:
    """Why the layer runs whole in this forward: hooks on every module, or attention dropout."""
    if hooks_on_all() and condition.inside:
        return "hooks on every module of the process"
    for attn in condition.mixing if layer.training else ():
        dropout = getattr(attn, "attention_dropout", 0.0)
        if dropout.p if isinstance(dropout, nn.Dropout) else dropout:
            return "attention dropout"
    return None


def _condition_of(layer: nn.Module) -> Condition:
    traits = layer._hfpatch_traits
    found = Condition(Snapshot(layer), traits)
    found.adapter, found.draws = look_at_adapters([layer, *found.inside])
    found.biased = bool(traits.mixers) and add_a_bias(found.inside)
    found.units = fsdp2_units(found.inside)
    found.contiguous = any(package_of(module) == "torchao" for module in found.inside)
    found.experts, found.packed = experts_in(found.inside), any(map(holds_packed, found.inside))
    found.hooked = [m for m in found.inside if engine_hook(m) is not None]
    found.unknown = stranger_in(layer, layer._hfpatch_places)
    found.reason = (
        found.adapter and f"an adapter in it has {found.adapter}"
        or _scaled(layer, found.inside)
        or _hooked(layer, found.inside)
        or traits.reason
        or found.unknown
        or _patched_class([layer, *found.inside])
    )  # fmt: skip
    if found.reason is None:
        found.mixing = [submodule(layer, name) for name in traits.mixing]
        found.reason = _why_not_inside(layer, traits, found.mixing)
        attention = found.mixing[: len(traits.attention)]
        found.head_dim = max((getattr(m, "head_dim", 0) or 0 for m in attention), default=0)
    return found


def _scaled(layer: nn.Module, inside: list[nn.Module]) -> str | None:
    """The projection that scales several tokens together, also under adapters, and how."""
    module, why = next(((m, why) for m in inside if (why := scales_over_tokens(m))), (None, None))
    return why and f"{_name_in(layer, module)}: {why}"


def _name_in(layer: nn.Module, module: nn.Module) -> str:
    return next(name for name, m in layer.named_modules() if m is module)


def _hooked(layer: nn.Module, inside: list[nn.Module]) -> str | None:
    """The user's hooks inside the layer, or None. Tiles would call hooks more often, with parts of
    a row.
    """
    hooked = watched_by_user(inside)
    return None if hooked is None else f"hooks on {_name_in(layer, hooked)}"


def _patched_class(modules: list[nn.Module]) -> str | None:
    """The class whose forward or rotation changed, process-wide, since the small instance was
    tried.
    """
    kinds = dict.fromkeys(MADE_FROM[type(m)] for m in modules)
    return next(
        (
            f"another {k.__name__}.forward or rotation than at apply()"
            for k in kinds
            if not as_asked(k)
        ),
        None,
    )


def _why_not_inside(layer: nn.Module, traits: LayerTraits, mixing: list[nn.Module]) -> str | None:
    """How the modules that mix tokens, and those around them, differ from apply(); None if they do
    not.
    """
    for attn in mixing:
        kind = getattr(attn, "_hfpatch_base", type(attn))
        if package_of(attn) != package_of(layer):
            return f"a {kind.__module__}.{kind.__name__} in it"
    for name in {n for path in traits.mixing for n in _ancestors(path)}:
        module = submodule(layer, name)
        if has_hooks(module):
            return f"hooks on {name}"
        if other_forward(module):
            return f"{name}: {replaced_forward(module)}"
    return None


def _ancestors(path: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks other than those that a tiled call serves otherwise:
    transformers' recorders, and accelerate's hooks under context parallelism, which remove a mask.
    """
    forward = [h for h in forward_hooks(module) if getattr(h, "__module__", None) != _CAPTURING]
    others = [
        h for h in other_hooks(module) if not getattr(h, "__qualname__", "").startswith(_NO_MASK)
    ]
    return bool(forward or others) or engine_hook(module) is not None
