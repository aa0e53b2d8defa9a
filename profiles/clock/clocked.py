"""A planned step on the clock (lab/clock.py), as a timeline.

python profiles/clock/measure.py picture llama-3.1-8b h100 16384 step.png
"""

import torch

from hfpatch.lab.adapters import Adapters
from hfpatch.budget.hardware import Gpu, gpu_row
from hfpatch.budget.policy import Policy, describe
from hfpatch.lab.clock import COMPUTE, WAITS, ClockFollower, Slice, run_on_clock
from hfpatch.lab.models import text_config_of
from hfpatch.lab.simulate.implementations import build, prepare
from hfpatch.planner.answer import Plan
from hfpatch.planner.placements import PLACEMENTS
from hfpatch.planner.plan import plan
from profiles.clock.timeline import Timeline


def clocked(
    model, gpu: Gpu, policy: Policy, *, batch: int, seq_len: int, title: str = "a step",
    optimizer=0.0, ranks: int = 1, follower=ClockFollower,
) -> Timeline:  # fmt: skip
    """The timeline of one step, as of lab.clock.run_on_clock.

    Args:
        optimizer: seconds of its step, which follows the backward; or a function from parameters to
            a torch optimizer, whose operations run.
    """
    real = optimizer if callable(optimizer) else None
    found, device, made = run_on_clock(
        model, gpu, policy,
        batch=batch, seq_len=seq_len, ranks=ranks, optimizer=real, follower=follower,
    )  # fmt: skip
    begins, done = made.begins, device.compute.now
    zero, turn, end = begins["forward"], begins["backward"], begins.get("optimizer", done)
    if optimizer and not real:
        done = end + optimizer
        device.rows[COMPUTE].append(Slice(COMPUTE, end, done, "optimizer", "", "optimizer"))
    parts = {"forward": turn - zero, "backward": end - turn, "optimizer": done - end}
    seconds = parts | {"step": done - zero}
    slices = [s for row in device.rows.values() for s in row]
    for s in slices:
        s.start, s.end = s.start - zero, s.end - zero
    waits = device.rows[WAITS]
    return Timeline(
        title,
        [s for s in slices if s.stream != WAITS],
        waits,
        seconds,
        device.late,
        found.peak_bytes,
    )


def clipped_adamw(parameters) -> torch.optim.Optimizer:
    """torch's fused AdamW, which clips gradients before its step as a Trainer does."""
    parameters = list(parameters)

    def clip(*_) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made = torch.optim.AdamW(parameters, fused=True)
    made.register_step_pre_hook(clip)
    return made


def _placement(asked: str | None, ranks: int) -> str:
    """The placement to plan. Default: "gpu8bit", or "fsdp2" if ranks share rows. ValueError for a
    placement whose engine moves weights.
    """
    among = ["fsdp2"] if ranks != 1 else [p.name for p in PLACEMENTS.values() if not p.many]
    if asked not in (None, *among):
        how = "weights that stay on the GPU" if ranks == 1 else "ranks under FSDP"
        raise ValueError(
            f"hfpatch: the clock needs {how}, got placement {asked!r}. Pass one of "
            f"{', '.join(among)}, or none."
        )
    return asked or among[0]


def _check(found: Plan, seq_len: int, ranks: int) -> None:
    """ValueError for a planned step that the clock cannot run."""
    if not isinstance(found.policy, dict):
        raise ValueError(
            f"hfpatch: the clock needs tiled layers, got {found.policy!r}. Pass "
            "checkpointing='auto'."
        )
    if found.seq_len != seq_len:
        raise ValueError(
            f"hfpatch: the clock needs sequences that {ranks} ranks divide evenly, got {seq_len:,} tokens. "
            f"Pass {found.seq_len - ranks} or {found.seq_len}."
        )
    if not found.fits:
        raise ValueError(
            f"hfpatch: the clock needs a step that fits, and {found.model} at {found.seq_len:,} "
            f"tokens takes {found.gpu_peak_bytes / 2**30:.1f} of "
            f"{found.gpu_usable_bytes / 2**30:.1f} GiB on the GPU and "
            f"{found.host_peak_bytes / 2**30:.0f} on the host. Ask `hfpatch plan` for a way."
        )


def clock(
    model, *, seq_len: int, batch: int = 1, gpu="h100", host_ram=None,
    placement: str | None = None, checkpointing="auto",
    adapters: Adapters | None = None, ranks: int = 1, follower=ClockFollower,
) -> Timeline:  # fmt: skip
    """One planned step on the clock.

    Args: as in `hfpatch.plan`, and:
        placement: keeps all weights on the GPU ("gpu8bit", or "adamw", whose optimizer runs too).
        ranks: GPUs that share each row. The plan has FSDP for them, whose gathers the clock omits.
        follower: as in lab.clock.run_on_clock.

    Returns:
        The Timeline.

    Raises:
        ValueError: the plan has no tiled policy or does not fit, an engine moves the weights, or
            the ranks do not divide the row.
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
    # An 8-bit optimizer compiles its step, which cannot run on fake tensors.
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
        follower=follower,
    )
    timeline.planned, timeline.planned_python = found.step_seconds, found.seconds["python_wait"]
    return timeline
