"""A patched model after a step: its pinned memory, and the policy that it chose."""

import torch

from hfpatch.budget.policy import Policy
from hfpatch.layer.runtime import LayerRuntime

GiB = 1 << 30


def runtimes(model) -> list[LayerRuntime]:
    """The LayerRuntimes of a patched model, one per stack of layers."""
    held = (value for m in model.modules() for value in vars(m).values())
    return list({id(value): value for value in held if isinstance(value, LayerRuntime)}.values())


def pinned_gib(model) -> float:
    """Pinned host memory: the runtimes', and the caching host allocator's at its highest."""
    pools = [r.transfers.pool for r in runtimes(model) if r.transfers is not None]
    total = sum(p.bytes_held for p in pools if p.pinned)
    if torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats"):
        total += torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return total / GiB


def policy_used(model) -> Policy | None:
    """The policy of the last batch shape; None where nothing ran in tiles."""
    used = (policy for r in runtimes(model) for policy in reversed(r.policies.values()))
    return next(used, None)
