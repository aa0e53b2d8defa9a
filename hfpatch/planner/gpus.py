"""What plans know of GPUs beyond budget/hardware.py: names as users write them, the memory left for
tensors, the peak that MFU refers to. Standard library only.
"""

from hfpatch.budget.hardware import GPUS, GiB, Gpu, gpu_named

# Error of the step model: 16 of the 19 published steps that fitted no constant are within it
# (profiles/rates).
SECONDS_ERROR = 0.14
# Driver, CUDA context, cuBLAS workspaces and kernels, before a tensor exists. Assumed.
CONTEXT_BYTES = 1 * GiB
DISK = "one drive that writes 3.5 and reads 6.5 GB/s (assumed)"
FLOAT8_GPUS = ("h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", "mi300x")
_ALIASES = {
    "a100": "a100-80gb",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "4090": "rtx4090",
    "5090": "rtx5090",
}


def gpu_row(name: str) -> Gpu:
    """The row called name, in any case, with or without spaces and dashes.

    Raises:
        ValueError: no such row; the message lists all names.
    """
    plain = str(name).lower().replace(" ", "").replace("_", "-")
    for candidate in (plain, _ALIASES.get(plain, ""), plain.replace("-", "")):
        if candidate in GPUS:
            return GPUS[candidate]
    raise ValueError(
        f"hfpatch: the known GPUs are {', '.join(GPUS)} and this, {name!r} came; pass one of them."
    )


def usable_bytes(gpu: Gpu) -> int:
    """Memory left for tensors."""
    return gpu.memory_bytes - CONTEXT_BYTES


def data_sheet_flops(gpu: Gpu) -> float:
    """The peak that MFU refers to: the data sheet's, also for a measured card of the table."""
    known = gpu_named(gpu.name) if gpu.measured else None
    return (known or gpu).peak_flops
