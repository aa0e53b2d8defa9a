"""`hfpatch env`: versions, devices, attention backends, limits, and problems with their fixes.

`gather` reads the machine and changes nothing. `problems` is a function of the gathered facts, so
that a test can check the facts of other machines.
"""

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sysconfig
from dataclasses import asdict

from hfpatch.budget.free import ALLOCATOR, host_free
from hfpatch.cli.env_problems import NO_GPU, SLOW, problems
from hfpatch.lab.profile.timeline import versions
from hfpatch.lab.tables import gib, size, table
from hfpatch.planner.machine import cores, host_limit

PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "liger-kernel", "trl",
            "peft",
            "torchao", "flash-attn", "datasets")  # fmt: skip
SETTINGS = (*SLOW, "CUDA_VISIBLE_DEVICES", *ALLOCATOR)


def add_arguments(parser) -> None:
    parser.add_argument("--json", action="store_true", help="everything on stdout as JSON")


def main(args) -> int:
    facts = gather()
    found = problems(facts)
    if args.json:
        print(json.dumps(facts | {"problems": [asdict(p) for p in found]}, indent=1))
    else:
        show(facts, found)
    return 0


def gather() -> dict:
    """The facts: installed versions, devices, limits. Sizes in bytes."""
    found = versions(PACKAGES)
    none = {"torch_cuda": None, "gpus": [], "attention": {}}
    return {
        "versions": found,
        "drivers": _driver(),
        "limits": _limits(),
        "builds": _builds(),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    } | (_torch_facts() if found["torch"] else none)


def _builds() -> dict:
    """The tools with which Triton compiles its launchers: a C compiler, and Python's headers."""
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return {
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "python_headers": os.path.exists(headers),
    }


def _driver() -> list[dict]:
    """The GPUs that the driver sees, whether or not torch does."""
    if shutil.which("nvidia-smi") is None:
        # A container without the driver's tools may still hold the device.
        there = [d for d in ("/dev/nvidia0", "/dev/kfd") if os.path.exists(d)]
        return [{"name": f"GPU at {d}", "driver": "unknown", "memory_mib": "?"} for d in there]
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in text.split(",")] for text in done.stdout.splitlines()]
    return [{"name": r[0], "driver": r[1], "memory_mib": r[2]} for r in rows if len(r) == 3]


def _torch_facts() -> dict:
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(there)]
    gpus = [
        {"name": one.name, "bytes": one.total_memory, "capability": [one.major, one.minor]}
        for one in found
    ]
    cuda = torch.backends.cuda
    attention = {"sdpa flash (CPU)": True}
    if gpus:
        attention = {
            "sdpa flash": cuda.flash_sdp_enabled() and cuda.is_flash_attention_available(),
            "sdpa cudnn": cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available(),
            "sdpa memory-efficient": cuda.mem_efficient_sdp_enabled(),
            "varlen (packed documents)": importlib.util.find_spec("torch.nn.attention.varlen")
            is not None,
        }
    attention["flash-attn package"] = importlib.util.find_spec("flash_attn") is not None
    return {
        "torch_cuda": torch.version.cuda or torch.version.hip,
        "gpus": gpus,
        "attention": attention,
    }


def _limits() -> dict:
    """Host memory, the container's share of it, locked memory, shared memory, disk."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    return {
        "host_bytes": total,
        "container_bytes": host_limit(),
        "host_free_bytes": host_free(),
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shared_memory_bytes": shared,
        "disk_free_bytes": shutil.disk_usage(".").free,
        "cpus": cores(),
    }


def show(facts, found) -> None:
    """Prints the facts and the problems."""
    limits = facts["limits"]
    gpus = [
        f"{gpu['name']}, {gib(gpu['bytes'])}, compute capability "
        f"{'.'.join(map(str, gpu['capability']))}"
        for gpu in facts["gpus"]
    ]
    there = [name for name, on in facts["attention"].items() if on]
    none = {"locked_bytes": "unlimited", "host_free_bytes": "?"}
    of = {k: none.get(k, "none") if n is None else size(n) for k, n in limits.items()}
    rows = [
        *((name, version) for name, version in facts["versions"].items() if version),
        ("torch's CUDA", facts["torch_cuda"] or "none: built for the CPU"),
        *(
            ("driver", f"{one['driver']}, {one['name']}, {one['memory_mib']} MiB")
            for one in facts["drivers"]
        ),
        *(("GPU", gpu) for gpu in gpus or [NO_GPU]),
        ("attention", ", ".join(there) or "none"),
        ("host memory", f"{of['host_bytes']}, free {of['host_free_bytes']}"),
        ("container limit", of["container_bytes"]),
        ("locked memory (ulimit -l)", of["locked_bytes"]),
        ("/dev/shm", of["shared_memory_bytes"]),
        ("disk, free here", of["disk_free_bytes"]),
        ("CPUs", limits["cpus"]),
        *facts["environment"].items(),
    ]
    print(table(rows))
    print("\nWhat would go wrong:" if found else "\nNothing found that would go wrong.")
    for problem in found:
        print(f"- {problem.what}\n  Fix: {problem.fix}")
