"""The CPU allocator's own account of a real training step, for the simulator to be held against."""

import torch
from torch.profiler import ProfilerActivity, profile


def real_peak(step) -> int:
    """Highest sum of what the CPU allocator handed out and took back while step() ran, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        top = max(top, total)
    return top


def train_step(model, ids):
    """Forward and backward with nothing else alive."""
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids).loss.backward()
