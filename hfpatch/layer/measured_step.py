"""One forward of the layers and its backward, as the meter sees them (meter.py)."""

from dataclasses import dataclass, field

from hfpatch.budget.measured import StepPlan, StepSizes
from hfpatch.layer.gauge import Counters


@dataclass
class MeasuredForward:
    """A step's forward of the layers, as it is measured.

    Attributes:
        room: bytes that the sources of copies may take while the current layer runs.
        open: (index, kind, bytes that stood) of a layer that keeps all and runs now.
        kept: bytes that layers kept that keep all. clocks: events as it began and ended.
        ends: the counters as it ended.
        kinds: of the layers that ran, None for one that keeps nothing.
    """

    room: int = 0
    open: tuple | None = None
    kept: float = 0.0
    clocks: list = field(default_factory=list)
    ends: Counters | None = None
    kinds: list = field(default_factory=list)


@dataclass
class MeasuredBackward:
    """A step's backward of the layers, as it is measured.

    Attributes:
        began: the counters as it began. within: the backward of a layer runs that keeps little.
        top: the most bytes seen in a tiled layer's backward, 0 once they are noted; exact: torch's
            counter rose there.
    """

    began: Counters | None = None
    within: bool = False
    top: int = 0
    exact: bool = False


@dataclass(eq=False)
class Step:
    """One forward of the layers and its backward: what is planned, and what is measured.

    Attributes:
        key: of its StepSizes. tokens: of its batch. base: the counters as it began; last: the last read.
        limit: the most bytes that can be allocated; coming: of gradients that do not exist yet.
        plan: of its layers; tokens is 0 until one was made. kept_all: whether each layer did.
        over: its backward needs no more memory.
    """

    meter: object  # meter.Meter
    key: str
    base: Counters
    last: Counters
    limit: int
    plan: StepPlan
    tokens: int = 0
    kept_all: list = field(default_factory=list)
    coming: int = 0
    over: bool = False
    forward: MeasuredForward = field(default_factory=MeasuredForward)
    backward: MeasuredBackward = field(default_factory=MeasuredBackward)

    @property
    def sizes(self) -> StepSizes:
        return self.meter.sizes[self.key]

    @property
    def planned(self) -> float:
        """The most bytes that the step is planned to take, 0 if nothing was measured."""
        return self.plan.top and self.base.allocated + self.plan.top

    @property
    def first(self) -> int | None:
        """The first layer that keeps something: its backward is the last."""
        return next((i for i, kind in enumerate(self.forward.kinds) if kind is not None), None)
