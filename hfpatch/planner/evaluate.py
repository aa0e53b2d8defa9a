"""Evaluates a run: the policy that its steps settle on, bytes and seconds; the first placement that
fits; the longest sequence that fits.

A run begins with a careful policy (budget/first.py) and climbs by what its steps show
(budget/measured.py). Here the same functions read simulated steps.
"""

from dataclasses import replace
from functools import lru_cache

from hfpatch.budget.first import first_policy, step_bytes
from hfpatch.budget.hardware import DISK, SECONDS_ERROR
from hfpatch.budget.measured import (
    SURE,
    UNSURE,
    Call,
    Layers,
    climb,
    rounded,
)
from hfpatch.budget.policy import Policy
from hfpatch.lab.simulate.fla import installed
from hfpatch.layer.meter import COPIES
from hfpatch.planner.answer import (
    FLOAT8,
    PROCESS_BYTES,
    WHOLE,
    Run,
    assembled,
    stays_of,
)
from hfpatch.planner.model import model_of
from hfpatch.planner.placements import candidates, placement_named
from hfpatch.planner.result import Plan
from hfpatch.planner.step import Cost, Steps

STEPS = 8  # the most steps after which a policy settles
STEPS_FOR_LENGTH = 14  # steps in the search for the longest sequence; more if none fits
LONGEST = 1 << 24  # tokens
WAITS = (
    "in mixers a GPU waits for those that have the tokens before its own, which the seconds leave "
    "out"
)


@lru_cache(maxsize=16)  # placements, lengths and host memory share simulated steps
def _steps(model, sizes, gpu, batch: int) -> Steps:
    return Steps(model, sizes, gpu, batch)


def steps_of(run: Run, placement: str) -> Steps:
    wide = placement_named(placement).itemsize == 4  # under autocast
    model = model_of(run.model.config, run.model.adapters, wide) if wide else run.model
    # GPUs of a machine share its disk, and nothing else that a step's own seconds depend on
    gpu = replace(run.rates if run.on_disk else run.gpu, memory_bytes=0)
    return _steps(model, run.shape, gpu, run.batch)


def weights_at(run: Run, place: str) -> Run:
    """The run with its layers' frozen weights at `place`."""
    return replace(run, checkpointing=replace(run.checkpointing, frozen_weights=place))


@lru_cache(maxsize=256)
def evaluate(run: Run, placement: str, grows: bool = True) -> Plan:
    """The plan under one placement. grows: False for a run's first step, which takes the least."""
    if run.checkpointing in WHOLE:
        cost = steps_of(run, placement).cost(run.seq_len, run.checkpointing)
        return _said(run, placement, run.checkpointing, cost)
    return Ladder(run, placement).settled(grows)


class Ladder:
    """The policies of a run's steps under one placement, from the first to the one that stays."""

    def __init__(self, run: Run, placement: str):
        self.run, self.placement = run, placement
        self.steps, named = steps_of(run, placement), placement_named(placement)
        self.rows, self.width = run.batch * run.seq_len, run.shape.embedding[1]
        settings, change = run.checkpointing, {}
        if settings.every == "auto" and named.sharded:
            change["every"] = 1
        # DeepSpeed's buckets need gradients in one order on all ranks.
        if settings.plain == "auto" and run.gpus > 1 and placement.startswith("zero3"):
            change["plain"] = 0
        self.settings = replace(settings, **change)
        self.stays = stays_of(run, placement, self.settings)
        self.first = self._first(self.settings)
        alone = run.ranks == 1 and not named.sharded and run.shape.adapters
        if alone and settings.frozen_weights == "auto" and self._too_large():
            self.settings = replace(self.settings, frozen_weights="host")
        if self.settings.frozen_weights == "host":
            self.settings = replace(self.settings, plain=0)
            self.stays = stays_of(run, placement, self.settings)
            self.first = self._first(self.settings)

    def _sizes(self, rows: int) -> dict:
        itemsize = placement_named(self.placement).itemsize
        return {"rows": rows, "width": self.width, "itemsize": itemsize}

    def _free(self) -> int:
        """Free bytes of the device, without gradients and optimizer states."""
        run = self.run
        held = 0
        if run.tower is not None:
            held = run.tower.held(run.batch, run.checkpointing, bool(run.shape.adapters))
        return max(0, run.gpu.usable_bytes - self.stays.parameters - held)

    def _host(self) -> int | None:
        run = self.run
        if run.host is None:
            return None
        return max(0, (run.host - self.stays.host) // run.gpus - PROCESS_BYTES)

    def _first_free(self) -> int:
        """As layer/meter.py's Meter.free."""
        return max(0, self._free() - 2 * self._gradients())

    def _gradients(self) -> int:
        stays = self.stays.gradients
        return self.run.shape.trained_bytes if stays is None else stays

    def _too_large(self) -> bool:
        return step_bytes(self.first, **self._sizes(self.rows)) > self._first_free()

    def _first(self, settings) -> Policy:
        run, shape = self.run, self.run.shape
        asked = {
            **self._sizes(run.batch * rounded(run.seq_len)), "layers": shape.num_layers,
            "chains": shape.mixes and run.ranks == 1,
            "sums": 4 * shape.trained_parameters // shape.num_layers,
            "card": run.gpu.memory_bytes, "free": self._first_free(),
        }  # fmt: skip
        try:
            return first_policy(settings, **asked, host=self._host())
        except ValueError:  # the host cannot hold it, which the plan says
            return first_policy(settings, **asked)

    def settled(self, grows: bool) -> Plan:
        """The plan at the policy that stays."""
        run, policy, sure, ahead = self.run, self.first, False, 0
        # the first step's copies let go of their sources as each layer ends
        cost, call = self.steps.cost(run.seq_len, policy, ahead), Call()
        points = [_said(run, self.placement, policy, cost)]
        grows = grows and self.settings.aim == "fastest" and points[0].fits and cost.kinds
        for _ in range(STEPS if grows else 0):
            self._note(call, cost)
            found = self._next(call, cost, sure)
            if any(found.untiled) and self._unknown(call):
                # a run tries one layer of each kind alone
                self.steps.try_untiled(run.seq_len, policy, ahead)
                found = self._next(call, cost, sure)
            room, settled = self._ahead(call, cost, found), (policy, sure, ahead)
            policy, sure, ahead = found.policy, found.policy.plain > 1, room
            if settled == (policy, sure, ahead):
                break
            cost = self.steps.cost(run.seq_len, policy, ahead)
            points.append(_said(run, self.placement, policy, cost))
        keys = "gpu_peak_bytes", "step_seconds", "policy"
        frontier = [{k: getattr(p, k) for k in keys} for p in points]
        return replace(points[-1], frontier=frontier)

    def _note(self, call: Call, cost: Cost) -> None:
        """Notes what a step showed, as layer/meter.py does."""
        first, rows = not call.measured, self.rows
        layers, model = self.run.shape.num_layers, self.steps.model
        period = max(1, model.period)
        call.kinds = [
            cost.kinds[i if i < model.first else model.first + (i - model.first) % period]
            for i in range(layers)
        ]
        call.gradients = self._gradients()
        call.stands.put(rows, cost.stands)
        call.after.put(rows, cost.after)
        call.seconds.put(rows, cost.passed)
        call.loss.put(rows, cost.loss if first else min(cost.loss, call.loss.most(rows)))
        if first or cost.exact:
            call.tiled.put(rows, cost.tiled)

    def _unknown(self, call: Call) -> bool:
        kinds = self.steps.kinds
        return any(k is not None and kinds[k].kept is None for k in call.kinds)

    def _next(self, call: Call, cost: Cost, sure: bool):
        """The next step's budget.measured.Plan."""
        room = self._room(sure)
        able = Layers(cost.able.gate_up, cost.able.wide, self._host(), self.run.gpu.link_rate)
        return climb(self.first, call, self.steps.kinds, self.settings, able, self.rows, room)

    def _room(self, sure: bool) -> float:
        share = (SURE if sure else UNSURE) * self.run.gpu.memory_bytes
        return self._free() - self.stays.optimizer - share

    def _ahead(self, call: Call, cost: Cost, found) -> int | None:
        """Bytes per token that the sources of copies may take, as layer/meter.py has them; None
        where they need not wait for memory."""
        working = found.tiled - call.gradients
        spare = self._room(any(found.untiled)) - working - call.stands.most(self.rows)
        if spare >= COPIES * (cost.able.wide + cost.able.gate_up) * self.rows:
            return None
        return max(0, int(spare / self.rows)) // 1024 * 1024


def _said(run: Run, placement: str, policy, cost: Cost) -> Plan:
    """The plan of a simulated step."""
    said = []
    if isinstance(policy, Policy) and cost.whole:
        reasons, count = ", ".join(cost.whole), round(sum(cost.whole.values()))
        if count == run.shape.num_layers:
            policy = f"layers run whole ({reasons}), their inputs to {policy.offload}"
        else:
            said.append(f"{count} of {run.shape.num_layers} layers run whole ({reasons})")
    if run.shape.carries_states:
        who = "delta rules take what fla's kernels do, other mixers" if installed() else "mixers"
        said.append(f"{who} run in plain code, which takes more memory than their kernels do")
        said += [WAITS] * (run.ranks > 1)
    if isinstance(policy, Policy):
        said += [f"checkpoints wait in files, on {DISK}"] * (policy.offload == "disk")
        if steps_of(run, placement).carried_on(run.seq_len, policy):
            said.append("run on shorter rows and carried on")
    said += [FLOAT8] * (run.gpu.float8 > 1)
    why = "; ".join(["simulated on few layers", *said])
    return assembled(run, placement, policy, why, cost)


def best(run: Run, names) -> Plan:
    """The plan of the first placement that fits, else of the one that lacks the fewest bytes."""
    plans = []
    for name in names:
        plans.append(evaluate(run, name))
        if plans[-1].fits:
            return plans[-1]
    return min(plans, key=_lack)


def faster(run: Run, plan: Plan, names) -> dict:
    """Plan.faster: the first placement after the plan's that fits and is faster by more than the
    plan's error."""
    later = (evaluate(run, n) for n in names[names.index(plan.placement) + 1 :])
    enough = (1 - SECONDS_ERROR) * plan.step_seconds
    found = next((p for p in later if p.fits and p.step_seconds < enough), None)
    return {} if found is None else {n: getattr(found, n) for n in ("placement", "step_seconds")}


def _lack(plan: Plan) -> int:
    return max(0, -_room(plan))


def _room(plan: Plan) -> int:
    """The free bytes of the GPU or of the host, whichever has fewer. Negative if bytes are
    lacking."""
    gpu = plan.gpu_usable_bytes - plan.gpu_peak_bytes
    host = gpu if plan.host_usable_bytes is None else plan.host_usable_bytes - plan.host_peak_bytes
    return min(gpu, host)


def longest(run: Run, names, first: Plan, progress=None) -> int:
    """The longest sequence that fits, 0 if none does. If memory grows linearly, a few steps find it
    to a thirtieth.
    """
    least = replace(run, checkpointing=_frugal(run.checkpointing))

    def at(tokens: int) -> Plan:
        if progress:
            progress(tokens)
        return best(replace(least, seq_len=-(-tokens // run.ranks)), names)

    tried = [first, at(max(1024, int(first.seq_len * (2 if first.fits else 0.5)) // 1024 * 1024))]
    while True:
        low = max((p.seq_len for p in tried if p.fits), default=0)
        high = min((p.seq_len for p in tried if not p.fits), default=min(LONGEST, 16 * low + 1024))
        if high - low <= max(1024, low // 32) or low and len(tried) >= STEPS_FOR_LENGTH:
            break
        near, far = sorted(tried, key=lambda p: abs(_room(p)))[:2]
        slope = (_room(near) - _room(far)) / (near.seq_len - far.seq_len)
        guess = near.seq_len - _room(near) / slope if slope < 0 else high
        guess = 2 * low if all(p.fits for p in tried) else guess  # policies change on the way
        # After many lengths of which none fits, at least halve the length.
        top = high - 1024 if len(tried) < 2 * STEPS_FOR_LENGTH else high // 2
        guess = int(min(max(guess, low + 1024), top)) // 1024 * 1024
        if any(p.seq_len == guess for p in tried):
            break
        tried.append(at(guess))
    return max((p.seq_len for p in tried if p.fits), default=0)


def _frugal(settings):
    """The settings without growth."""
    return settings if settings in WHOLE else replace(settings, plain=0)


def placements(run: Run, asked: str) -> list[str]:
    """The placements that a plan tries. With float8 only those without an engine, as in
    `hfpatch train`. ValueError if there is none.
    """
    found = candidates(asked, run.gpus, bool(run.shape.adapters))
    if run.gpu.float8 > 1:
        found = [name for name in found if not placement_named(name).sharded]
    if not found:
        raise ValueError(
            f"hfpatch: --fp8 is planned without an engine, --gpus {run.gpus} --placement {asked} "
            "came; pass --gpus 1 with --placement auto, or leave --fp8 out."
        )
    return found
