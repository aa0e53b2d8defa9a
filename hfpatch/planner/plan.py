"""`hfpatch.plan(...)`: whether a run fits, how long a step takes, and which changes make it fit.

evaluate.py evaluates one run; suggestions.py finds the changes. No torch.
"""

import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.formula import ModelShape
from hfpatch.budget.policy import names_the_nearest
from hfpatch.budget.shape import UnknownFamily
from hfpatch.planner.answer import (
    Plan,
    Run,
    make_run,
    settings_of,
    with_float8,
)
from hfpatch.planner.evaluate import best, faster, frontier_of, longest_ways, placements, weights_at
from hfpatch.planner.suggestions import suggestions


def _refuse_weights_on_host(adapters: Adapters | None, sp_size: int) -> None:
    """ValueError if no runtime supports the weights on the host."""
    if not adapters:
        raise ValueError(
            "hfpatch: weights on the host must be a frozen base's, and all weights train. Pass "
            "adapters (--lora-r 16), or --placement zero3-offload."
        )
    if sp_size > 1:
        raise ValueError(
            f'hfpatch: frozen_weights="host" and --sp-size {sp_size} cannot be combined: its '
            "engines shard the weights. Leave frozen_weights out."
        )


def resolved(
    model, *, seq_len: int, adapters: Adapters | None = None, fp8: str | None = None, **asked
) -> Run:
    """The Run of plan()'s arguments. If no closed form describes the model, its shape is counted on
    the model itself.
    """
    try:
        run = make_run(model, seq_len=seq_len, **asked)
        run = replace(run, shape=replace(run.shape, adapters=adapters)) if adapters else run
    except UnknownFamily as error:
        from hfpatch.planner.counted import counted

        shape = counted(model, adapters)
        _say_simulated(error.what.rstrip(","))
        run = make_run(model, seq_len=seq_len, shape=shape, **asked)
    return with_float8(run, fp8) if fp8 else run


@cache
def _say_simulated(what: str) -> None:
    print(
        f"hfpatch: no closed form describes {what}, so its step runs on fake tensors, which takes "
        "minutes.",
        file=sys.stderr,
    )


@names_the_nearest
def plan(
    model, *, seq_len: int, batch: int = 1, gpu="h100", gpus: int = 1, host_ram=None,
    placement: str = "auto",
    checkpointing="auto", sp_size: int = 1, max_seq_len: bool = False,
    adapters: Adapters | None = None, progress=None, fp8: str | None = None, images: int = 0,
    video_tokens: int = 0,
) -> Plan:  # fmt: skip
    """Whether training all weights of `model`, or adapters over it, at [batch, seq_len] tokens a
    GPU fits, and how long a step takes.

    If no closed form describes the model, its step runs on fake tensors, which a line on stderr
    says, and its longest sequence is found to a thirtieth.

    Args:
        model: a preset, config.json, folder, hub id, config or model.
        gpu: a row of hardware.py, a Gpu, or "this", which measures this machine's.
        host_ram: the machine's memory, "256GiB" or bytes; None for enough.
        placement: a row of placements.py, or an optimizer of optimizers.py, on fp32 weights if they
            fit and else on bf16 weights.
        checkpointing: "auto", "least", "off", "gpu", "host", a directory, a Checkpointing, or
            "stock" and "stock-checkpointing" for transformers alone.
        sp_size: GPUs that share each row (Ulysses, context parallelism).
        max_seq_len: also search the longest sequence.
        adapters: LoRA over a frozen base (budget/adapters.py).
        progress: called with each length that the search tries.
        fp8: a recipe of FLOAT8_RECIPES.
        images, video_tokens: in each row. The image tower is then planned too: trained with all
            weights, frozen with adapters.

    Raises:
        ValueError: an argument is unknown or unsupported.
    """
    checkpointing = settings_of(checkpointing)
    asked = {
        "batch": batch, "gpu": gpu, "gpus": gpus, "host_ram": host_ram,
        "checkpointing": checkpointing, "sp_size": sp_size, "images": images,
        "video_tokens": video_tokens,
    }  # fmt: skip
    if not isinstance(max_seq_len, bool):
        raise ValueError(
            f"hfpatch: max_seq_len must be True or False, got {max_seq_len!r}. One length goes to "
            "seq_len."
        )
    if adapters is not None and not isinstance(adapters, Adapters):
        raise ValueError(
            f"hfpatch: adapters must be a hfpatch.budget.adapters.Adapters, got {adapters!r}. Pass "
            "Adapters(16) for rank 16."
        )
    if getattr(checkpointing, "frozen_weights", "auto") == "host":
        _refuse_weights_on_host(adapters, sp_size)
    run = resolved(model, seq_len=seq_len, adapters=adapters, fp8=fp8, **asked)
    names = placements(run, placement)
    if not isinstance(run.shape, ModelShape):
        from hfpatch.planner.simulated import simulated_plan

        return simulated_plan(model, run, names, max_seq_len=max_seq_len, progress=progress)
    found = best(run, names)
    if found.fits:
        found = replace(found, faster=faster(run, found, names))
    else:
        found = replace(found, suggestions=suggestions(run, found, placement))
    tiled = isinstance(found.policy, dict)
    chosen = (
        weights_at(run, found.policy["frozen_weights"]) if tiled and run.shape.adapters else run
    )
    found = replace(found, frontier=frontier_of(chosen, found.placement))
    if max_seq_len:
        ways = longest_ways(run, names, progress)
        found = replace(found, max_seq_len=ways[0]["seq_len"], longest=ways)
    return deepcopy(found)  # evaluate's cache returns the same dicts again
