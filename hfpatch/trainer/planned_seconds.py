"""The seconds that the step model has for a run under way."""

from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import step_memory
from hfpatch.layer.policies import beside_others, rounded
from hfpatch.planner.seconds import run_time


def planned_seconds(runtime, B: int, T: int, stays) -> tuple[float, float] | None:
    """Seconds of a pass at [B, T], both ways, and of the optimizer's step, under the policy that was
    chosen.

    runtime: a model's LayerRuntime; stays: what a placement keeps. None where nobody knows the
    device's rates, or no closed form describes the model.
    """
    for (batch, longest, dtype, device, whole, *_), policy in runtime.policies.items():
        room = runtime.rooms.get(device)
        gpu = room and room.gpu
        if (batch, longest) == (B, rounded(T)) and gpu and runtime.shape and not whole:
            sizes, shape = {"batch": B, "tokens": T}, runtime.shape
            memory = step_memory(shape, policy, **sizes, itemsize=dtype.itemsize)
            taken = step_flops(shape, policy, **sizes), memory
            more = {**sizes, "itemsize": dtype.itemsize}
            time, _ = run_time(beside_others(gpu), *taken, policy, shape, stays, **more)
            return time.total - time.optimizer, time.optimizer
    return None
