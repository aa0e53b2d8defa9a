"""What this process may use of its machine: host memory, a GPU's memory, cores."""

import os
import re
from dataclasses import replace
from pathlib import Path

from hfpatch.budget.free import cgroups, given_host, meminfo, share_of_device
from hfpatch.lab.hardware import CONTEXT_BYTES, GPUS, Gpu, gpu_row
from hfpatch.planner.limits import parse_bytes


def host_limit(root: str = "/") -> int | None:
    """Most bytes of host memory that this process may use: HFPATCH_HOST_MEMORY, else the machine's,
    or the tightest cgroup limit. None if unknown."""
    if (given := given_host()) is not None:
        return given
    root = Path(root)
    limits = [limit for limit, _ in cgroups(root)]
    total = meminfo(root).get("MemTotal")
    if total is not None:
        limits.append(total)
    return min(limits, default=None)


def gpu_limit(device=None) -> int:
    """Most bytes of a CUDA device that this process may use: all, or its own per-process limit."""
    import torch

    return share_of_device(torch.cuda.mem_get_info(device)[1], device)


def card(name: str) -> Gpu:
    """The card of --gpu: a row of hardware.py, or any card by its memory, such as "24GiB"."""
    if not re.fullmatch(r"[\d.]+ ?[kmgt]i?b", str(name).lower()):
        return gpu_row(name)
    memory = parse_bytes(name)
    if memory <= CONTEXT_BYTES:
        raise ValueError(
            f"hfpatch: --gpu must have more than 1 GiB, which CUDA takes, got {name}. Pass the "
            "card's memory, such as 24GiB."
        )
    near = min(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - memory))
    return replace(
        near, name=name, memory_bytes=memory,
        source=f"those of {near.name}, the known card nearest in memory: {near.source}",
    )  # fmt: skip


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
