"""The problems that `hfpatch env` reports: versions, devices, limits, settings."""

from dataclasses import dataclass

from hfpatch import OLDEST
from hfpatch.lab.hardware import GiB

TRUE = ("1", "true", "yes", "on")
# name -> (first version that works, first that does not): setup.cfg's bounds, and Python's own.
SUPPORTED = {
    "python": ((3, 10), None),
    "torch": (OLDEST["torch"], None),
    "transformers": (OLDEST["transformers"], (6,)),
}


NO_GPU = (
    "none that torch can use: hfpatch plan, profile and the tests work, training runs as plain "
    "PyTorch on the CPU, correct but slow; fused kernels and copies beside compute need a GPU"
)


@dataclass(frozen=True)
class Problem:
    """A problem and its fix, one sentence each."""

    what: str
    fix: str


def _numbers(version: str) -> tuple:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def problems(facts: dict) -> list[Problem]:
    """The problems of a machine with these facts (as `gather` returns them)."""
    return [
        *_version_problems(facts),
        *_device_problems(facts),
        *_limit_problems(facts),
    ]


def _version_problems(facts):
    for name, (first, beyond) in SUPPORTED.items():
        version = facts["versions"].get(name)
        wanted = f">={'.'.join(map(str, first))}" + (f",<{beyond[0]}" if beyond else "")
        if version is None:
            yield Problem(f"{name} is not installed.", f"pip install '{name}{wanted}'")
        elif _numbers(version) < first or (beyond and _numbers(version) >= beyond):
            fix = (
                f"pip install '{name}{wanted}'" if name != "python" else "use Python 3.10 or newer"
            )
            yield Problem(f"{name} {version} is not supported, {wanted} is.", fix)
    if facts["gpus"] and facts["versions"].get("triton") is None:
        yield Problem(
            "There is a GPU and no triton: the fused kernels cannot run.", "pip install triton"
        )
    elif facts["gpus"] and not facts["builds"]["compiler"]:
        what = "There is no C compiler; Triton needs one."
        yield Problem(what, "apt-get install gcc, or export CC=/path/to/one")
    elif facts["gpus"] and not facts["builds"]["python_headers"]:
        what = "Python's headers (Python.h) are missing; Triton needs them."
        yield Problem(what, "apt-get install python3-dev, of the version that runs this")


def _device_problems(facts):
    environment, gpus = facts["environment"], facts["gpus"]
    if facts["drivers"] and not gpus:
        name, driver = facts["drivers"][0]["name"], facts["drivers"][0]["driver"]
        if facts["torch_cuda"] is None:
            what = (
                f"torch {facts['versions'].get('torch')} is built for CPUs only, and there is a "
                f"{name}."
            )
            yield Problem(
                what,
                "install the CUDA build of the same version: see https://pytorch.org/get-started",
            )
        elif "CUDA_VISIBLE_DEVICES" in environment:
            what = (
                "torch sees no GPU: CUDA_VISIBLE_DEVICES is "
                f"{environment['CUDA_VISIBLE_DEVICES']!r}."
            )
            yield Problem(what, "unset it, or name a GPU that is there")
        else:
            what = (
                f"torch is built for CUDA {facts['torch_cuda']}, and driver {driver} gives it no "
                "GPU."
            )
            yield Problem(what, "update the driver, or install a torch built for an older CUDA")
    for gpu in gpus:
        if tuple(gpu["capability"]) < (8, 0):
            what = (
                f"{gpu['name']} (compute capability "
                f"{gpu['capability'][0]}.{gpu['capability'][1]}) has no bfloat16."
            )
            yield Problem(
                what, "use an Ampere GPU (A100, RTX 30) or newer, or float16 with a loss scaler"
            )
    if gpus and _set(environment.get("TRITON_INTERPRET")):
        yield Problem(
            "TRITON_INTERPRET is set: kernels run in Python, thousands of times slower.",
            "unset TRITON_INTERPRET",
        )
    if gpus and _set(environment.get("CUDA_LAUNCH_BLOCKING")):
        yield Problem(
            "CUDA_LAUNCH_BLOCKING is set: no copy overlaps with compute.",
            "unset CUDA_LAUNCH_BLOCKING",
        )
    if gpus and _set(environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING")):
        what = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: every allocation waits for the GPU."
        yield Problem(what, "unset PYTORCH_NO_CUDA_MEMORY_CACHING")
    settings = environment.get("PYTORCH_ALLOC_CONF", "") + environment.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    if gpus and "expandable_segments" not in settings:
        what = "Without expandable segments the allocator fragments at long sequences."
        yield Problem(
            what, "export PYTORCH_ALLOC_CONF=expandable_segments:True (hfpatch train does)"
        )


def _limit_problems(facts):
    limits, gpus = facts["limits"], facts["gpus"]
    if (
        limits["container_bytes"] is not None
        and limits["container_bytes"] < 0.5 * limits["host_bytes"]
    ):
        share, whole = limits["container_bytes"] / GiB, limits["host_bytes"] / GiB
        what = (
            f"The container may use {share:.0f} of the machine's {whole:.0f} GiB: offloaded "
            "memory counts against it."
        )
        yield Problem(
            what,
            "start it with more (docker run --memory), or pass hfpatch plan --host-ram that much",
        )
    if (
        len(gpus) > 1
        and limits["shared_memory_bytes"] is not None
        and limits["shared_memory_bytes"] < GiB
    ):
        what = (
            f"/dev/shm has {limits['shared_memory_bytes'] >> 20} MiB: NCCL and data workers of "
            "several GPUs need more."
        )
        yield Problem(what, "start the container with --shm-size=16g or --ipc=host")
    if (
        facts["versions"].get("deepspeed")
        and limits["locked_bytes"] is not None
        and limits["locked_bytes"] < GiB
        and gpus
    ):
        what = (
            f"ulimit -l is {limits['locked_bytes'] >> 10} KiB: DeepSpeed's NVMe offload cannot "
            "lock its buffers."
        )
        yield Problem(what, "ulimit -l unlimited, or docker run --ulimit memlock=-1")


def _set(value) -> bool:
    return str(value).lower() in TRUE
