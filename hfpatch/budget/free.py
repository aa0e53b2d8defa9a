"""Free memory of the host (containers' limits included) and of the GPU."""

import os
from pathlib import Path

from hfpatch.budget.limits import environment_number

# torch's variable for its caching allocator, its older name, and the setting that lets segments grow.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROWS = "expandable_segments:True"
_UNLIMITED = 1 << 60  # cgroup v1 writes 2**63 rounded down to a page for "no limit"


def read_number(path: Path):
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def meminfo(root: Path) -> dict:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:2]}


def cgroup_paths(root: Path) -> list:
    """(folder, limit file, usage file, field of memory.stat that counts reclaimable page cache) for
    the cgroup of this process and all its parents."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    v1, v2 = "/", "/"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    kinds = (
        (
            "sys/fs/cgroup/memory",
            v1,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        ("sys/fs/cgroup", v2, "memory.max", "memory.current", "inactive_file"),
    )
    for base, path, limit, usage, cache in kinds:
        # Any parent may set a limit. A container sees its own root, not the host's path.
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts), -1, -1):
            folder = root / base / "/".join(parts[:depth])
            if (folder / limit).exists():
                found.append((folder, limit, usage, cache))
    return found


_held = 0  # bytes of host memory that this process' pools hold


def hold(nbytes: int) -> None:
    """Notes that a pool took nbytes of host memory, or freed them if negative."""
    global _held
    _held += nbytes


def host_free(root: str = "/") -> int | None:
    """Free bytes of host memory, for all ranks of this machine. None if unknown.

    The lesser of the machine's available memory and the room below each cgroup limit (page cache
    counts as free). HFPATCH_HOST_MEMORY, in bytes, replaces it if the system reports less than may
    be used (virtual machines whose memory grows). It is given once, so what the pools of all ranks,
    which are alike, hold by now is subtracted.
    """
    given = os.environ.get("HFPATCH_HOST_MEMORY")
    if given is not None:
        if not (given.isascii() and given.isdigit()):
            raise ValueError(
                f"hfpatch: HFPATCH_HOST_MEMORY must be a number of bytes, got {given!r}. For 110 "
                "GiB write 118111600640."
            )
        return max(0, int(given) - _held * environment_number("LOCAL_WORLD_SIZE", 1, 1))
    root = Path(root)
    left = []
    for folder, limit, usage, cache in cgroup_paths(root):
        limit_bytes, used = read_number(folder / limit), read_number(folder / usage)
        if limit_bytes is None or used is None:
            continue
        reclaimable = 0
        if (folder / "memory.stat").exists():
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == cache and value.isdigit():
                    reclaimable = int(value)
        left.append(max(0, limit_bytes - used + reclaimable))
    info = meminfo(root)
    available = info.get("MemAvailable", info.get("MemFree"))
    if available is not None:
        left.append(available)
    return min(left, default=None)


def gpu_free(device=None) -> int | None:
    """Bytes that PyTorch can still allocate on a CUDA device; None on a machine without CUDA.

    Free bytes and unused ones of its caching allocator, within the process's own share
    (torch.cuda.set_per_process_memory_fraction).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    return (
        max(0, min(free, share_of_device(total, device) - reserved))
        + reserved
        - torch.cuda.memory_allocated(device)
    )


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
    local = getattr(parameter, "to_local", None)
    return part if part is not None else parameter if local is None else local()


def to_come(parameters, device) -> int:
    """Bytes on a device that a step will allocate for gradients that do not exist yet."""
    own = [_own(p) for p in parameters if p.requires_grad and p.grad is None]
    return sum(t.numel() * t.element_size() for t in own if t.device == device)
