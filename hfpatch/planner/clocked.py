"""A planned step on the clock (lab/clock.py): the policy that the plan chooses, run with streams as
clocks.
"""

import torch

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.hardware import Gpu, gpu_row
from hfpatch.budget.policy import Policy, describe
from hfpatch.lab.clock import clocked
from hfpatch.lab.models import text_config_of
from hfpatch.lab.simulate.rivals import build, prepare
from hfpatch.lab.timeline import Timeline
from hfpatch.planner.answer import Plan
from hfpatch.planner.placements import PLACEMENTS
from hfpatch.planner.plan import plan


def clipped_adamw(parameters) -> torch.optim.Optimizer:
    """torch's fused AdamW, and before its step the clipping of a Trainer."""
    parameters = list(parameters)

    def clip(*_) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made = torch.optim.AdamW(parameters, fused=True)
    made.register_step_pre_hook(clip)
    return made


def _placement(asked: str | None, ranks: int) -> str:
    """What is planned: "gpu8bit", of ranks that share rows "fsdp2", where none is named. ValueError
    for one whose engine moves weights.
    """
    among = ["fsdp2"] if ranks != 1 else [p.name for p in PLACEMENTS.values() if not p.many]
    if asked not in (None, *among):
        how = "weights that stay on the GPU" if ranks == 1 else "ranks under FSDP"
        raise ValueError(
            f"hfpatch: the clock expects {how}, placement {asked!r} came; pass one of "
            f"{', '.join(among)}, or none."
        )
    return asked or among[0]


def _check(found: Plan, seq_len: int, ranks: int) -> None:
    """ValueError for a planned step that the clock cannot run."""
    if not isinstance(found.policy, dict):
        raise ValueError(
            f"hfpatch: the clock expects layers in tiles, {found.policy!r} came; pass "
            "checkpointing='auto'."
        )
    if found.seq_len != seq_len:
        raise ValueError(
            f"hfpatch: the clock expects rows that {ranks} ranks divide evenly, {seq_len:,} tokens "
            f"came; pass {found.seq_len - ranks} or {found.seq_len}."
        )
    if not found.fits:
        raise ValueError(
            f"hfpatch: the clock expects a step that fits, {found.model} at {found.seq_len:,} "
            f"tokens takes {found.gpu_peak_bytes / 2**30:.1f} of "
            f"{found.gpu_usable_bytes / 2**30:.1f} GiB on the GPU and "
            f"{found.host_peak_bytes / 2**30:.0f} on the host; ask `hfpatch plan` for a way."
        )


def clock(
    model, *, seq_len: int, batch: int = 1, gpu="h100", host_ram=None,
    placement: str | None = None, checkpointing="auto",
    adapters: Adapters | None = None, ranks: int = 1, allocator=None,
) -> Timeline:  # fmt: skip
    """One planned step on the clock.

    Args: as of `hfpatch.plan`, whose policy is taken. placement: one that keeps all weights on the
    GPU ("gpu8bit", "adamw", whose optimizer runs too). ranks: GPUs that share each row; they are
    planned with FSDP, whose gathers are not on the clock. allocator: as of lab.clock.clocked.
    Returns: the Timeline. Raises ValueError where the plan knows no tiled policy or says that it
    does not fit, where an engine moves the weights, or where ranks do not divide the row.
    """
    asked = {
        "batch": batch,
        "gpu": gpu,
        "host_ram": host_ram,
        "placement": _placement(placement, ranks),
        "checkpointing": checkpointing,
    }
    if ranks != 1:
        asked |= {"gpus": ranks, "sp_size": ranks}
    found = plan(model, seq_len=seq_len, adapters=adapters, **asked)
    _check(found, seq_len, ranks)
    config, dtype = (
        text_config_of(model)[1],
        torch.float32 if found.placement == "adamw-fp32" else torch.bfloat16,
    )
    policy, rates = Policy(**found.policy), gpu if isinstance(gpu, Gpu) else gpu_row(gpu)
    title = (
        f"{found.model}, {batch} x {seq_len:,} tokens, {rates.name}: "
        f"{describe(policy, found.num_layers)}"
    )
    # An optimizer in 8 bits compiles its step, which no fake tensor goes through.
    real = found.placement in ("adamw", "adamw-fp32") and ranks == 1
    patched = prepare(build(config, dtype, adapters), "hfpatch")
    timeline = clocked(
        patched,
        rates,
        policy,
        batch=batch,
        seq_len=seq_len // ranks,
        title=title,
        optimizer=clipped_adamw if real else found.seconds["optimizer"],
        ranks=ranks,
        allocator=allocator,
    )
    timeline.planned, timeline.planned_python = found.step_seconds, found.seconds["python_wait"]
    return timeline
