"""A patched model after a step: its pinned memory, and the policy that it chose."""

import torch

from hfpatch.budget.policy import Policy

GiB = 1 << 30


def pinned_gib(model) -> float | None:
    """Pinned host memory: the runtime's, and the caching host allocator's at its highest."""
    engines = {
        id(e): e for m in model.modules() if (e := vars(m).get("_hfpatch_runtime")) is not None
    }
    pools = [e.transfers.pool for e in engines.values() if e.transfers is not None]
    total = sum(p.bytes_held for p in pools if p.pinned)
    if torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats"):
        total += torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return total / GiB


def policy_used(model) -> Policy | None:
    """What the runtime settled on at the last shape; None where nothing ran in tiles."""
    for module in model.modules():
        runtime = vars(module).get("_hfpatch_runtime")
        if runtime is not None and runtime.policies:
            return list(runtime.policies.values())[-1]
    return None
