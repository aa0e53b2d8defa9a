"""`hfpatch.plan(...)`: does a run fit, how long does a step take, and what to change where it does not fit.

Bytes come from memory/formula.py, which the layers' policy asks too; seconds from memory/seconds.py. No torch.
"""

from dataclasses import dataclass, field, replace

from hfpatch.memory.adapters import Adapters
from hfpatch.memory.formula import (
    STOCK,
    STOCK_CHECKPOINTING,
    GiB,
    ModelShape,
    Policy,
    step_flops,
    step_memory,
)
from hfpatch.memory.hardware import GPUS, Gpu, gpu_row
from hfpatch.memory.limits import parse_bytes
from hfpatch.memory.policy import HOST_SHARE, RESERVE_SHARE, Budget, Checkpointing, Search, choose, frontier, reserve
from hfpatch.memory.seconds import first_step, step_time
from hfpatch.memory.sequence import why_not_shared_out
from hfpatch.memory.shape import UnknownFamily
from hfpatch.planner.models import config_of, resolve
from hfpatch.planner.placements import PLACEMENTS, candidates, resident

CONTRADICTION = 0.05  # of the planned activations: a simulated step that takes more says the plan is wrong
PROCESS_BYTES = 4 * GiB  # Python, torch and CUDA on the host, for each rank; assumed
WHOLE = ("off", STOCK, STOCK_CHECKPOINTING)  # values of checkpointing under which layers run whole


@dataclass(frozen=True)
class Plan:
    """The answer for one run. Bytes and seconds; the peaks are of one GPU, host_peak_bytes of one machine.

    longest: of the longest sequence, and of those that keep fewer layers' inputs, {"every", "seq_len", "host_peak_bytes"}.
    adapters: what is trained over a frozen base, None for all weights.
    policy: the resolved Policy as a dict, or the word for layers that run whole. split: gpu_bytes["activations"] by
    checkpoints, layer, loss and workspace at the peak's moment. frontier: what more or less GPU memory makes of the step.
    contradicted: a simulated step takes more. sp_size: GPUs that share each sequence. first_step: seconds that it takes beside its
    own (memory/seconds.py).
    """

    model: str
    gpu: str
    gpus: int
    batch: int
    seq_len: int
    placement: str
    fits: bool
    gpu_peak_bytes: int
    gpu_usable_bytes: int
    gpu_bytes: dict
    host_peak_bytes: int
    host_usable_bytes: int | None
    step_seconds: float
    tokens_per_second: float
    mfu: float
    policy: dict | str
    why: str
    suggestions: list
    moment: str
    split: dict
    seconds: dict
    link_bytes: int
    flops: float
    rates: str
    first_step: dict = field(default_factory=dict)
    frontier: list = field(default_factory=list)
    max_seq_len: int | None = None
    longest: list = field(default_factory=list)
    adapters: dict | None = None
    simulated_beyond_bytes: int | None = None
    contradicted: bool = False
    sp_size: int = 1

    def to_dict(self) -> dict:
        """All fields, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        from hfpatch.planner.show import text

        return text(self)


@dataclass(frozen=True)
class _Run:
    """What is asked, resolved: everything but the placement. seq_len: of one rank where ranks share rows (shape.ranks)."""

    name: str
    shape: ModelShape
    gpu: Gpu
    gpus: int
    host: int | None
    batch: int
    seq_len: int
    checkpointing: Checkpointing | str

    @property
    def ranks(self) -> int:
        return getattr(self.shape, "ranks", 1)


def _settings(run: _Run, placement: str) -> Checkpointing:
    """What was asked for; parameters sharded layer by layer do not allow segments of several layers."""
    sharded = PLACEMENTS[placement].sharded and run.checkpointing.every == "auto"
    return replace(run.checkpointing, every=1) if sharded else run.checkpointing


def _free(run: _Run, stays, itemsize: int) -> tuple[int, int | None]:
    """Bytes left for the step on the GPU and on the machine. The allocator's slack of what stays is taken off
    here, that of the step where it is admitted; gradients and optimizer states that the first step makes are there already."""
    own = (
        run.shape.trained_itemsize(itemsize) * run.shape.trained_parameters
        if stays.gradients is None
        else stays.gradients
    )
    gpu = run.gpu.usable_bytes - (1 + RESERVE_SHARE) * (stays.parameters + stays.optimizer + own)
    host = None if run.host is None else run.host - (stays.host + PROCESS_BYTES * run.gpus) / HOST_SHARE
    return max(0, int(gpu)), None if host is None else max(0, int(host))


def _policy(run: _Run, placement: str, stays):
    """The policy for what a placement leaves free, and a reason where the host cannot hold any."""
    if run.checkpointing in WHOLE:
        return run.checkpointing, ""
    itemsize = PLACEMENTS[placement].itemsize
    settings, (gpu_free, host_free) = _settings(run, placement), _free(run, stays, itemsize)
    sizes = {"batch": run.batch, "tokens": run.seq_len, "itemsize": itemsize, "gpu_free": gpu_free, "gpu": run.gpu}
    try:
        return choose(settings, run.shape, host_free=host_free, n_ranks=run.gpus, **sizes), ""
    except ValueError:
        # Planned with what asks least of the host, so that the lack shown is the least.
        return choose(_frugal(settings), run.shape, host_free=None, **sizes), "the host cannot hold the checkpoints"


def _frontier(run: _Run, placement: str) -> list[dict]:
    """Steps that a GPU with less or more memory could take: {"gpu_peak_bytes", "step_seconds", "policy"}, least memory first.
    Empty where layers run whole."""
    if run.checkpointing in WHOLE:
        return []
    stays = resident(placement, run.shape, run.gpus, run.checkpointing)
    itemsize = PLACEMENTS[placement].itemsize
    gpu_free, host_free = _free(run, stays, itemsize)
    host = None if host_free is None else int(host_free * HOST_SHARE) // run.gpus
    sizes = {"batch": run.batch, "tokens": run.seq_len, "itemsize": itemsize}
    search = Search(replace(_settings(run, placement), aim="fastest"), run.shape, gpu=run.gpu, **sizes)
    points = []
    for option in frontier(search, Budget(gpu_free, host)):
        plan = _evaluate(run, placement, option.policy)
        points.append({"gpu_peak_bytes": plan.gpu_peak_bytes, "step_seconds": plan.step_seconds, "policy": plan.policy})
    return points


def _frugal(settings: Checkpointing) -> Checkpointing:
    return replace(settings, save_attention=False) if settings.save_attention == "auto" else settings


def _weights_at(run: _Run, place: str) -> _Run:
    """The run with its layers' frozen weights there."""
    return replace(run, checkpointing=replace(run.checkpointing, weights=place))


def _evaluate(run: _Run, placement: str, policy=None) -> Plan:
    """The plan under one placement, and a policy where one is given, without suggestions and frontier. Frozen weights are on the
    host where it fits with them there alone."""
    if policy or run.checkpointing in WHOLE or run.checkpointing.weights != "auto" or not run.shape.adapters:
        return _evaluated(run, placement, policy)
    here = _evaluated(_weights_at(run, "gpu"), placement)
    if here.fits:
        return here
    there = _evaluated(_weights_at(run, "host"), placement)
    return there if _lack(there) < _lack(here) else here


def _evaluated(run: _Run, placement: str, policy=None) -> Plan:
    stays = resident(placement, run.shape, run.gpus, policy or run.checkpointing)
    policy, why_not = (policy, "") if policy else _policy(run, placement, stays)
    sizes, itemsize = {"batch": run.batch, "tokens": run.seq_len}, PLACEMENTS[placement].itemsize
    memory = step_memory(run.shape, policy, **sizes, itemsize=itemsize)
    flops = step_flops(run.shape, policy, **sizes)
    time, moved = step_time(run.gpu, flops, memory, policy, run.shape, stays, **sizes, itemsize=itemsize)
    found = assembled(run, placement, policy, why_not or _why(run, policy, stays), memory, flops, time, moved)
    return replace(found, first_step=first_step(run.gpu, memory, policy, run.shape, **sizes))


def assembled(run: _Run, placement: str, policy, why: str, memory, flops, time, moved: int) -> Plan:
    """The plan made of a step's memory, FLOPs, seconds and bytes over the link, under one placement."""
    stays = resident(placement, run.shape, run.gpus, policy)
    # Where all gradients are kept they count as they come; elsewhere the placement says what stands.
    gradients = (lambda m: m.gradients) if stays.gradients is None else (lambda m: stays.gradients)
    moment = max(memory.moments, key=lambda m: gradients(m) + m.beyond)
    parts = {
        "parameters": stays.parameters, "gradients": gradients(moment), "optimizer": stays.optimizer,
        "activations": moment.beyond,
    }  # fmt: skip
    parts["slack"] = reserve(sum(parts.values()))
    peak = sum(parts.values())
    on_host = 0 if isinstance(policy, Policy) and policy.offload == "disk" else memory.host
    host_peak = stays.host + run.gpus * (on_host + PROCESS_BYTES)
    host_usable = None if run.host is None else int(HOST_SHARE * run.host)
    fits = peak <= run.gpu.usable_bytes and (host_usable is None or host_peak <= host_usable)
    return Plan(
        model=run.name, gpu=run.gpu.name, gpus=run.gpus, batch=run.batch, seq_len=run.seq_len * run.ranks,
        placement=placement,
        fits=fits, gpu_peak_bytes=peak, gpu_usable_bytes=run.gpu.usable_bytes, gpu_bytes=parts,
        host_peak_bytes=host_peak, host_usable_bytes=host_usable, step_seconds=time.total,
        tokens_per_second=run.gpus * run.batch * run.seq_len / time.total,
        mfu=flops.model / time.total / run.gpu.peak_flops,
        policy=vars(policy) if isinstance(policy, Policy) else policy, why=why,
        suggestions=[], moment=moment.name,
        split={n: getattr(moment, n) for n in ("checkpoints", "layer", "loss", "workspace")},
        seconds=dict(vars(time)), link_bytes=moved, flops=flops.total, rates=run.gpu.source,
        adapters=dict(vars(run.shape.adapters)) if run.shape.adapters else None, sp_size=run.ranks,
    )  # fmt: skip


def _why(run: _Run, policy, stays) -> str:
    """One sentence on the policy."""
    if not isinstance(policy, Policy):
        return "layers run whole, as asked"
    tiled = run.shape.num_layers - policy.plain
    if tiled <= 0:
        return "the GPU holds all that autograd saves: nothing runs again"
    if run.checkpointing.aim == "least":
        reasons = ["the least memory of the GPU, as asked"]
    elif policy.offload == "disk":
        reasons = ["checkpoints wait in files, as asked"]
    elif policy.offload == "gpu":
        reasons = ["checkpoints stay on the GPU: it has room for them, or the host has none"]
    else:
        reasons = ["checkpoints wait in pinned host memory"]
    if policy.every > 1:
        reasons.append(f"the host has room for one layer's input in {policy.every}")
    elif policy.save_attention and policy.again:
        reasons.append(f"attention outputs too as far as they fit, in {policy.again} layers its forward runs again")
    elif policy.save_attention:
        reasons.append("attention outputs too, so that its forward runs once")
    else:
        reasons.append("attention outputs do not fit beside them, its forward runs again")
    if policy.weights == "host":
        reasons.append("frozen weights too, which come a layer ahead of their use")
    if policy.by_group:
        reasons.append("what has heads waits beside them and comes back per KV group, the GPU being short")
    elif policy.stream_attention:
        reasons.append("attention outputs come back per KV group, the GPU being short")
    return ", ".join(reasons)


def judged(plan: Plan, stays, simulated: int, on_host: int) -> Plan:
    """The plan beside a simulation's activations and its bytes on the host: where those are larger they count.

    stays: the placement's Resident.
    """
    planned = plan.gpu_bytes["activations"]
    more = max(0, simulated - planned)
    planned_on_host = (plan.host_peak_bytes - stays.host) // plan.gpus - PROCESS_BYTES
    on_disk = isinstance(plan.policy, dict) and plan.policy["offload"] == "disk"
    more_on_host = 0 if on_disk else max(0, on_host - planned_on_host)
    roomy = plan.host_usable_bytes is None or plan.host_peak_bytes + plan.gpus * more_on_host <= plan.host_usable_bytes
    fits = plan.fits and roomy and plan.gpu_peak_bytes + more <= plan.gpu_usable_bytes
    contradicted = more > CONTRADICTION * planned or more_on_host > CONTRADICTION * max(planned_on_host, GiB)
    return replace(plan, simulated_beyond_bytes=simulated, fits=fits, contradicted=contradicted)


def _best(run: _Run, names) -> Plan:
    """The first placement that fits, or the one that lacks the least."""
    plans = [_evaluate(run, name) for name in names]
    return next((p for p in plans if p.fits), min(plans, key=_lack))


def _lack(plan: Plan) -> int:
    host = 0 if plan.host_usable_bytes is None else max(0, plan.host_peak_bytes - plan.host_usable_bytes)
    return max(0, plan.gpu_peak_bytes - plan.gpu_usable_bytes) + host


def longest(run: _Run, names, *, step: int = 1024) -> int:
    """The longest sequence, in multiples of `step` tokens a rank, that fits; 0 where none does."""

    def fits(blocks):
        return _best(replace(run, seq_len=blocks * step), names).fits

    if not fits(1):
        return 0
    low, high = 1, 2
    while high * step <= 1 << 26 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step * run.ranks


def _longest_ways(run: _Run, names) -> list[dict]:
    """The longest sequence as asked and, where the interval was left open, with every second and fourth layer's input."""
    runs = {"auto": run}
    if run.checkpointing not in WHOLE and run.checkpointing.every == "auto" and not PLACEMENTS[names[0]].sharded:
        runs |= {k: replace(run, checkpointing=replace(run.checkpointing, every=k)) for k in (2, 4)}
    found = []
    for every, way in runs.items():
        length = longest(way, names)
        host = _best(replace(way, seq_len=length), names).host_peak_bytes if length else 0
        found.append({"every": every, "seq_len": length, "host_peak_bytes": host})
    return found


def _suggestions(run: _Run, plan: Plan, asked: str) -> list:
    """The changes, one at a time, that make it fit, quickest step first; each with its cost."""
    found = []

    def offer(change, other_run, names, cost=""):
        other = _best(other_run, names)
        if other.fits:
            slower = other.step_seconds / plan.step_seconds - 1
            paid = cost or f"step {other.step_seconds:.1f} s ({slower:+.0%})"
            found.append({
                "change": change, "cost": paid, "step_seconds": other.step_seconds,
                "gpu_peak_bytes": other.gpu_peak_bytes, "host_peak_bytes": other.host_peak_bytes,
            })  # fmt: skip

    lora = run.shape.adapters
    names = candidates(asked, run.gpus, bool(lora))
    if lora and lora.base != "4bit":
        smaller = replace(run.shape, adapters=replace(lora, base="4bit"))
        offer("--base 4bit", replace(run, shape=smaller), names)
    for name in candidates("auto", run.gpus, bool(lora)):
        if name != plan.placement and name not in names:
            offer(f"--placement {name}", run, [name])
    if run.checkpointing in WHOLE or run.checkpointing != Checkpointing():
        offer("--checkpointing auto", replace(run, checkpointing=Checkpointing()), names)
    if run.checkpointing not in WHOLE and run.checkpointing.offload in ("auto", "host"):
        disk = replace(run.checkpointing, offload="./checkpoints")
        offer("--checkpointing DIR (an NVMe folder)", replace(run, checkpointing=disk), names,
              "checkpoints at the disk's speed instead of the link's")  # fmt: skip
    if run.batch > 1:
        offer("--batch 1", replace(run, batch=1), names, f"{run.batch} accumulation steps for the same batch")
    for gpus in (2, 4, 8):
        if gpus > run.gpus:
            before = len(found)
            offer(f"--gpus {gpus}", replace(run, gpus=gpus), candidates("auto", gpus, bool(lora)), f"{gpus} GPUs")
            if len(found) > before:
                break
    for size in range(2, run.gpus + 1):
        if run.ranks == 1 and run.gpus % size == 0 and isinstance(run.shape, ModelShape):
            reason = why_not_shared_out(run.shape.num_heads, run.shape.num_kv_heads, size)
            part = replace(run, shape=replace(run.shape, ranks=size), seq_len=-(-run.seq_len // size))
            if not reason and _best(part, names).fits:
                offer(f"--sp-size {size}", part, names)
                break
    larger = sorted((g for g in GPUS.values() if g.memory_bytes > run.gpu.memory_bytes), key=lambda g: g.memory_bytes)
    for gpu in larger:
        before = len(found)
        offer(f"--gpu {gpu.name}", replace(run, gpu=gpu), names, f"a GPU of {gpu.memory_bytes / GiB:.0f} GiB")
        if len(found) > before:
            break
    if run.host is not None:
        settings = run.checkpointing if run.checkpointing in WHOLE else _frugal(run.checkpointing)
        roomy = _best(replace(run, host=None, checkpointing=settings), names)
        if roomy.fits:
            more = -(-int(roomy.host_peak_bytes / HOST_SHARE) // GiB)
            offer(f"--host-ram {more}GiB", replace(run, host=more * GiB), names, f"a machine with {more} GiB of memory")
    length = longest(run, names)
    if length:
        offer(f"--seq-len {length}", replace(run, seq_len=length // run.ranks), names,
              f"{1 - length / (run.seq_len * run.ranks):.0%} of the context")  # fmt: skip
    return sorted(found, key=lambda s: s["step_seconds"])


def shared(shape: ModelShape, sp_size: int, gpus: int) -> ModelShape:
    """The shape for ranks that share each row. ValueError where they are too many, or heads do not go evenly over them."""
    if gpus % sp_size:
        raise ValueError(f"hfpatch: --sp-size divides --gpus, {sp_size} and {gpus} came; pass a divisor of {gpus}.")
    if not isinstance(shape, ModelShape):
        raise ValueError("hfpatch: --sp-size wants a model type with closed forms, another came; leave it out.")
    reason = why_not_shared_out(shape.num_heads, shape.num_kv_heads, sp_size)
    if reason:
        raise ValueError(f"hfpatch: --sp-size {sp_size} came, but {reason}; pass another size.")
    return replace(shape, ranks=sp_size)


def make_run(model, *, seq_len, batch=1, gpu="h100", gpus=1, host_ram=None, checkpointing="auto",
             sp_size=1, shape=None) -> _Run:  # fmt: skip
    """Checks and resolves the arguments of plan(). ValueError with one sentence for what is wrong. shape: of a model that
    was counted, whose config no closed form describes."""
    name, shape = (config_of(model)[0], shape) if shape else resolve(model)[:2]
    for what, value in (("seq_len", seq_len), ("batch", batch), ("gpus", gpus), ("sp_size", sp_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"hfpatch: {what} must be a positive whole number, {value!r} came; pass 1 or more.")
    reason = getattr(shape, "whole_because", "")
    if reason and checkpointing not in WHOLE:
        raise UnknownFamily(
            f"hfpatch: expected layers that run tile by tile, {name} came, whose layers run whole ({reason}), which no closed form "
            "describes; run it with --simulate, which executes the model itself."
        )
    if sp_size > 1:
        shape, seq_len = shared(shape, sp_size, gpus), -(-seq_len // sp_size)
    if isinstance(gpu, Gpu):
        row = gpu
    elif gpu == "this":
        from hfpatch.planner.measure import measure_this

        row = measure_this()
    else:
        row = gpu_row(gpu)
    if checkpointing not in WHOLE:
        checkpointing = Checkpointing.of(checkpointing)
    if host_ram is None and gpu == "this":
        from hfpatch.memory.free import host_limit

        host_ram = host_limit()
    host = None if host_ram is None else parse_bytes(host_ram)
    return _Run(name, shape, row, gpus, host, batch, seq_len, checkpointing)


def plan(
    model, *, seq_len: int, batch: int = 1, gpu="h100", gpus: int = 1, host_ram=None, placement: str = "auto",
    checkpointing="auto", sp_size: int = 1, max_seq_len: bool = False, adapters: Adapters | None = None,
) -> Plan:  # fmt: skip
    """Whether training all weights of `model`, or adapters over it, at [batch, seq_len] tokens a GPU fits, and how long a step
    takes.

    model: a preset, config.json, folder, hub id, config or model. gpu: a row of hardware.py, a Gpu, or "this", which
    measures. host_ram: of the machine, "256GiB" or bytes; None: enough. placement: see placements.py. checkpointing:
    "auto", "least", "off", "gpu", "host", a directory, a Checkpointing, or "stock" and "stock-checkpointing" for transformers
    alone. sp_size: GPUs that share each row (Ulysses, context parallelism). max_seq_len: also search the longest sequence.
    adapters: LoRA over a frozen base (memory/adapters.py). Raises ValueError for what is unknown or unsupported.
    """
    run = make_run(model, seq_len=seq_len, batch=batch, gpu=gpu, gpus=gpus, host_ram=host_ram,
                   checkpointing=checkpointing, sp_size=sp_size)  # fmt: skip
    run = replace(run, shape=replace(run.shape, adapters=adapters)) if adapters else run
    if not adapters and getattr(run.checkpointing, "weights", "gpu") == "host":
        raise ValueError(
            "hfpatch: weights on the host are a frozen base's, all weights came to be trained; pass adapters (--lora-r 16), or "
            "--placement zero3-offload."
        )
    names = candidates(placement, gpus, bool(adapters))
    found = _best(run, names)
    if not found.fits:
        found = replace(found, suggestions=_suggestions(run, found, placement))
    chosen = _weights_at(run, found.policy["weights"]) if isinstance(found.policy, dict) else run
    found = replace(found, frontier=_frontier(chosen, found.placement))
    if max_seq_len:
        ways = _longest_ways(run, names)
        found = replace(found, max_seq_len=ways[0]["seq_len"], longest=ways)
    return found
