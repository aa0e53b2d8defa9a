"""A simulated step of a few layers, measured as a run measures its own (layer/meter.py)."""

from hfpatch.budget.measured import Abilities
from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.shallow import trained_bytes_of
from hfpatch.layer.gauge import Counters
from hfpatch.layer.meter import COPIES, Meter
from hfpatch.layer.traits import layers_in


class LedgerGauge:
    """What layer/gauge.py reads of a card, read of the followed storages instead.

    Attributes:
        timer: the ClockDevice, with the follower of the storages.
        missing: bytes of the gradients of layers that the step does not have, once it went back
            through its last layer.
    """

    def __init__(self, clock):
        self.device = clock.device
        self.timer = clock
        self.missing = 0
        self.top = 0

    @property
    def follower(self):
        return self.timer.follower

    def read(self) -> Counters:
        now = self.follower.alive + self.missing
        self.top = max(self.top, now, self.follower.top + self.missing)
        return Counters(now, self.top)

    def limit(self) -> int:
        return 1 << 60

    card = limit

    def clock(self) -> float:
        return self.timer.compute.now


class StepMeter(Meter):
    """Measures one step of a few layers under a given policy, as a run measures its own.

    Attributes:
        able: what the layers can do.
        gradients: bytes of those of all layers.
        ahead: a pair: bytes per token that the sources of copies may take while a tiled layer runs,
            and while one that keeps all does; None: those of two layers, and the room of gradients,
            which come after the forward.
    """

    def __init__(self, gauge: LedgerGauge, model, gradients: int, kinds: dict, ahead: tuple):
        super().__init__(gauge, model.parameters, len(layers_in(model)))
        self.gradients = gradients
        self.kinds = kinds
        self.able = Abilities()
        self.ahead = ahead
        self.own = min(gradients, trained_bytes_of(model))

    def next_policy(self, first: Checkpointing, settings, able: Abilities, tokens: int):
        self.able = able
        self.step.tokens = tokens
        self.agree_on(first)
        plan = self.step.plan
        plan.gate_up = able.gate_up
        plan.ahead = max(self.own, COPIES * tokens * (able.checkpoint + able.gate_up))
        if self.ahead[0] is not None:
            plan.ahead = self.ahead[0] * tokens
        return first

    def layer_begins(self, index: int, kind: str | None, waiting: int) -> bool:
        keeps_all = super().layer_begins(index, kind, waiting)
        if keeps_all and self.ahead[1] is not None:
            self.step.forward.room = min(self.step.forward.room, self.ahead[1] * self.step.tokens)
        return keeps_all

    def layer_backward_begins(self, step, keeps_all: bool = False) -> Counters:
        if step.backward.began is not None:
            self.gauge.missing = self.gradients - self.own
        return super().layer_backward_begins(step, keeps_all)
