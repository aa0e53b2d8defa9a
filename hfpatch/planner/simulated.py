"""Runs a planned step in the simulator, on fake tensors, and makes whole plans of models that no
closed form describes.
"""

from dataclasses import replace
from functools import lru_cache, partial

from torch import nn

from hfpatch.budget.cuts import heads_per_group
from hfpatch.budget.flops import Flops
from hfpatch.budget.formula import Moment, StepMemory
from hfpatch.budget.policy import TIME_TILE_LEAST, Policy, auto_tile
from hfpatch.budget.sequence import rounds_for
from hfpatch.lab.models import text_config_of
from hfpatch.lab.simulate.fla import installed
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.lab.simulate.simulator import simulate
from hfpatch.lab.stock import STOCK, STOCK_CHECKPOINTING, UNTILED
from hfpatch.planner.answer import WHOLE, Plan, Run, assembled
from hfpatch.planner.counted import Counted, Values, layers_of, trained_bytes_of
from hfpatch.planner.evaluate import free_bytes
from hfpatch.planner.fewer import (
    STRETCHED,
    depths,
    groups_of_width,
    moments_of,
    stretched,
)
from hfpatch.planner.grown import Step, next_policy
from hfpatch.planner.placements import placement_named, resident
from hfpatch.planner.seconds import counted_time

STEPS_TO_LEARN = 4  # the most simulated steps in which layers keep more and more
STEPS_FOR_LENGTH = 8  # simulated steps in the search for the longest sequence; more if none fits
LONGEST = 1 << 24  # tokens
# The most operations of a simulated step (or one a token, if that is more). Code that loops over
# single tokens exceeds it.
OPERATIONS = 400_000
WAITS = (
    "in mixers a GPU waits for those that have the tokens before its own, which the seconds leave "
    "out"
)
IMPLEMENTATIONS = {STOCK: "hf", STOCK_CHECKPOINTING: "hf-ckpt", UNTILED: "hfpatch-off"}


def _run(model: nn.Module, batch: int, seq_len: int, policy, counted: Counted):
    """A simulated step of a stock model under a Policy, or a word for layers that run whole."""
    tiled = isinstance(policy, Policy)
    ready = prepare(model, "hfpatch" if tiled else IMPLEMENTATIONS[policy])
    try:
        how = {
            "ranks": counted.ranks,
            "most_operations": max(OPERATIONS, batch * seq_len),
        }
        return simulate(ready, batch, seq_len, policy=policy if tiled else None, **how)
    except Exception as error:  # a family's own forward may raise anything
        if str(error).startswith("hfpatch: "):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise ValueError(
            f"hfpatch: expected a causal language model that runs on [{batch}, {seq_len}] tokens, "
            f"this does not ({reason}); take a "
            "shorter length, or another model."
        ) from error


@lru_cache(maxsize=64)  # a sweep's placements differ only in resident bytes and share a step
def _step(
    config: "Values", counted: Counted, batch: int, seq_len: int, policy, width=None
) -> tuple[StepMemory, Flops, dict, int]:
    """A step of all layers, extrapolated from simulated steps of few layers (fewer.depths).

    Args:
        width: KV heads of a group in attention (fewer.groups_of_width); None for its own choice.

    Returns:
        (memory, FLOPs, reason -> number of layers that run whole for it, number of layers with a
        mixer that takes whole rows).
    """
    adapters = counted.adapters
    own = getattr(policy, "every", 1), getattr(policy, "plain", 0)
    fewer, more, times, bottom = depths(layers_of(build(config)), *own)

    def cut(n):
        model = build(config, adapters=adapters)
        del layers_of(model)[n:]
        return model

    model = cut(more)
    gradients = trained_bytes_of(model)
    low = trained_bytes_of(layers_of(model)[:bottom]) + trained_bytes_of(
        model.get_input_embeddings()
    )
    with groups_of_width(width):
        found = _run(model, batch, seq_len, policy, counted)
        less = _run(cut(fewer), batch, seq_len, policy, counted) if times else found
    onward = lambda read: read(found) + times * (read(found) - read(less))  # noqa: E731
    early, late = moments_of(found.ledger, low)
    further = onward(lambda s: s.most_beyond_bytes) - found.most_beyond_bytes
    missing = counted.trained_bytes - gradients
    moments = [
        Moment(f"{at}, at the end", g + missing, layer=b) for at, (g, b) in late.items() if b
    ]
    moments += [Moment(at, g, layer=b + further) for at, (g, b) in early.items()]
    memory = StepMemory(
        counted.nbytes, counted.trained_bytes, tuple(moments), onward(lambda s: s.host_peak_bytes)
    )
    matmul = onward(lambda s: sum(s.flops["matmul"].values()))
    forward, backward = (
        onward(lambda s: s.flops["attention"].get(way, 0))  # noqa: B023
        for way in ("forward", "backward")
    )
    least = 3 * onward(lambda s: s.flops["matmul"].get("forward", 0)), 3 * backward / 2.5
    whole = {reason: onward(lambda s: s.whole.get(reason, 0)) for reason in found.whole}  # noqa: B023
    moved = (onward(lambda s: s.ledger.traffic.get(way, 0)) for way in ("forward", "backward"))  # noqa: B023
    flops = Flops(matmul, forward, backward, sum(least), least[1], *moved)
    return memory, flops, whole, onward(lambda s: s.rows)


def _policy(asked, tokens: int, states: bool) -> Policy:
    """The policy of the settings `asked`. By default, inputs and attention outputs go to the
    host.
    """
    if asked.keep not in ("auto", ()) or asked.frozen_weights == "host":
        raise ValueError(
            "hfpatch: keep and weights on the host want a model that closed forms describe, "
            "another came; leave them out."
        )
    chosen = {
        "offload": "host", "every": 1, "save_attention": True, "tile": auto_tile(tokens), "plain": 0
    }  # fmt: skip
    said = {name: getattr(asked, name) for name in chosen if getattr(asked, name) != "auto"}
    if states and asked.tile == "auto":  # the smallest tile, whatever memory is free
        chosen["tile"] = TIME_TILE_LEAST
    chosen["chain"] = int(states and asked.every == "auto")
    return Policy(**chosen | said | ({"offload": "disk"} if asked.directory else {}))


def simulated_plan(
    model, run: Run, names: list[str], *, max_seq_len: bool = False, progress=None
) -> Plan:
    """plan() of a model that no closed form describes.

    Memory and FLOPs are those of a simulated step, with inputs and attention outputs on the host
    where layers run tile by tile. Seconds follow from these FLOPs and from the counted bytes.

    Args:
        run: has a Counted as its shape.
        names: the placements to try.
        progress: as in plan().

    Raises:
        ValueError: the step cannot be simulated.
    """
    if run.ranks > 1 and run.checkpointing in (STOCK, STOCK_CHECKPOINTING):
        raise ValueError(
            "hfpatch: transformers' own steps are simulated over whole rows, --sp-size "
            f"{run.ranks} came; leave one of them out."
        )
    at = partial(_at, Values(text_config_of(model)[1]), run, names)
    found = at(run.seq_len * run.ranks)
    if not max_seq_len:
        return found

    def tried(tokens: int) -> Plan:
        if progress:
            progress(tokens)
        return at(tokens)

    way = _longest(tried, found)
    said = {
        "every": "auto",
        "seq_len": way.seq_len if way else 0,
        "host_peak_bytes": way.host_peak_bytes if way else 0,
    }
    return replace(found, max_seq_len=said["seq_len"], longest=[said])


def _room(plan: Plan) -> int:
    """The free bytes of the GPU or of the host, whichever has fewer. Negative if bytes are
    lacking."""
    host = (
        plan.gpu_usable_bytes
        if plan.host_usable_bytes is None
        else plan.host_usable_bytes - plan.host_peak_bytes
    )
    return min(host, plan.gpu_usable_bytes - plan.gpu_peak_bytes)


def _longest(at, first: Plan) -> Plan | None:
    """The plan of the longest sequence that fits; None if none fits. If memory grows linearly, a
    few steps find it to a thirtieth.
    """
    tried = [first, at(max(1024, int(first.seq_len * (2 if first.fits else 0.5)) // 1024 * 1024))]
    while True:
        least = max((p.seq_len for p in tried if p.fits), default=0)
        most = min(
            (p.seq_len for p in tried if not p.fits), default=min(LONGEST, 16 * least + 1024)
        )
        if most - least <= max(1024, least // 32) or least and len(tried) >= STEPS_FOR_LENGTH:
            break
        near, far = sorted(tried, key=lambda p: abs(_room(p)))[:2]
        slope = (_room(near) - _room(far)) / (near.seq_len - far.seq_len)
        guess = near.seq_len - _room(near) / slope if slope < 0 else most
        # After many lengths of which none fits, at least halve the length.
        top = most - 1024 if len(tried) < 2 * STEPS_FOR_LENGTH else most // 2
        guess = int(min(max(guess, least + 1024), top)) // 1024 * 1024
        if any(p.seq_len == guess for p in tried):
            break
        tried.append(at(guess))
    return max((p for p in tried if p.fits), key=lambda p: p.seq_len, default=None)


def _taken(config: Values, counted: Counted, batch: int, seq_len: int, policy, slow: bool):
    """`_step`'s result for a step. slow: extrapolates it from shorter steps."""
    width = None
    if slow and counted.ranks > 1:
        width = rounds_for(counted, batch, seq_len).width
    elif slow:
        width = heads_per_group(batch, seq_len, counted.num_heads, counted.num_kv_heads)
    step = partial(_step, config, counted, batch, policy=policy, width=width)
    return stretched(step, seq_len, _tile(policy)) if slow else step(seq_len)


def _tile(policy) -> int:
    return policy.tile if isinstance(policy, Policy) else 4096


def _at(config: Values, run: Run, names: list, seq_len: int) -> Plan:
    """The plan at one length, under the first of the named placements that fits."""
    run, counted = replace(run, seq_len=-(-seq_len // run.ranks)), run.shape
    asked = run.checkpointing
    if asked in WHOLE:
        return _under(config, run, names, asked)
    policy = _policy(asked, run.batch * run.seq_len, counted.carries_states)
    # As in budget/first.first_policy: no chains if whole layers' sums of gradients take more than a
    # chain saves.
    rows = run.batch * run.seq_len * config.get("hidden_size", 0)
    few = rows < counted.trained_parameters // max(1, counted.num_layers)
    if few or run.ranks > 1:  # nor do layers run as chains where ranks share rows
        policy = replace(policy, chain=0)
    sparing = counted.carries_states and policy.offload == "host"
    found = _under(config, run, names, policy)
    if found.fits and asked.aim == "fastest" and isinstance(found.policy, dict):
        return _grown(config, run, found, policy)
    if found.fits or not sparing:
        return found
    short = found.host_usable_bytes is not None and found.host_peak_bytes > found.host_usable_bytes
    if short and asked.every == "auto" and run.ranks == 1:
        policy = replace(policy, chain=1)
    return _under(config, run, names, policy)


def _grown(config: Values, run: Run, found: Plan, policy: Policy) -> Plan:
    """The plan whose layers keep as much as fits. The runtime learns this from measured steps
    (room.Learned); here each simulated step takes the place of a measured one.
    """
    counted, name = run.shape, found.placement
    if run.gpus > 1 or _slow(run, _tile(policy)):  # ranks learn nothing
        return found
    for _ in range(STEPS_TO_LEARN):
        stays = resident(name, counted, run.gpus, policy)
        free = free_bytes(run, stays, placement_named(name).itemsize)[0]
        own = counted.trained_bytes if stays.gradients is None else stays.gradients
        took = found.gpu_bytes["activations"] + found.gpu_bytes["gradients"] - own
        step = Step(policy, took, own, run.batch * run.seq_len, counted.num_layers)
        policy, _ = next_policy(step, run.checkpointing, free)
        tried = None if policy == step.policy else _under(config, run, [name], policy)
        if tried is None or not tried.fits or tried.step_seconds > found.step_seconds:
            return found
        found = tried
    return found


def _slow(run: Run, tile: int) -> bool:
    """Whether a step of this length is extrapolated from shorter steps."""
    return run.shape.carries_states and run.seq_len > STRETCHED[-1] * tile


def _under(config: Values, run: Run, names: list, policy) -> Plan:
    """The plan under one policy, or under a word for layers that run whole: the first placement
    that fits."""
    counted, tile = run.shape, _tile(policy)
    slow = _slow(run, tile)
    stepped = (
        replace(policy, offload="host") if run.on_disk else policy
    )  # only on the host does the simulator count the bytes that leave the device
    memory, flops, whole, rows = _taken(config, counted, run.batch, run.seq_len, stepped, slow)
    why = "simulated: no closed form describes this model"
    if counted.carries_states:
        who = "delta rules take what fla's kernels do, other mixers" if installed() else "mixers"
        why += f"; {who} run in plain code, which takes more memory than their kernels do"
    why += f"; {WAITS}" if counted.carries_states and run.ranks > 1 else ""
    if slow:
        *shorter, last = (f"{n * tile:,}" for n in STRETCHED)
        why += f"; run at {', '.join(shorter)} and {last} tokens and carried on by a {'square' if rows else 'line'}"
    if isinstance(policy, Policy) and whole:
        reasons = ", ".join(whole)
        if sum(whole.values()) == counted.num_layers:
            policy = f"layers run whole ({reasons}), their inputs to {policy.offload}"
        else:
            why += f"; {sum(whole.values())} of {counted.num_layers} layers run whole ({reasons})"

    def under(name):
        stays = resident(name, counted, run.gpus, policy)
        time = counted_time(run.rates, flops, memory, stays, on_disk=run.on_disk)
        return assembled(run, name, policy, why, memory, flops, time, stays.link + 2 * memory.host)

    plans = [under(name) for name in names]
    return next((p for p in plans if p.fits), min(plans, key=lambda p: p.gpu_peak_bytes))
