"""The traits of a class of decoder layers, as a probe finds them."""

from dataclasses import dataclass, field

from torch import nn

from hfpatch.compat import modules_in
from hfpatch.layer.why_whole import OTHER_MIXER


@dataclass(frozen=True)
class LayerTraits:
    """The traits of a class of layers, found at apply() by decoder/verdict.py.

    Attributes:
        attention: names of the modules that called attention, in order.
        mixers: name of each module that mixes tokens in another way -> the number of unread values
            that it returns after hidden states.
        timed: (name, the argument that takes states) of each mixer that runs in tiles through time.
        untimed: (name, reason) of each mixer that does not.
        carries: the layer's argument that takes states, if the layer has no attention and can run
            in tiles through time itself (timed.py). "" if it mixes no tokens; None if it cannot.
        unread_after: names of modules whose output values no gradient reads when `after` runs again
            in backward.
        unread_before: the same for `before`.
        unread_always: the names in unread_after whose values the layer's output does not read
            either, so that they are skipped in forward too.
        reason: why the layer is not tiled (layer.why_whole.Why, of stage apply), or None.
        looked: the probe searched for modules that mix tokens.
        attends: the mixers only call attention, in a way that cannot be intercepted.
        arguments: the unusual arguments that the small instance's layer got, and their token
            axes (arguments.axes_of); None for a class of transformers, which are tried with others.
        evaluates: the layer gives the same values in eval mode, or is of such a class.
        kinds: the known classes in all layers of the small instance (strangers.kinds_in).
    """

    attention: tuple[str, ...] = ()
    mixers: dict[str, int] = field(default_factory=dict)
    timed: tuple[tuple[str, str], ...] = ()
    untimed: tuple[tuple[str, str], ...] = ()
    carries: str | None = None
    unread_after: tuple[str, ...] = ()
    unread_before: tuple[str, ...] = ()
    unread_always: tuple[str, ...] = ()
    reason: str | None = None
    looked: bool = False
    attends: bool = False
    arguments: dict[str, tuple] | None = None
    evaluates: bool = True
    kinds: frozenset = frozenset()

    def in_time(self, mixer: str) -> str:
        """How this mixer runs, as a phrase for the report."""
        if mixer in dict(self.timed):
            return "run in tiles through time"
        why = dict(self.untimed).get(mixer)
        return "run over whole rows, and again in backward" + (f": {why}" if why else "")

    @property
    def mixes_outside(self) -> bool:
        """Whether something other than attention mixes tokens, known (`mixers`) or not."""
        return bool(self.mixers) or self.reason == OTHER_MIXER

    @property
    def all_timed(self) -> bool:
        """Whether every mixer of the layer runs in tiles through time."""
        return self.reason is None and {name for name, _ in self.timed} == set(self.mixers)

    @property
    def mixing(self) -> tuple[str, ...]:
        """Names of the modules that mix tokens."""
        return (*self.attention, *self.mixers)


@dataclass(eq=False)
class Patched:
    """`module._hfpatch`: what a patched layer knows, the stack of layers, or a tower's block.

    Attributes:
        traits: a layer's LayerTraits, the stack's decoder.batch.StackTraits, None for a block.
        configs: the configs that the modules inside read.
        runtime: the model's layer.runtime.LayerRuntime; None where transformers' own forward runs.
        index: of a layer or block that has a runtime.
        condition: the layer's Condition, as of the last look (condition.py).
        streams: the residual streams of the layer's hidden states (residual_streams.py), or None.
    """

    traits: object
    configs: tuple = ()
    runtime: object = None
    index: int | None = None
    condition: object = None
    streams: tuple | None = None


def layers_in(module: nn.Module) -> list[nn.Module]:
    """The patched layers in a module, in their order."""
    known = ((m, vars(m).get("_hfpatch")) for m in modules_in(module))
    return [
        m for m, one in known if isinstance(one, Patched) and one.traits and one.index is not None
    ]


def runtimes_in(model: nn.Module) -> list:
    """The LayerRuntimes of a model, one per stack of layers and list of a tower's blocks; none for a
    stock one."""
    found = (getattr(vars(m).get("_hfpatch"), "runtime", None) for m in model.modules())
    return [runtime for runtime in dict.fromkeys(found) if runtime is not None]
