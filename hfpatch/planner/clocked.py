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
from hfpatch.planner.plan import plan


def clipped_adamw(parameters) -> torch.optim.Optimizer:
    """torch's fused AdamW, and before its step the clipping of a Trainer."""
    parameters = list(parameters)

    def clip(*_) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made = torch.optim.AdamW(parameters, fused=True)
    made.register_step_pre_hook(clip)
    return made


def _check(found: Plan, ranks: int) -> None:
    moved = ranks == 1 and found.placement.startswith(("zero3", "fsdp2"))
    if not isinstance(found.policy, dict) or moved:
        raise ValueError(
            "hfpatch: the clock expects layers in tiles and weights that stay on the GPU, "
            f"{found.policy if isinstance(found.policy, str) else found.placement!r} came; pass "
            "placement='gpu8bit' or 'adamw'."
        )
    if not found.fits:
        raise ValueError(
            f"hfpatch: the clock expects a step that fits, {found.model} at {found.seq_len:,} "
            f"tokens takes {found.gpu_peak_bytes / 2**30:.1f} of "
            f"{found.gpu_usable_bytes / 2**30:.1f} GiB on the GPU and "
            f"{found.host_peak_bytes / 2**30:.0f} on the host; ask `hfpatch plan` for a way."
        )


def clock(
    model, *, seq_len: int, batch: int = 1, gpu="h100", host_ram=None, placement: str = "gpu8bit",
    checkpointing="auto",
    adapters: Adapters | None = None, ranks: int = 1, allocator=None,
) -> Timeline:  # fmt: skip
    """One planned step on the clock.

    Args: as of `hfpatch.plan`, whose policy is taken. placement: one that keeps all weights on the
    GPU ("gpu8bit", "adamw", whose optimizer runs too). ranks: GPUs that share each row; they are planned with FSDP, whose
    gathers are not on the clock. allocator: as of lab.clock.clocked. Returns: the Timeline. Raises
    ValueError where the plan knows no tiled policy or says that it does not fit, or where an engine
    moves the weights.
    """
    asked = {
        "batch": batch,
        "gpu": gpu,
        "host_ram": host_ram,
        "placement": placement,
        "checkpointing": checkpointing,
    }
    if ranks != 1:
        asked |= {"placement": "fsdp2", "gpus": ranks, "sp_size": ranks}
    found = plan(model, seq_len=seq_len, adapters=adapters, **asked)
    _check(found, ranks)
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
        seq_len=-(-seq_len // ranks),
        title=title,
        optimizer=clipped_adamw if real else found.seconds["optimizer"],
        ranks=ranks,
        allocator=allocator,
    )
    timeline.planned = found.step_seconds
    return timeline
