"""A model as others watch it: calls of its modules, its pinned memory, the policy that it chose."""

from contextlib import contextmanager

import torch

from hfpatch.budget.policy import Checkpointing
from hfpatch.layer.traits import runtimes_in


def pinned_bytes(model) -> int:
    """Pinned host memory: the runtimes', and the caching host allocator's at its highest."""
    moved = (one.transfers for one in runtimes_in(model) if one.transfers is not None)
    total = sum(one.pool.bytes_held for one in moved if one.pool.pinned)
    if torch.cuda.is_available():
        total += torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return total


def policy_used(model) -> Checkpointing | None:
    """The policy of the last batch shape; None where nothing ran in tiles."""
    shapes = (shape for r in runtimes_in(model) for shape in reversed(r.shapes.values()))
    return next((shape.policy for shape in shapes), None)


@contextmanager
def module_calls(before, after=lambda module: None):
    """A context in which before(module, args) and after(module) run around every module's call.

    after runs also if the call raises (a checkpoint's stop, an out-of-memory error). The hooks are
    global: hooks on the modules would change them.
    """
    hooks = torch.nn.modules.module
    entered = hooks.register_module_forward_pre_hook(before)
    left = hooks.register_module_forward_hook(lambda module, *_: after(module), always_call=True)
    try:
        yield
    finally:
        entered.remove()
        left.remove()
