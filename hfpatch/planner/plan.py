"""`hfpatch.plan(...)`: whether a run fits, how long a step takes, and which changes make it fit.

The way of a call: cli/plan.py -> plan() -> answer.make_run (the model on meta) -> lab/shallow.py's
Model (the period of its layers) -> evaluate.Ladder (first_policy, then climb) -> lab/steps.py's
Steps.cost (steps of two and three periods, under simulate() and a ClockDevice) -> answer.assembled.
suggestions.py finds the changes that make a run fit.
"""

from dataclasses import asdict, replace

from hfpatch.budget.policy import names_the_nearest
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.hardware import GiB, Gpu
from hfpatch.lab.models import config_of
from hfpatch.planner.machine import card
from hfpatch.planner.placements import candidates
from hfpatch.planner.remembered import recall, remember
from hfpatch.planner.result import Plan


@names_the_nearest
def plan(
    model, *, seq_len: int, batch: int = 1, gpu="h100", gpus: int = 1, host_ram=None,
    placement: str = "auto",
    checkpointing="auto", sp_size: int = 1, max_seq_len: bool = False,
    adapters: Adapters | None = None, progress=None, fp8: str | None = None, images: int = 0,
    video_tokens: int = 0, gradient_accumulation_steps: int = 1,
) -> Plan:  # fmt: skip
    """Whether training all weights of `model`, or adapters over it, at [batch, seq_len] tokens a
    GPU fits, and how long a step takes.

    The model's step runs on fake tensors, in few layers. The longest sequence is found to a
    thirtieth.

    Args:
        model: a preset, config.json, folder, hub id, config or model.
        gpu: a row of hardware.py, a Gpu, or "this", which measures this machine's.
        host_ram: the machine's memory, "256GiB" or bytes; None assumes twice the cards', at least
            64 GiB.
        placement: "auto", or a row of placements.py.
        checkpointing: "auto", "least", "off", "gpu", "host", a directory, a Checkpointing, or
            "stock" and "stock-checkpointing" for transformers alone.
        sp_size: GPUs that share each row (Ulysses, context parallelism).
        max_seq_len: also search the longest sequence.
        adapters: LoRA over a frozen base (lab/adapters.py).
        progress: called with each length that the search tries.
        fp8: "rowwise" or "rowwise_with_gw_hp", the recipes of `hfpatch train --fp8`.
        images, video_tokens: in each row. The image tower is then planned too: trained with all
            weights, frozen with adapters.
        gradient_accumulation_steps: batches of a step. Of several the later ones are planned, beside
            the gradients of the first. Seconds are those of one batch.

    Raises:
        ValueError: an argument is unknown or unsupported.
    """
    if not isinstance(max_seq_len, bool):
        raise ValueError(
            f"hfpatch: max_seq_len must be True or False, got {max_seq_len!r}. One length goes to "
            "seq_len."
        )
    if adapters is not None and not isinstance(adapters, Adapters):
        raise ValueError(
            f"hfpatch: adapters must be a hfpatch.lab.adapters.Adapters, got {adapters!r}. Pass "
            "Adapters(16) for rank 16."
        )
    # at once: what comes next loads torch for seconds
    candidates(placement, gpus, bool(adapters))
    if gpu != "this" and not isinstance(gpu, Gpu):
        card(gpu)
    arguments = {
        "batch": batch, "gpu": gpu, "gpus": gpus, "host_ram": host_ram, "seq_len": seq_len,
        "checkpointing": checkpointing, "sp_size": sp_size, "images": images,
        "video_tokens": video_tokens, "adapters": adapters,
        "gradient_accumulation_steps": gradient_accumulation_steps
    }  # fmt: skip
    search = {"placement": placement, "max_seq_len": max_seq_len, "fp8": fp8}
    if gpu == "this":
        return _planned(model, arguments, progress, **search)
    key = arguments | search | {"model": config_of(model)}
    if known := recall(key):
        return Plan.of(known)
    found = _planned(model, arguments, progress, **search)
    remember(key, asdict(found))
    return found


def _planned(model, arguments: dict, progress, placement: str, max_seq_len: bool, fp8) -> Plan:
    from hfpatch.planner.answer import make_run
    from hfpatch.planner.evaluate import FIRST, best, faster, longest, placements
    from hfpatch.planner.float8 import in_float8
    from hfpatch.planner.suggestions import suggestions

    run = make_run(model, **arguments)
    if fp8:
        run = in_float8(run, fp8)
    if run.host is None:  # twice the cards' memory, at least 64 GiB, as common machines have
        host = max(2 * run.gpus * round(run.gpu.memory_bytes / GiB), 64) * GiB
        run = replace(run, host=host, host_assumed=True)
    names = placements(run, placement)
    found = best(run, names)
    advice: dict = (
        {"faster": faster(run, found, names)} if found.fits
        else {"suggestions": suggestions(run, found, placement)}
    )  # fmt: skip
    if max_seq_len:
        tokens = longest(run, names, progress)
        there = replace(run, seq_len=max(1, -(-tokens // run.ranks)))
        host = best(there, names, FIRST).host.peak_bytes
        advice |= {"max_seq_len": tokens, "max_seq_len_host_bytes": host}
    return replace(found, advice=replace(found.advice, **advice))
