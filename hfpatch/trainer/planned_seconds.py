"""Seconds of the step model for a run in progress."""

from dataclasses import replace

from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import step_memory
from hfpatch.budget.hardware import gpu_named
from hfpatch.budget.limits import environment_number
from hfpatch.budget.measured import rounded
from hfpatch.planner.seconds import run_time


def planned_seconds(runtime, shape, B: int, T: int, stays) -> tuple[float, float] | None:
    """Seconds of a forward and backward at [B, T], and of the optimizer's step, under the policy in
    use.

    runtime: a model's LayerRuntime. shape: its ModelShape. stays: a planner.placements.Resident.
    None without rates of the device.
    """
    for (batch, longest, dtype, device, whole, *_), policy in runtime.policies.items():
        meter = runtime.meters.get(device)
        gpu = meter and gpu_named(meter.gauge.name())
        if (batch, longest) == (B, rounded(T)) and gpu and not whole:
            gpu = replace(gpu, sharing=environment_number("LOCAL_WORLD_SIZE", 1, 1))
            sizes = {"batch": B, "tokens": T}
            memory = step_memory(shape, policy, **sizes, itemsize=dtype.itemsize)
            taken = step_flops(shape, policy, **sizes), memory
            more = {**sizes, "itemsize": dtype.itemsize}
            time, _ = run_time(gpu, *taken, policy, shape, stays, **more)
            return time.total - time.optimizer, time.optimizer
    return None
