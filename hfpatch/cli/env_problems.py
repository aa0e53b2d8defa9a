"""The problems that `hfpatch env` reports: versions, devices, limits, settings."""

import re
from dataclasses import dataclass

from hfpatch import OLDEST
from hfpatch.budget.free import ALLOCATOR
from hfpatch.lab.tables import GiB, gib, size

TRUE = ("1", "true", "yes", "on")
# name -> (first version that works, first that does not): setup.cfg's bounds, and Python's own.
SUPPORTED = {
    "python": ((3, 10), None),
    "torch": (OLDEST["torch"], None),
    "transformers": (OLDEST["transformers"], (6,)),
}


NO_GPU = (
    "none that torch can use: hfpatch plan, profile and the tests work, training runs as plain "
    "PyTorch on the CPU, correct but slow; fused kernels and overlapped copies need a GPU"
)


@dataclass(frozen=True)
class Problem:
    """A problem and its fix, one sentence each."""

    what: str
    fix: str


def _numbers(version: str) -> tuple:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    return tuple(int(digits) for digits in re.findall(r"^\d+|(?<=\.)\d+", version.split("+")[0]))


def problems(facts: dict) -> list[Problem]:
    """The problems of a machine with these facts (as `gather` returns them)."""
    rules = [
        *_version_rules(facts),
        *_gpu_rules(facts),
        *_setting_rules(facts),
        *_limit_rules(facts),
    ]
    return [Problem(what, fix) for wrong, what, fix in rules if wrong]


def _version_rules(facts):
    """(whether it is a problem, the problem, its fix), as the next ones."""
    for name, (first, beyond) in SUPPORTED.items():
        version = facts["versions"].get(name)
        wanted = f">={'.'.join(map(str, first))}" + (f",<{beyond[0]}" if beyond else "")
        install = f"pip install '{name}{wanted}'"
        fix = "use Python 3.10 or newer" if name == "python" else install
        number = _numbers(version or "0")
        outside = number < first or bool(beyond and number >= beyond)
        yield version is None, f"{name} is not installed.", install
        yield version and outside, f"{name} {version} is not supported, {wanted} is.", fix
    builds = facts["builds"]
    gpus = facts["gpus"]
    triton = facts["versions"].get("triton")
    yield (
        gpus and triton is None,
        "There is a GPU and no triton: the fused kernels cannot run.",
        "pip install triton",
    )
    yield (
        gpus and triton and not builds["compiler"],
        "There is no C compiler; Triton needs one.",
        "apt-get install gcc, or export CC=/path/to/one",
    )
    yield (
        gpus and triton and builds["compiler"] and not builds["python_headers"],
        "Python's headers (Python.h) are missing; Triton needs them.",
        "apt-get install python3-dev, of the version that runs this",
    )


def _gpu_rules(facts):
    cuda = facts["torch_cuda"]
    shown = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    for driver in facts["drivers"][:1] if not facts["gpus"] else ():
        yield (
            cuda is None,
            f"torch {facts['versions'].get('torch')} is built for CPUs only, and there is a "
            f"{driver['name']}.",
            "install the CUDA build of the same version: see https://pytorch.org/get-started",
        )
        yield (
            cuda is not None and shown is not None,
            f"torch sees no GPU: CUDA_VISIBLE_DEVICES is {shown!r}.",
            "unset it, or name an existing GPU",
        )
        yield (
            cuda is not None and shown is None,
            f"torch is built for CUDA {cuda}, and driver {driver['driver']} gives it no GPU.",
            "update the driver, or install a torch built for an older CUDA",
        )
    for gpu in facts["gpus"]:
        yield (
            tuple(gpu["capability"]) < (8, 0),
            f"{gpu['name']} (compute capability {'.'.join(map(str, gpu['capability']))}) has no "
            "bfloat16.",
            "use an Ampere GPU (A100, RTX 30) or newer, or float16 with a loss scaler",
        )


# A variable that is set -> what it does.
SLOW = {
    "TRITON_INTERPRET": "kernels run in Python, thousands of times slower",
    "CUDA_LAUNCH_BLOCKING": "no copy overlaps with compute",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the GPU",
}


def _setting_rules(facts):
    environment = facts["environment"]
    gpus = facts["gpus"]
    for name, effect in SLOW.items():
        yield (
            gpus and environment.get(name, "").lower() in TRUE,
            f"{name} is set: {effect}.",
            f"unset {name}",
        )
    settings = "".join(environment.get(name, "") for name in ALLOCATOR)
    yield (
        gpus and "expandable_segments" not in settings,
        "Without expandable segments the allocator fragments at long sequences.",
        "export PYTORCH_ALLOC_CONF=expandable_segments:True (hfpatch train does)",
    )


def _limit_rules(facts):
    gpus = facts["gpus"]
    limits = facts["limits"]
    # None is no limit.
    share, shared, locked = (
        float("inf") if limits[name] is None else limits[name]
        for name in ("container_bytes", "shared_memory_bytes", "locked_bytes")
    )
    yield (
        share < 0.5 * limits["host_bytes"],
        f"The container may use {gib(share)} of the machine's {gib(limits['host_bytes'])}: "
        "offloaded memory counts against it.",
        "start it with more (docker run --memory), or pass hfpatch plan --host-ram that much",
    )
    yield (
        len(gpus) > 1 and shared < GiB,
        f"/dev/shm has {size(shared)}: NCCL and data workers of several GPUs need more.",
        "start the container with --shm-size=16g or --ipc=host",
    )
    yield (
        gpus and facts["versions"].get("deepspeed") and locked < GiB,
        f"ulimit -l is {size(locked)}: DeepSpeed's NVMe offload cannot lock its buffers.",
        "ulimit -l unlimited, or docker run --ulimit memlock=-1",
    )
