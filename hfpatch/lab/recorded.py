"""One step under torch's profiler: seconds by kind of kernel, and of waiting for copies."""

from collections.abc import Callable

import torch

from hfpatch.lab.device import synchronize
from hfpatch.lab.profile.families import by_family, copy_wait


def recorded(run: Callable[[], object]) -> dict:
    """Seconds of one run() by kind of kernel, and seconds in which compute waits for copies.

    On a CPU: the operators' own seconds. It has no other stream to wait for.
    """
    cuda = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profiler:
        run()
        synchronize()
    if cuda:
        events = [
            (e.name, e.device_resource_id, e.time_range.start / 1e6, e.time_range.end / 1e6)
            for e in profiler.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        times = by_family((name, end - start) for name, _, start, end in events)
        waited = copy_wait(events)
        span = max((e[3] for e in events), default=0.0) - min((e[2] for e in events), default=0.0)
    else:
        times = by_family((e.key, e.self_cpu_time_total / 1e6) for e in profiler.key_averages())
        waited, span = 0.0, sum(times.values())
    attention, matmul = times.get("attention", 0.0), times.get("matmul", 0.0)
    rest = {k: v for k, v in times.items() if k not in ("attention", "matmul", "copy host-device")}
    return {
        "split_step_s": span,
        "attention_s": attention,
        "matmul_s": matmul,
        "copy_wait_s": waited,
        "other_s": span - attention - matmul - waited,
        "other_kernels": " ".join(f"{k}={v:.3g}" for k, v in list(rest.items())[:8]),
        "copies_s": times.get("copy host-device", 0.0),
    }
