"""Evaluates a run: the policy that its steps settle on, bytes and seconds; the first placement that
fits; the longest sequence that fits.

A run begins with a careful policy (budget/first.py) and climbs by what its steps show
(budget/measured.py). Here the same functions read simulated steps.
"""

import math
from dataclasses import replace
from functools import lru_cache

from hfpatch.budget.first import first_policy, step_bytes
from hfpatch.budget.measured import HOST_SHARE, SURE, UNSURE, StepSizes, climb, rounded
from hfpatch.budget.policy import Checkpointing, describe
from hfpatch.lab.hardware import DISK, SECONDS_ERROR
from hfpatch.lab.shallow import model_of
from hfpatch.lab.steps import Cost, Steps
from hfpatch.layer.meter import COPIES
from hfpatch.planner import float8
from hfpatch.planner.answer import (
    PROCESS_BYTES,
    Run,
    assembled,
    gradients_of,
    gradients_stand,
    optimizer_seconds,
    stays_of,
)
from hfpatch.planner.placements import PLACEMENTS, candidates
from hfpatch.planner.result import Advice, Plan

# `ahead` is a pair: bytes per token that the sources of copies may take while a tiled layer runs, and
# while one that keeps all does. None: they need not wait for memory (lab.steps.FREE). In a first step
# copies let go of their sources as each layer ends.
NONE = (0, 0)
STEPS = 8  # the most steps after which a policy settles
SETTLED = "settled"
FIRST = "first"
GLANCE = "glance"
LONGEST = 1 << 24  # tokens
WAITS = (
    "in mixers a GPU waits for those that have the tokens before its own, which the seconds leave "
    "out"
)


_steps = lru_cache(maxsize=16)(Steps)  # placements, lengths and host memory share simulated steps


def steps_of(run: Run, placement: str) -> Steps:
    wide = PLACEMENTS[placement].itemsize == 4  # under autocast
    model = model_of(run.model.config, run.model.adapters, wide) if wide else run.model
    # GPUs of a machine share its disk, and nothing else that a step's own seconds depend on
    gpu = replace(run.gpu, memory_bytes=0, sharing=run.gpus if run.on_disk else 1)
    # an engine's gradients are elsewhere, or in buffers that it counts
    accumulates = run.accumulates and stays_of(run, placement, run.checkpointing).gradients is None
    return _steps(model, run.shape, gpu, run.batch, accumulates, run.stock)


@lru_cache(maxsize=256)
def evaluate(run: Run, placement: str, way: str = SETTLED) -> Plan:
    """The plan under one placement, of the policy that stays, or of a run's first step, which takes
    the least. GLANCE tells the first step's bytes alone."""
    if PLACEMENTS[placement].itemsize == 4:  # gradients of float32 weights are no bfloat16
        run = replace(run, shape=replace(run.shape, trained_bytes=2 * run.shape.trained_bytes))
    if run.checkpointing.offload == "off":
        return _plan_of(
            run, placement, run.checkpointing,
            steps_of(run, placement).cost(run.seq_len, run.checkpointing),
        )  # fmt: skip
    return Ladder(run, placement).plan(way)


class Ladder:
    """The policies of a run's steps under one placement, from the first to the one that stays."""

    def __init__(self, run: Run, placement: str):
        self.run = run
        self.placement = placement
        self.steps = steps_of(run, placement)
        self.tokens = run.batch * run.seq_len
        sharded = PLACEMENTS[placement].sharded
        settings = run.checkpointing
        if settings.every == "auto" and sharded:
            settings = replace(settings, every=1)
        # DeepSpeed's buckets need gradients in one order on all ranks.
        if settings.plain == "auto" and run.gpus > 1 and placement.startswith("zero3"):
            settings = replace(settings, plain=0)
        self._begin(settings)
        alone = run.ranks == 1 and not sharded and run.shape.adapters
        needed = step_bytes(self.first, **self._sizes(self.tokens))
        if alone and settings.frozen_weights == "auto" and needed > self._first_free():
            self._begin(replace(settings, frozen_weights="host"))

    def _begin(self, settings: Checkpointing) -> None:
        if settings.frozen_weights == "host":
            settings = replace(settings, plain=0)
        self.settings = settings
        self.stays = stays_of(self.run, self.placement, settings)
        self.first = self._first()

    def _sizes(self, tokens: int) -> dict:
        return {
            "tokens": tokens, "width": self.run.shape.embedding[1],
            "itemsize": PLACEMENTS[self.placement].itemsize,
        }  # fmt: skip

    def _free(self) -> int:
        """Free bytes of the device, without gradients and optimizer states."""
        tower = self.run.tower
        held = int(tower.cost(self.run).numbers["held"]) if tower else 0
        return max(0, self.run.gpu.usable_bytes - self.stays.parameters - held)

    def _host(self) -> int | None:
        """Free bytes of the host for a process's checkpoints."""
        if self.run.host is None:
            return None
        usable = (HOST_SHARE * self.run.host - self.stays.host) / self.run.gpus - PROCESS_BYTES
        return max(0, int(usable / HOST_SHARE))

    def _first_free(self) -> int:
        """As layer/meter.py's Meter.free, which cannot know that gradients will not all exist."""
        coming = gradients_of(self.run, self.stays)
        if PLACEMENTS[self.placement].fused:
            coming = self.run.shape.trained_bytes
        return max(0, self._free() - 2 * coming)

    def _first(self) -> Checkpointing:
        run = self.run
        sizes = {
            **self._sizes(run.batch * rounded(run.seq_len)), "layers": run.shape.num_layers,
            "chains": run.shape.carries_states and run.ranks == 1,
            "card": run.gpu.memory_bytes, "free": self._first_free()
        }  # fmt: skip
        try:
            return first_policy(self.settings, **sizes, host=self._host())
        except ValueError:  # the host cannot hold it, which the plan says
            return first_policy(self.settings, **sizes)

    def plan(self, way: str) -> Plan:
        """The plan of the policy that the steps settle on; with FIRST and GLANCE, of the first one."""
        # [Step 1] The policy that the steps settle on, or the first one.
        policy, ahead = self._after(STEPS if way == SETTLED else 0)
        found = self._answer(policy, ahead, way != GLANCE)
        # [Step 2] One that does not fit keeps less.
        while way == SETTLED and policy.plain > self.first.plain and not found.fits:
            policy = replace(policy, plain=policy.plain - 1)
            found = self._answer(policy, ahead)
        if self.run.host is None or way != GLANCE:
            return found
        # A glance simulates two layers or more and multiplies their host memory. A gradient that
        # waits there once, at most one tensor [rows, width], is multiplied too.
        tensor = math.prod(self._sizes(self.tokens).values())  # bytes
        most = self.run.gpus * self.run.shape.num_layers // 2 * tensor
        short = found.host.peak_bytes - found.host.usable_bytes
        return self.plan(FIRST) if 0 < short <= most else found

    def _answer(self, policy: Checkpointing, ahead: tuple, deep: bool = True) -> Plan:
        cost = self.steps.cost(self.run.seq_len, policy, ahead, deep)
        return _plan_of(self.run, self.placement, policy, cost)

    def _after(self, steps: int) -> tuple[Checkpointing, tuple]:
        """The policy after so many simulated steps, or the one that stays, and the bytes per token
        that sources of copies may take under it."""
        policy = self.first
        ahead = NONE
        sizes = StepSizes()
        for _ in range(steps):
            # [Step 1] What a step under this policy shows.
            cost = self.steps.cost(self.run.seq_len, policy, ahead, False)
            if not cost.kinds:
                break
            self._note(sizes, cost)
            # [Step 2] What the next one does. A run tries one layer of each kind alone.
            found = self._next(sizes, cost)
            unknown = any(k is not None and self.steps.kinds[k].kept is None for k in sizes.kinds)
            if any(found.keeps_all) and unknown:
                self.steps.try_keeping_all(self.run.seq_len, policy, ahead)
                found = self._next(sizes, cost)
            then = (found.policy, found.policy.plain > 1, self._ahead(sizes, cost, found))
            if then == (policy, sizes.sure, ahead):
                break
            policy, sizes.sure, ahead = then
        return policy, ahead

    def _note(self, sizes: StepSizes, cost: Cost) -> None:
        """Notes what a step showed, as layer/meter.py does."""
        first = self.steps.model.first
        period = max(1, self.steps.model.period)
        layers = range(self.run.shape.num_layers)
        sizes.kinds = [cost.kinds[min(i, first + (i - first) % period)] for i in layers]
        sizes.gradients = gradients_of(self.run, self.stays) - self._earlier()
        measured = sizes.measured
        loss = min(cost.loss, sizes.loss.most(self.tokens)) if measured else cost.loss
        sizes.stands.put(self.tokens, cost.stands)
        sizes.after.put(self.tokens, cost.after)
        sizes.seconds.put(self.tokens, cost.layers_forward)
        sizes.loss.put(self.tokens, loss)
        if cost.exact or not measured:
            sizes.tiled.put(self.tokens, cost.tiled)

    def _next(self, sizes: StepSizes, cost: Cost):
        """The next step's budget.measured.StepPlan."""
        able = replace(cost.able, host=self._host(), link=self.run.gpu.link_rate)
        return climb(
            self.first, sizes, self.steps.kinds, self.settings, able, self.tokens,
            self._room(sizes.sure),
        )  # fmt: skip

    def _room(self, sure: bool) -> float:
        share = (SURE if sure else UNSURE) * self.run.gpu.memory_bytes
        return self._free() - self._earlier() - self.stays.optimizer - share

    def _earlier(self) -> int:
        """Bytes of the gradients that exist as a step begins."""
        return (
            gradients_of(self.run, self.stays) if gradients_stand(self.run, self.placement) else 0
        )

    def _ahead(self, sizes: StepSizes, cost: Cost, found) -> tuple:
        """Bytes per token that the sources of copies may take while tiled layers run and while
        ones that keep all do, as layer/meter.py has them; None where they need not wait for memory."""
        room = self._room(any(found.keeps_all))
        if self.settings.aim == "least":  # no more than its backward takes
            room = min(room, found.top)
        tiled = room - found.working - sizes.stands.most(self.tokens)
        enough = COPIES * (cost.able.checkpoint + cost.able.gate_up)

        # Rounded down, so that nearly equal rooms share one simulated step and the policy settles.
        def each(spare: float) -> int | None:
            most = max(0, int(spare / self.tokens))
            return None if most >= enough else most // 8192 * 8192

        return each(tiled), each(min(room - found.top, found.need))


def _plan_of(run: Run, placement: str, policy: Checkpointing, cost: Cost) -> Plan:
    """The plan of a simulated step."""
    layers = run.shape.num_layers
    tiled = policy.offload != "off"
    keeps = describe(policy, layers) if tiled else run.stock or "off"
    untiled = round(sum(cost.whole.values())) if tiled else 0
    reasons = ", ".join(cost.whole)
    counted = policy  # what bytes and seconds follow from
    if untiled == layers:
        tiled = False
        keeps = f"layers run untiled ({reasons}), their inputs to {policy.tier}"
        counted = Checkpointing("off")
    notes = (
        (True, "simulated on few layers"),
        (tiled and untiled, f"{untiled} of {layers} layers run untiled ({reasons})"),
        (
            run.shape.carries_states,
            "mixers run in plain code, which takes more memory than their kernels do",
        ),
        (run.shape.carries_states and run.ranks > 1, WAITS),
        (tiled and run.on_disk, f"checkpoints wait in files, on {DISK}"),
        (
            steps_of(run, placement).carried_on(run.seq_len, counted),
            "extrapolated from shorter rows",
        ),
        (run.gpu.float8 > 1, float8.SAID),
    )
    advice = Advice(keeps, "; ".join(text for holds, text in notes if holds))
    return replace(assembled(run, placement, counted, advice, cost), policy=policy)


def best(run: Run, names, way: str = SETTLED) -> Plan:
    """The plan of the first placement that fits, else of the one that lacks the fewest bytes."""
    plans = []
    for name in names:
        plans.append(evaluate(run, name, GLANCE))
        if plans[-1].fits:
            found = evaluate(run, name, way)
            return found if found.fits else evaluate(run, name, FIRST)
    return evaluate(run, max(plans, key=_room).run.placement, GLANCE if way == GLANCE else FIRST)


def possible(run: Run, names) -> list[str]:
    """The placements whose weights, gradients and optimizer states leave room on the GPU and the
    host."""
    settings = run.checkpointing
    if settings.offload != "off" and settings.frozen_weights == "auto" and run.ranks == 1:
        settings = replace(settings, frozen_weights="host")
    found = []
    for name in names:
        stays = stays_of(run, name, settings)
        on_gpu = stays.parameters + stays.optimizer + gradients_of(run, stays)
        on_host = stays_of(run, name, run.checkpointing).host + run.gpus * PROCESS_BYTES
        most = math.inf if run.host is None else HOST_SHARE * run.host
        if on_gpu < run.gpu.usable_bytes and on_host <= most:
            found.append(name)
    return found


def faster(run: Run, plan: Plan, names) -> dict:
    """Advice.faster: the first placement after the plan's that fits and is faster by more than the
    plan's error."""
    enough = (1 - SECONDS_ERROR) * plan.time.step_seconds
    # At best nothing runs again, which is at most a third of all but attention, and no copy waits.
    again = plan.time.parts["matmul"] + plan.time.parts["elementwise"]
    least = plan.time.parts.get("attention", 0.0) + again * 2 / 3
    for name in names[names.index(plan.run.placement) + 1 :]:
        optimizer = optimizer_seconds(run, stays_of(run, name, run.checkpointing))
        if least + optimizer >= enough or not evaluate(run, name, GLANCE).fits:
            continue
        found = evaluate(run, name)
        if found.fits and found.time.step_seconds < enough:
            return {"placement": name, "step_seconds": found.time.step_seconds}
    return {}


def _room(plan: Plan) -> int:
    """The free bytes of the GPU or of the host, whichever has fewer. Negative if bytes are
    lacking."""
    gpu = plan.gpu.usable_bytes - plan.gpu.peak_bytes
    usable = plan.host.usable_bytes
    return gpu if usable is None else min(gpu, usable - plan.host.peak_bytes)


def longest(run: Run, names, progress=None) -> int:
    """The longest sequence that fits, to a thirtieth; 0 if none does.

    progress: called with each length that is tried.
    """
    names = possible(run, names)
    room: dict[int, int] = {}  # tokens -> free bytes of the first step, negative if it lacks some
    tokens = run.seq_len * run.ranks
    low = 0
    high = LONGEST if names else 0
    while high - low > max(1024, low // 32) and tokens not in room:
        if progress:
            progress(tokens)
        room[tokens] = _room(best(replace(run, seq_len=-(-tokens // run.ranks)), names, GLANCE))
        low = max((n for n, left in room.items() if left >= 0), default=0)
        high = min((n for n, left in room.items() if n > low and left < 0), default=LONGEST)
        if high == LONGEST or not low:
            tokens = 2 * low or high // 2
        elif len(room) % 3:  # memory grows about linearly
            tokens = low + int((high - low) * room[low] / (room[low] - room[high]))
        else:
            tokens = (low + high) // 2
        tokens = min(max(tokens, low + 1024), high - 1) // 1024 * 1024
    return low


def placements(run: Run, placement: str) -> list[str]:
    """The placements that a plan tries: in float8 those without an engine; with several batches a
    step none that steps in backward, unless it is asked for."""
    found = [
        name
        for name in candidates(placement, run.gpus, bool(run.shape.adapters))
        if not (PLACEMENTS[name].sharded and run.gpu.float8 > 1)
        and not (PLACEMENTS[name].fused and run.accumulates and placement == "auto")
    ]
    if not found:
        raise ValueError(
            f"hfpatch: --fp8 is planned without an engine, got --gpus {run.gpus} --placement "
            f"{placement}. Pass --gpus 1 with --placement auto, or leave --fp8 out."
        )
    return found
