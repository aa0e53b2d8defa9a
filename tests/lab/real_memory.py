"""The CPU allocator's own account of a real training step, for the simulator to be held against."""

import itertools

import torch
from torch.profiler import ProfilerActivity, profile


def real_events(step) -> list[int]:
    """What the CPU allocator handed out (positive) and took back (negative) while step() ran, in
    bytes, in order.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def real_peak(step) -> int:
    """Highest sum of what the CPU allocator handed out and took back while step() ran, in bytes."""
    return max(itertools.accumulate(real_events(step)), default=0)


def train_step(model, ids):
    """Forward and backward with nothing else alive."""
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids).loss.backward()
