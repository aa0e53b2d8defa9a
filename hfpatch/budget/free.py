"""Free memory of the host (containers' limits included) and of the GPU."""

import os
from pathlib import Path

from hfpatch.budget.limits import environment_number

# torch's variable for its caching allocator, its older name, and the setting that lets segments grow.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROWS = "expandable_segments:True"
_UNLIMITED = 1 << 60  # cgroup v1 writes 2**63 rounded down to a page for "no limit"


# Of each version of cgroups: its folder, the files with a group's limit and usage, and the field of
# memory.stat that counts reclaimable page cache.
V1 = (
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def meminfo(root: Path) -> dict[str, int]:
    lines = _lines(root / "proc/meminfo")
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:2]}


def cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use without page cache) of the cgroup of this process and of its parents, of
    those that have a limit."""
    paths = {V1: "/", V2: "/"}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[V2] = path
        elif "memory" in controllers.split(","):
            paths[V1] = path
    found = []
    for (base, limit, usage, cache), path in paths.items():
        # Any parent may set a limit. A container sees its own root, not the host's path.
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts) + 1):
            folder = root / base / "/".join(parts[:depth])
            most = _number(folder / limit)
            used = _number(folder / usage)
            if most is not None and used is not None:
                fields = dict(line.partition(" ")[::2] for line in _lines(folder / "memory.stat"))
                found.append((most, used - int(fields.get(cache, 0))))
    return found


_held = 0  # bytes of host memory that this process' pools hold


def held() -> int:
    return _held


def hold(nbytes: int) -> None:
    """Notes that a pool took nbytes of host memory, or freed them if negative."""
    global _held
    _held += nbytes


def given_host() -> int | None:
    """HFPATCH_HOST_MEMORY: the bytes of the host that runs and plans may use, None if not set."""
    return environment_number("HFPATCH_HOST_MEMORY", None)


def host_free(root: str = "/") -> int | None:
    """Free bytes of host memory, for all ranks of this machine. None if unknown.

    The lesser of the machine's available memory and the room below each cgroup limit (page cache
    counts as free). HFPATCH_HOST_MEMORY, in bytes, replaces it if the system reports less than may
    be used (virtual machines whose memory grows). It is given once, so what the pools of all ranks,
    which are alike, hold by now is subtracted.
    """
    given = given_host()
    if given is not None:
        return max(0, given - _held * environment_number("LOCAL_WORLD_SIZE", 1, 1))
    root = Path(root)
    left = [max(0, limit - used) for limit, used in cgroups(root)]
    info = meminfo(root)
    available = info.get("MemAvailable", info.get("MemFree"))
    if available is not None:
        left.append(available)
    return min(left, default=None)


def rank_host_free() -> int | None:
    """This rank's part of host_free()."""
    free = host_free()
    return None if free is None else free // environment_number("LOCAL_WORLD_SIZE", 1, 1)


def gpu_free(device=None) -> int | None:
    """Bytes that PyTorch can still allocate on a CUDA device; None on a machine without CUDA.

    Free bytes and unused ones of its caching allocator, within the process's own share
    (torch.cuda.set_per_process_memory_fraction).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = share_of_device(total, device)
    # Memory of a pool that sleeps (vLLM's) counts as reserved, though the driver has it again.
    unreserved = max(0, min(free, share - reserved)) if share < total else free
    return unreserved + reserved - torch.cuda.memory_allocated(device)


def expandable_segments() -> bool:
    """Whether PyTorch's caching allocator was told to use segments that expand."""
    return any(GROWS in os.environ.get(name, "") for name in ALLOCATOR)


def expand_segments() -> None:
    """Makes torch's allocator grow its segments, unless the user set it otherwise: fixed segments
    fragment at long sequences.

    Call it before the first CUDA allocation.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = GROWS


def share_of_device(total: int, device) -> int:
    import torch

    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def _own(parameter):
    """This rank's shard of a parameter that an engine shards (FSDP, ZeRO-3), else the parameter."""
    part = getattr(parameter, "ds_tensor", None)
    if part is not None:
        return part
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def to_come(parameters, device) -> int:
    """Bytes on a device that a step will allocate for gradients that do not exist yet."""
    own = [_own(p) for p in parameters if p.requires_grad and p.grad is None]
    return sum(t.nbytes for t in own if t.device == device)
