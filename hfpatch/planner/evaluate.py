"""Evaluates one run under one placement: its policy, bytes and seconds. Finds the best placement
and the longest sequence that fits.

budget/choice.py chooses the layers' policy, at run time too, with the bytes of budget/formula.py and
the seconds of budget/seconds.py. No torch.
"""

from dataclasses import replace
from functools import lru_cache

from hfpatch.budget.choice import HOST_SHARE, RESERVE_SHARE, Budget, Search, frontier
from hfpatch.budget.hardware import DISK, SECONDS_ERROR
from hfpatch.budget.policy import Checkpointing, Policy
from hfpatch.lab.first_step import first_step
from hfpatch.lab.stock import flops_of, memory_of
from hfpatch.planner.answer import (
    FLOAT8,
    PROCESS_BYTES,
    WHOLE,
    Plan,
    Run,
    assembled,
    stays_of,
)
from hfpatch.planner.placements import candidates, placement_named
from hfpatch.planner.seconds import run_time


def _settings(run: Run, placement: str) -> Checkpointing:
    """The run's Checkpointing. Segments have one layer if an engine shards parameters layer by
    layer.
    """
    sharded = placement_named(placement).sharded and run.checkpointing.every == "auto"
    return replace(run.checkpointing, every=1) if sharded else run.checkpointing


def free_bytes(run: Run, stays, itemsize: int) -> tuple[int, int | None]:
    """Bytes left for the step on the GPU and on the machine. Gradients and optimizer states that
    the first step makes count as present. The allocator's slack of resident bytes is subtracted
    here; the slack of the step itself is subtracted where a policy is admitted.
    """
    own = (
        run.shape.trained_itemsize(itemsize) * run.shape.trained_parameters
        if stays.gradients is None
        else stays.gradients
    )
    held = on_host = 0
    if run.tower is not None:
        asked = run.batch, run.checkpointing, bool(run.shape.adapters)
        held, on_host = run.tower.held(*asked), run.gpus * run.tower.host(*asked)
    kept = stays.parameters + stays.optimizer + own + held
    gpu = run.gpu.usable_bytes - (1 + RESERVE_SHARE) * kept
    host = (
        None
        if run.host is None
        else run.host - (stays.host + on_host + PROCESS_BYTES * run.gpus) / HOST_SHARE
    )
    return max(0, int(gpu)), None if host is None else max(0, int(host))


@lru_cache(maxsize=2)
def _search(*asked, **sizes) -> Search:
    """A Search, cached so that the choice and the frontier share priced policies."""
    return Search(*asked, **sizes)


def _searched(run: Run, placement: str, stays, settings: Checkpointing) -> tuple[Search, Budget]:
    itemsize = placement_named(placement).itemsize
    sizes = {"batch": run.batch, "tokens": run.seq_len, "itemsize": itemsize}
    search = _search(settings, run.shape, gpu=run.rates, **sizes)
    return search, search.budget(*free_bytes(run, stays, itemsize), run.gpus)


def _policy(run: Run, placement: str, stays):
    """The policy for the memory that a placement leaves free, and a reason if the host can hold no
    policy's checkpoints, else ""."""
    if run.checkpointing in WHOLE:
        return run.checkpointing, ""
    settings = _settings(run, placement)
    try:
        search, budget = _searched(run, placement, stays, settings)
        return search.decide(budget).policy, ""
    except ValueError:
        # The plan shows the smallest lack: that of the settings that need least of the host.
        search, budget = _searched(run, placement, stays, frugal(settings))
        return search.decide(
            replace(budget, host=None)
        ).policy, "the host cannot hold the checkpoints"


def frontier_of(run: Run, placement: str) -> list[dict]:
    """The steps of a GPU with less or more memory: {"gpu_peak_bytes", "step_seconds", "policy"},
    least memory first. Empty if layers run whole.
    """
    if run.checkpointing in WHOLE:
        return []
    stays = stays_of(run, placement, run.checkpointing)
    plans = (
        evaluate(run, placement, o.policy)
        for o in frontier(*_searched(run, placement, stays, _settings(run, placement)))
    )
    return [{k: getattr(p, k) for k in ("gpu_peak_bytes", "step_seconds", "policy")} for p in plans]


def frugal(settings: Checkpointing) -> Checkpointing:
    return (
        replace(settings, save_attention=False) if settings.save_attention == "auto" else settings
    )


def weights_at(run: Run, place: str) -> Run:
    """The run with its layers' frozen weights at `place`."""
    return replace(run, checkpointing=replace(run.checkpointing, frozen_weights=place))


# A plan, its suggestions and the longest sequence evaluate some runs twice.
@lru_cache(maxsize=64)
def evaluate(run: Run, placement: str, policy=None) -> Plan:
    """The plan under one placement, without suggestions and frontier. policy: the policy to use; by
    default the best one. Frozen weights are on the host only if the run does not fit otherwise.
    Ranks that share rows leave frozen weights on the GPU, as the runtime does.
    """
    stay = (
        run.checkpointing in WHOLE
        or run.checkpointing.frozen_weights != "auto"
        or not run.shape.adapters
        or run.ranks > 1
    )
    if policy or stay:
        return _evaluated(run, placement, policy)
    here = _evaluated(weights_at(run, "gpu"), placement)
    if here.fits:
        return here
    there = _evaluated(weights_at(run, "host"), placement)
    return there if _lack(there) < _lack(here) else here


def _evaluated(run: Run, placement: str, policy=None) -> Plan:
    stays = stays_of(run, placement, policy or run.checkpointing)
    policy, why_not = (policy, "") if policy else _policy(run, placement, stays)
    sizes, itemsize = (
        {"batch": run.batch, "tokens": run.seq_len},
        placement_named(placement).itemsize,
    )
    memory = memory_of(run.shape, policy, **sizes, itemsize=itemsize)
    flops = flops_of(run.shape, policy, **sizes)
    time, moved = run_time(
        run.rates, flops, memory, policy, run.shape, stays, **sizes, itemsize=itemsize
    )
    why = why_not or _why(run, policy)
    why += f"; {FLOAT8}" if run.gpu.float8 > 1 else ""
    found = assembled(run, placement, policy, why, memory, flops, time, moved)
    return replace(
        found,
        first_step=first_step(
            run.gpu, memory, policy, run.shape, tokens=run.seq_len, itemsize=itemsize
        ),
    )


def _why(run: Run, policy) -> str:
    """The reasons for the policy, as one sentence."""
    if not isinstance(policy, Policy):
        return "layers run whole, as asked"
    tiled = run.shape.num_layers - policy.plain
    if tiled <= 0:
        return "the GPU holds all that autograd saves: nothing runs again"
    if run.checkpointing.aim == "least":
        reasons = ["the least memory of the GPU, as asked"]
    elif policy.offload == "disk":
        reasons = [f"checkpoints wait in files, as asked, on {DISK}"]
    elif policy.offload == "gpu":
        reasons = ["checkpoints stay on the GPU: it has room for them, or the host has none"]
    else:
        reasons = ["checkpoints wait in pinned host memory"]
    if policy.every > 1 and run.checkpointing.every != "auto":
        reasons.append(f"one layer's input in {policy.every}, as asked")
    elif policy.every > 1:
        where = {"gpu": "the GPU has room for", "disk": "the least time goes with"}
        where = where.get(policy.offload, "the host has room for")
        reasons.append(f"{where} one layer's input in {policy.every}")
    elif policy.save_attention and policy.attends_again:
        layers = f"{policy.again} layer{'s' * (policy.again > 1)}"
        limit = "as many as are written in time" if run.on_disk else "as far as they fit"
        reasons.append(f"attention outputs too {limit}, in {layers} its forward runs again")
    elif policy.save_attention:
        reasons.append("attention outputs too, so that its forward runs once")
    elif run.checkpointing.save_attention is False:
        reasons.append("attention outputs are not kept, as asked, its forward runs again")
    else:
        why = "would take longer to write than to make" if run.on_disk else "do not fit beside them"
        reasons.append(f"attention outputs {why}, its forward runs again")
    if policy.frozen_weights == "host":
        reasons.append("frozen weights wait on the host and come a layer ahead of their use")
    return ", ".join(reasons)


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
    host = (
        0
        if plan.host_usable_bytes is None
        else max(0, plan.host_peak_bytes - plan.host_usable_bytes)
    )
    return max(0, plan.gpu_peak_bytes - plan.gpu_usable_bytes) + host


def longest(run: Run, names, *, step: int = 1024, progress=None) -> int:
    """The longest sequence, in multiples of `step` tokens a rank, that fits; 0 if none fits.

    progress: called with each length that is tried.
    """

    lacks: dict[int, int] = {}  # length in steps -> lacking bytes
    names = [*names]

    def fits(steps):
        if progress:
            progress(steps * step * run.ranks)
        found = best(replace(run, seq_len=steps * step), names)
        if found.fits:  # later lengths are longer, so earlier placements will not fit them
            del names[: names.index(found.placement)]
        else:
            lacks[steps] = _lack(found)
        return found.fits

    low, high, straight = 0, max(1, run.seq_len // step), True
    while high * step <= 1 << 26 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        guess = (low + high) // 2
        if straight and len(lacks) > 1:  # lacking bytes mostly grow linearly with the length
            one, two = sorted(lacks)[:2]
            more = (lacks[two] - lacks[one]) / (two - one)
            guess = int(min(max(one - lacks[one] / more, low + 1), high - 1)) if more > 0 else guess
        if fits(guess):
            straight = straight and guess > low + 1
            low = guess
        else:
            high = guess
    return low * step * run.ranks


def longest_ways(run: Run, names, progress=None) -> list[dict]:
    """Plan.longest: the longest sequence as asked. If `every` is "auto", also the longest sequences
    with the input of every second and every fourth layer kept.
    """
    runs = {"auto": run}
    if (
        run.checkpointing not in WHOLE
        and run.checkpointing.every == "auto"
        and not placement_named(names[0]).sharded
    ):
        runs |= {k: replace(run, checkpointing=replace(run.checkpointing, every=k)) for k in (2, 4)}
    found = []
    for every, way in runs.items():
        length = longest(way, names, progress=progress)
        host = (
            best(replace(way, seq_len=length // run.ranks), names).host_peak_bytes if length else 0
        )
        found.append({"every": every, "seq_len": length, "host_peak_bytes": host})
    return found


def placements(run: Run, asked: str) -> list[str]:
    """The placements that a plan tries. With float8 only those without an engine, as in
    `hfpatch train`. ValueError if there is none.
    """
    found = candidates(asked, run.gpus, bool(run.shape.adapters))
    if run.gpu.float8 > 1:
        found = [name for name in found if not placement_named(name).sharded]
    if not found:
        raise ValueError(
            f"hfpatch: --fp8 is planned without an engine, got --gpus {run.gpus} --placement "
            f"{asked}. Pass --gpus 1 with --placement auto, or leave --fp8 out."
        )
    return found
