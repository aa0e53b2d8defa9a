"""Measures a model's steps, and decides from that which layers of the next one keep everything.

All counters but `host` (gauge.py) are the caching allocator's own. They are read on the host, which
waits for nothing, where bytes change hands. They are never reset, because torch's peak belongs to
the user:

    a layer's forward begins      what the layer before kept, if it keeps all
    the last one's forward ends   what stands then
    a layer's backward begins     first: what the loss took; last: all gradients
    a tile's graph                what its tokens keep, and what their backward takes beside it

A peak is exact if torch's counter rose meanwhile. Otherwise it lies between the samples and that
counter, and an earlier measurement stays.

The plan of a step is made as it begins (budget/measured.py). Each layer that it lets keep all
is checked again as it begins, against what is allocated by then: other people's tensors, an
optimizer's states or a wrong belief then cost speed, and no step.
"""

import weakref
from dataclasses import asdict, replace

from hfpatch.budget.free import to_come
from hfpatch.budget.limits import GiB, gib
from hfpatch.budget.measured import (
    SURE,
    UNSURE,
    Abilities,
    Kind,
    Line,
    StepPlan,
    StepSizes,
    climb,
    tile_bytes,
)
from hfpatch.budget.policy import LEAST, LOSS_WORKSPACE, TILES, Checkpointing
from hfpatch.compat import autocast_dtype
from hfpatch.layer.gauge import Counters, Gauge
from hfpatch.layer.measured_step import Step
from hfpatch.store.device import seconds_between

COPIES = 2  # the sources of copies of so many layers may stay while later layers run


class Meter:
    """What one model's steps on one device have shown.

    Attributes:
        gauge: the device's counters; parameters: a function that returns the model's parameters.
        trained: number of trained values. kinds: name -> Kind; sizes: key -> StepSizes.
        step: the last one that began; steps: those whose graph lives.
        reserve: bytes more to leave free, after memory ran out or was short.
        tile_most: the largest tile, after memory ran out in a step that kept the least.
        reached: the most bytes that a step was planned to take.
        highest: the most bytes that were read as allocated; gaps: Counters.gaps about there.
        why: why the next step keeps less, until a line has said so.
    """

    def __init__(self, gauge: Gauge, parameters, n_layers: int):
        self.gauge = gauge
        self.parameters = parameters
        self.n_layers = n_layers
        self.kinds: dict[str, Kind] = {}
        self.sizes: dict[str, StepSizes] = {}
        self.card = gauge.card()
        self.step: Step | None = None
        self.steps: weakref.WeakSet[Step] = weakref.WeakSet()
        self.reserve = self.reached = self.highest = self.gaps = self.trained = 0
        self.tile_most = TILES[-1]
        self.why = ""

    # -- a step begins -----------------------------------------------------------------------------
    def begin(self) -> None:
        """The stack's forward begins."""
        now = self._read()
        if self.step is not None:
            self._close(self.step, now)
        self.step = None  # a step whose graph is gone is not in `steps` from here on
        parameters = list(self.parameters() or ())
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)
        coming = to_come(parameters, self.gauge.device)
        dtype = autocast_dtype(self.gauge.device.type)
        waiting = sum(not s.over for s in self.steps)
        # A step that makes the gradients, or one that adds to them.
        key = f"{self.trained} {dtype} {'first' if coming else 'more'} {waiting}"
        self.sizes.setdefault(key, StepSizes())
        plan = StepPlan(LEAST, keeps_all=[False] * self.n_layers)
        self.step = Step(self, key, now, now, self.gauge.limit(), plan, coming=coming)
        self.step.forward.kinds = [None] * self.n_layers
        self.step.kept_all = [False] * self.n_layers

    def _close(self, step: Step, now: Counters) -> None:
        """The next step begins: what this one showed about memory that ran out."""
        if not step.over:
            step.last = now
        if step.backward.top:
            self._note_tiled_peak(step, None)
        clocks = step.forward.clocks
        took = seconds_between(*clocks) if len(clocks) == 2 else None
        # Registering host memory with the driver takes longer than the forward.
        if took and now.host == step.base.host:
            step.sizes.seconds.put(step.tokens, took)
        ran_out = step.last.ooms > step.base.ooms
        # The first step that takes so much makes the allocator give back segments it had cached.
        again = step.planned <= self.reached and step.last.retries > step.base.retries
        self.reached = max(self.reached, step.planned)
        if ran_out or again:
            self.keep_less(step, ran_out)
        elif sum(step.kept_all) > 1 and step.backward.began is not None:
            step.sizes.sure = True

    def keep_less(self, step: Step, ran_out: bool) -> None:
        """Memory ran out in a step, or the allocator gave back what it had cached."""
        self.why = "memory was short"
        more = SURE * self.card
        if ran_out:
            self.why = "memory ran out"
            names = [kind for kind, yes in zip(step.forward.kinds, step.kept_all) if yes]
            kept = sum(self.kinds[name].cost for name in names) * step.tokens
            # Assume that this step was too large by a tenth of the card, or by half of what layers
            # kept. Plans reach `limit - share - reserve` at most.
            next_peak = (step.planned if kept else step.limit) - max(UNSURE * self.card, kept / 2)
            more = step.limit - step.plan.share * self.card - next_peak
            if not kept and step.tokens:
                self.tile_most = max(TILES[0], step.plan.policy.tile // 2)
        self.reserve = max(self.reserve, int(more))

    def _measured_like(self, step: Step) -> StepSizes | None:
        """The measured StepSizes of this step's key or of the most alike."""
        if step.sizes.measured:
            return step.sizes
        alike = step.key.rsplit(" ", 2)[0] + " "
        return next((c for k, c in self.sizes.items() if k.startswith(alike) and c.measured), None)

    def next_policy(
        self, first: Checkpointing, settings: Checkpointing, able: Abilities, tokens: int
    ):
        """Plans the step that begins, and returns its policy. first: that of a step of which
        nothing is known.
        """
        step = self.step
        sizes = self._measured_like(step)
        step.tokens = tokens
        if settings.tile == "auto" and first.tile > self.tile_most:
            first = replace(first, tile=self.tile_most)
        plan = StepPlan(first, keeps_all=[False] * self.n_layers)
        if sizes is not None:
            own = sizes is step.sizes
            share = UNSURE
            if own and sizes.sure:
                share = min(UNSURE, SURE + self.gaps / self.card)
            room = step.limit - step.base.allocated - share * self.card - self.reserve
            if not own:
                room -= step.coming
            plan = climb(first, sizes, self.kinds, settings, able, tokens, room, self.tile_most)
            plan.share = share
            if settings.aim != "least":
                plan.ahead = COPIES * (able.checkpoint + able.gate_up) * tokens
        plan.gate_up = able.gate_up
        step.plan = plan
        return plan.policy

    def agree_on(self, policy: Checkpointing) -> None:
        """The step runs as other ranks do, whatever is allocated as its layers begin."""
        plan = self.step.plan
        plan.policy = policy
        plan.same_on_all_ranks = True
        plan.keeps_all = [i >= self.n_layers - policy.plain for i in range(self.n_layers)]

    def free(self) -> int:
        """Bytes of the device that a first step may take, beside its gradients and an optimizer's
        states of their size."""
        return self.step.limit - self.step.base.allocated - 2 * self.step.coming

    def _read(self) -> Counters:
        """The counters now. Gaps count where about the most is allocated."""
        now = self.gauge.read()
        self.highest = max(self.highest, now.allocated)
        if now.allocated > 0.95 * self.highest:
            self.gaps = max(self.gaps, now.gaps)
        return now

    def words(self) -> str:
        """What the planned step takes, for the line of a policy."""
        if not any(self.step.plan.keeps_all) or self.step.planned > self.step.limit:
            return ""
        most = self.step.planned / GiB
        untried = any(self.tries(i, kind) for i, kind in enumerate(self.step.plan.kinds))
        return f"; {'at most ' * untried}{most:.1f} of {gib(self.step.limit)} of the device"

    # -- forward -----------------------------------------------------------------------------------
    def tries(self, index: int, kind: str | None) -> bool:
        """Whether a layer is planned to keep all whose kind never did.

        What it keeps is measured without sources of copies. The first layer's input is one that
        outlives its copy, as the model's own forward holds it: it would be counted here.
        """
        return self.step.plan.keeps_all[index] and self.kinds.get(kind, Kind()).kept is None

    def layer_begins(self, index: int, kind: str | None, waiting: int) -> bool:
        """A layer's forward begins. Returns whether it keeps all.

        waiting: bytes of the sources of copies, which are freed when their memory is needed.
        """
        step = self.step
        now = step.last = self._read()
        solid = now.allocated - waiting
        self._note_kept(solid)
        if not step.forward.clocks:
            step.forward.clocks.append(self.gauge.clock())
        step.forward.kinds[index] = kind
        limit = step.limit - step.plan.share * self.card - self.reserve
        if kind is not None:
            known = self.kinds.setdefault(kind, Kind())
            known.longest = max(known.longest, step.tokens)
            if step.plan.keeps_all[index] and self._keeps_all(index, kind, solid, limit):
                return True
        # Beside a tiled layer: solid + sources + plan.working <= limit. Sources take more than
        # `plan.ahead` only below the step's planned peak, which comes later.
        takes = solid + step.plan.working
        most = max(step.plan.ahead, step.planned - takes)
        step.forward.room = max(0, int(min(most, limit - takes)))
        return False

    def _keeps_all(self, index: int, kind: str, solid: int, limit: float) -> bool:
        """Whether a layer that is planned to keep all may do so now:

            solid + bytes that it and the later ones keep + plan.need <= limit

        Then the sources of copies may take what is left, below the step's planned peak.
        """
        step = self.step
        plan = step.plan
        planned = zip(plan.kinds[index + 1 :], plan.keeps_all[index + 1 :])
        later = (self.kinds[name].cost for name, keeps_all in planned if keeps_all)
        kept = solid + (self.kinds[kind].cost + sum(later)) * step.tokens
        left = limit - kept - plan.need
        if (left < 0 or not self.kinds[kind].cost) and not plan.same_on_all_ranks:
            plan.keeps_all[index] = False
            return False
        step.forward.open = (index, kind, solid)
        step.kept_all[index] = True
        below_peak = step.planned - kept if step.planned else left
        # Where the layers just before sent no gate and up, no such copy is under way: its sources
        # would only leave holes between what this layer keeps.
        unsent = plan.gate_up * (plan.policy.keep <= index - COPIES)
        ahead = plan.ahead - COPIES * unsent * step.tokens
        step.forward.room = max(0, int(min(ahead, left, below_peak)))
        return True

    def _note_kept(self, solid: int) -> None:
        """Notes what the layer that ran last has kept, if it keeps all."""
        step = self.step
        if step.forward.open is None:
            return
        index, name, before = step.forward.open
        step.forward.open = None
        kept = max(0, solid - before)
        # the first one keeps its input, which later ones share with the layer before
        kind = self.kinds[name]
        if kind.kept is None or any(step.kept_all[:index]) and step.tokens >= kind.kept[1]:
            kind.kept = [kept / step.tokens, step.tokens]
        step.forward.kept += kept

    def forward_ended(self) -> None:
        """The forward of the last layer has ended; no copy's source is left."""
        step = self.step
        now = step.forward.ends = step.last = self._read()
        self._note_kept(now.allocated)
        sizes = step.sizes
        sizes.kinds = list(step.forward.kinds)
        sizes.stands.put(
            step.tokens, max(0, now.allocated - step.base.allocated - step.forward.kept)
        )
        step.forward.clocks[1:] = [self.gauge.clock()]
        self.steps.add(step)

    # -- backward ----------------------------------------------------------------------------------
    def backward_keeping_all(self, step: Step, index: int, _grad) -> None:
        """Tensor hook: the backward of a layer that keeps all begins."""
        self.layer_backward_begins(step, keeps_all=True)
        step.over = step.over or index == step.first

    def layer_backward_begins(self, step: Step, keeps_all: bool = False) -> Counters:
        """A layer's backward begins."""
        now = self._read()
        if step.backward.within and now.peak > step.last.peak:
            step.backward.top = now.peak
            step.backward.exact = True
        step.last = now
        step.backward.within = not keeps_all
        if step.backward.began is None and step.forward.ends is not None:
            step.backward.began = now
            self._note_loss(step, now)
        return now

    def _note_loss(self, step: Step, now: Counters) -> None:
        """Notes what was allocated at most between the layers' forward and their backward."""
        sizes = step.sizes
        ends = step.forward.ends
        stood = max(0, now.allocated - ends.allocated)
        sizes.after.put(step.tokens, stood)
        most = now.peak - ends.allocated  # at the most, if the counter did not rise
        if now.peak <= ends.peak:
            if sizes.loss.points:
                most = min(most, sizes.loss.most(step.tokens))
            elif now.peak <= step.base.peak:
                # Sums in float32 and the loss's workspace come in addition to what it leaves.
                most = min(most, 3 * stood + 2 * LOSS_WORKSPACE)
        sizes.loss.put(step.tokens, max(most, stood))

    def layer_backward_ended(self, step: Step, before: Counters, first: bool) -> None:
        """A tiled layer's backward has ended. first: it was the first layer's."""
        now = step.last = self._read()
        step.backward.within = False
        if now.peak > before.peak:
            step.backward.top = now.peak
            step.backward.exact = True
        elif not step.backward.exact:
            step.backward.top = max(step.backward.top, now.allocated, before.allocated)
        if first:
            self._note_tiled_peak(step, now)

    def _note_tiled_peak(self, step: Step, now: Counters | None) -> None:
        """Notes the most bytes in the backward of tiled layers, as that of the first layer has ended.
        now: the counters, None if that end was not seen.
        """
        sizes = step.sizes
        base = step.base.allocated
        top = step.backward.top
        step.backward.top = 0
        step.over = True
        if now is not None:
            sizes.gradients = max(0, now.allocated - base)
        if not step.backward.exact:
            if sizes.tiled.points:
                return
            if step.last.peak > step.base.peak:
                top = step.last.peak
            else:  # scratch of kernels was not sampled
                top += (top - base) // 4
        gates = step.plan.gate_up if step.plan.policy.keep > 0 else 0
        tile = tile_bytes(sizes, self.kinds, min(step.plan.policy.tile, step.tokens), gates)
        sizes.tiled.put(step.tokens, max(0, top - base - sizes.gradients - tile))

    # -- what a later run may begin with -----------------------------------------------------------
    def state(self) -> dict:
        return {
            "kinds": {name: asdict(kind) for name, kind in self.kinds.items()},
            "sizes": {key: asdict(sizes) for key, sizes in self.sizes.items() if sizes.measured},
            "reserve": self.reserve / self.card, "tile_most": self.tile_most,
        }  # fmt: skip

    def load(self, state: dict) -> None:
        """Takes a state of before. Nothing of this meter's own is measured yet."""
        for name, kind in state["kinds"].items():
            self.kinds.setdefault(name, Kind(**kind))
        for key, sizes in state["sizes"].items():
            lines = {n: Line(v["points"]) if isinstance(v, dict) else v for n, v in sizes.items()}
            self.sizes[key] = StepSizes(**lines | {"sure": False})
        self.reserve = max(self.reserve, int(state["reserve"] * self.card))
        self.tile_most = min(self.tile_most, state["tile_most"])
