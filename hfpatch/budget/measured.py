"""What a model's own steps have shown, and what the next step keeps: a ladder of three rungs.

    1  larger tiles, up to the largest of TILES
    2  gate and up on the host too, in as many layers as the link has time for in a forward
    3  layers that keep all that autograd saves, with the memory that is left

The run itself measures these numbers (layer/meter.py), except UNTRIED and the rate of pinning, which
are assumed. A Kind counts bytes per token, a StepSizes has lines over lengths: so what one length showed
serves every other. Standard library only.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

from hfpatch.budget.policy import RING_SLOTS, TILES, Checkpointing

# Part of the card that stays free until a step with layers that keep all was measured, and after it.
UNSURE = 0.10
SURE = 0.04
# A layer of a kind that never kept all keeps at most this many times the graphs of its tiles.
UNTRIED = 1.3
# Part of the free host memory for checkpoints; the process, the data loader and page tables need
# the rest.
HOST_SHARE = 0.9
# Registering host memory with the driver, page faults included, bytes/s of one process. Assumed.
PIN_BYTES_PER_SECOND = 3 << 30
# Most pinned bytes for checkpoints that only save time: as many as a minute of the first step pins.
PINNED_MOST = 60 * PIN_BYTES_PER_SECOND


def rounded(tokens: int) -> int:
    """`tokens` rounded up to a sixteenth of the largest power of two within."""
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


@dataclass
class Line:
    """A quantity measured at some numbers of tokens, and what it is at others. points: [tokens,
    value] in ascending order.
    """

    points: list = field(default_factory=list)

    def put(self, tokens: int, value: float) -> None:
        near = rounded(tokens)
        self.points = [p for p in self.points if rounded(p[0]) != near]
        insort(self.points, [tokens, value])

    def _around(self, tokens: int):
        at = bisect_left(self.points, [tokens, float("-inf")])
        below = self.points[at - 1] if at else None
        return below, self.points[at] if at < len(self.points) else None

    def most(self, tokens: int) -> float:
        """An upper bound: of two neighbours by a straight line, beyond the last by its ratio."""
        below, above = self._around(tokens)
        if above is None:
            return below[1] * tokens / below[0]
        if below is None:
            return above[1]
        share = (tokens - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])

    def least(self, tokens: int) -> float:
        """A lower bound of seconds, which grow at least with the tokens and at most with their
        square."""
        below, above = self._around(tokens)
        if above is not None and (below is None or above[0] == tokens):
            return above[1] * (tokens / above[0]) ** 2
        return below[1] * tokens / below[0]


@dataclass
class Kind:
    """Layers of one kind. kept: [bytes per token of one that keeps all, tokens of that step], None
    before one did; longest: the most tokens of a step. parts: of each part of a tile, [bytes per token
    of its graph, those that its backward takes in addition, tokens of the tile].

    Copies of weights and gradients take the same bytes whatever the tokens, so what longer rows show
    replaces what shorter ones did, and of much shorter ones nothing follows for longer ones.
    """

    kept: list | None = None
    parts: dict = field(default_factory=dict)
    longest: int = 0

    @property
    def graph(self) -> float:
        return sum(part[0] for part in self.parts.values())

    @property
    def walk(self) -> float:
        return max((part[1] for part in self.parts.values()), default=0.0)

    @property
    def cost(self) -> float:
        """The most bytes per token of a layer that keeps all, 0 if nothing is known of it."""
        return (
            self.kept[0]
            if self.kept is not None and self.longest <= 4 * self.kept[1]
            else UNTRIED * self.graph
        )


@dataclass
class StepSizes:
    """Steps of one kind: the same parameters train, in the same dtypes. All bytes are measured.

    Attributes:
        kinds: the kind of each layer, None for a layer that keeps nothing or must not keep all.
        stands: bytes allocated when the layers' forward ends, minus those when it began, without
            what is kept by layers that keep everything.
        loss: the most bytes from then on until the layers' backward begins.
        after: bytes allocated when the layers' backward begins, minus those when the forward ended.
        tiled: the most bytes allocated in the backward of tiled layers, minus those when the forward
            began, without the tile and all gradients.
        gradients: bytes that the whole step leaves, its gradients.
        seconds: of the layers' forward.
        sure: a step with several layers that keep all was measured.
    """

    kinds: list = field(default_factory=list)
    stands: Line = field(default_factory=Line)
    loss: Line = field(default_factory=Line)
    after: Line = field(default_factory=Line)
    tiled: Line = field(default_factory=Line)
    seconds: Line = field(default_factory=Line)
    gradients: float = 0.0
    sure: bool = False

    @property
    def measured(self) -> bool:
        return bool(self.stands.points and self.loss.points and self.tiled.points)


@dataclass
class Abilities:
    """What the layers of a step can do. gate_up: bytes per token of gate and up, 0 if they cannot
    be kept; checkpoint: bytes per token of a layer's input and attention output; host: free bytes of the
    host; link: bytes a second.
    """

    gate_up: int = 0
    checkpoint: int = 0
    host: int | None = None
    link: float = 0.0


def tile_bytes(sizes: StepSizes, kinds: dict, tile: int, gate_up: int) -> float:
    """Bytes that a tile takes in a layer's backward. gate_up: bytes per token, 0 if not kept."""
    own = (kinds[name] for name in sizes.kinds if name in kinds)
    most = max((kind.graph + kind.walk for kind in own), default=0)
    return tile * (most + RING_SLOTS * gate_up)


@dataclass
class StepPlan:
    """The plan of a step.

    Attributes:
        kinds: the kind of each layer, as the plan knows them.
        keeps_all: whether each layer keeps all that autograd saves: nothing in it runs again.
        working: the most bytes in the backward of a tiled layer, without gradients.
        need: bytes beside those of layers that keep all.
        top: the most bytes, above those as the step begins; 0 if nothing was measured.
        same_on_all_ranks: ranks run it alike, whatever is free as a layer begins.
        share: of the card that stays free.
        gate_up: bytes per token that go to the host where they are kept.
        ahead: bytes that the sources of copies may take at most.
        whole: its layers cannot be tiled.
    """

    policy: Checkpointing
    kinds: list = field(default_factory=list)
    keeps_all: list = field(default_factory=list)
    working: float = 0.0
    need: float = 0.0
    top: float = 0.0
    same_on_all_ranks: bool = False
    share: float = UNSURE
    gate_up: int = 0
    ahead: int = 0
    whole: bool = False


def climb(
    first: Checkpointing,
    sizes: StepSizes,
    kinds: dict,
    settings: Checkpointing,
    able: Abilities,
    tokens: int,
    room: float,
    tile_most: int = TILES[-1],
) -> StepPlan:
    """The plan of a step.

    Args:
        first: the policy of a step of which nothing is known.
        kinds: name -> Kind.
        tokens: of the batch.
        room: bytes that the step may add to the device at its highest.
        tile_most: tokens of the largest tile.
    """
    if settings.aim == "least":  # its tiles stay as they are
        settings = replace(settings, tile=first.tile, plain=0, keep=first.keep)
    rest = sizes.gradients + sizes.tiled.most(tokens)

    def peak(tile: int, gate_up: int) -> float:
        """The most bytes in the backward of tiled layers."""
        return rest + tile_bytes(sizes, kinds, min(tile, tokens), gate_up)

    # [Rung 1] The tile.
    policy = first
    while settings.tile == "auto" and policy.tile < min(tokens, tile_most):
        if peak(2 * policy.tile, 0) > room:
            break
        policy = replace(policy, tile=2 * policy.tile)
    # [Rung 2] Whether a tile has room for gate and up. How many layers send them follows below.
    gate_up = 0
    may_send = settings.keep == "auto" and policy.offload == "host" and policy.every == 1
    if may_send and peak(policy.tile, able.gate_up) <= room:
        gate_up = able.gate_up
    top = peak(policy.tile, gate_up)
    plan = StepPlan(policy, list(sizes.kinds), [False] * len(sizes.kinds), top=top)
    plan.working = top - sizes.gradients
    # [Rung 3] Layers that keep all.
    if settings.plain == "auto":
        # The allocator reserves about a widest tensor, a gate, beyond what is allocated.
        _keep_last_layers(plan, sizes, kinds, tokens, room - sizes.sure * able.gate_up / 2 * tokens)
        plan.policy = policy = replace(policy, plain=sum(plan.keeps_all))
    tiled = sum(kind is not None for kind in sizes.kinds) - policy.plain
    count = min(tiled, sent_in_time(sizes, able, tokens, tiled)) if gate_up else 0
    if count > 0:
        # The layers below these keep nothing.
        plan.policy = replace(policy, keep=len(sizes.kinds) - policy.plain - tiled + count)
    return plan


def _keep_last_layers(
    plan: StepPlan, sizes: StepSizes, kinds: dict, tokens: int, room: float
) -> None:
    """Lets the last layers keep all, as many as fit. Of a kind that never did, one is tried.

    Backward begins at the last layer: from there on kept bytes become fewer and gradients more. So
    two peaks decide: `at_turn`, between forward and backward, with what all these layers keep; and
    `at_end`, in the backward of the lowest of them, with its own bytes beside all gradients. Bytes
    count from those as the step began; loss, after and need from those as the forward ended.
    """
    stands = sizes.stands.most(tokens)
    loss = sizes.loss.most(tokens)
    after = sizes.after.most(tokens)
    kept = walk = 0.0
    tiled_above = 0.0  # bytes in the backward of a tiled layer, while lower ones keep theirs
    tried = set()
    for index in range(len(sizes.kinds) - 1, -1, -1):
        name = sizes.kinds[index]
        if name is None:
            continue
        kind = kinds[name]
        # Nothing is known of this kind, or one layer of it is tried already: the layer stays tiled.
        if not kind.cost or kind.kept is None and name in tried:
            tiled_above = plan.working
            continue
        tried.add(name)
        kept += kind.cost * tokens
        walk = max(walk, kind.walk * tokens)
        need = max(loss, after + max(walk, tiled_above))
        at_turn = stands + kept + need
        at_end = sizes.gradients + kind.cost * tokens + walk
        if max(at_turn, at_end) > room:
            break
        plan.keeps_all[index] = True
        plan.need = need
        plan.top = max(plan.top, at_turn, at_end)


def sent_in_time(sizes: StepSizes, able: Abilities, tokens: int, tiled: int) -> int:
    """How many layers can send gate and up to the host while the forward computes."""
    if not sizes.seconds.points or not able.link:
        return 0
    most = sizes.seconds.least(tokens) * able.link
    if able.host is not None:
        most = min(most, HOST_SHARE * able.host, PINNED_MOST)
    return max(0, int((most - tiled * able.checkpoint * tokens) / (able.gate_up * tokens)))
