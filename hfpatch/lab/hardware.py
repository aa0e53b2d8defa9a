"""GPUs of the planner: memory, rates and the link to the host, each with its source. Standard
library only.

gpus.json has data sheet peaks for dense bfloat16 with float32 sums. MATMUL_SHARE and the attention
columns give the part that a training step reaches. `--gpu this` measures the machine instead
(planner/measure.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from hfpatch.budget.limits import GiB
from hfpatch.budget.policy import refuse_unknown

# Fitted to the rows of profiles/rates marked `fits`: the share of the data sheet that large bf16
# matmuls reach in a training step, and the tokens that a row of attention costs beyond its own.
MATMUL_SHARE = 0.61
ATTENTION_RAMP = 450
# Error of the step model: 16 of the 19 published steps that fitted no constant are within it
# (profiles/rates).
SECONDS_ERROR = 0.14
# A large copy on the device reaches about 0.9 of the data sheet's memory bandwidth (assumed).
MEMORY_SHARE = 0.90
# A pinned copy reaches about 0.8 of the link's nominal rate.
LINK_SHARE = 0.80
# Driver, CUDA context, cuBLAS workspaces and kernels, before a tensor exists. Assumed.
CONTEXT_BYTES = 1 * GiB
# Collectives of cards without links to each other pass through host memory: NCCL counts 10 GB/s
# between the sockets of a machine with eight RTX 4090 (its topology log, nccl-tests issue 307).
SOCKET_RATE = 10e9
# Host memory bandwidth that one process reaches in a fused Adam step, bytes/s. Assumed: half a
# 12-channel DDR5 socket.
HOST_BYTES_PER_SECOND = 200e9
# Files of the disk tier, bytes/s of the machine: the maker's sequential rates of one PCIe 4.0 x4
# drive (Samsung PM9A3, U.2).
DISK_WRITES = 3.5e9
DISK_READS = 6.5e9
DISK = "one drive that writes 3.5 and reads 6.5 GB/s (assumed)"


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory and rates, in bytes, FLOP/s and bytes/s.

    memory_bytes: as the driver reports.
    link: one direction of the host link.
    attention_forward, attention_backward: causal attention of head dim 128 at 16k tokens and more,
        counting FLOPs of the causal half.
    processors: SMs or compute units; each runs one block of attention.
    measured: the rates were measured on this machine, so no share is applied to them.
    peer: one direction of the links to the machine's other GPUs; 0 if they exchange through the
        host.
    sharing: GPUs that use the machine's disk at once.
    float8: speedup of the layers' matmuls in float8 (`plan --fp8`); 1.0 without it.
    major: the first number of the compute capability, by which operations pick their kernels.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    bandwidth: float
    link: float
    attention_forward: float
    attention_backward: float
    source: str
    processors: int = 108
    measured: bool = False
    peer: float = 0.0
    sharing: int = 1
    float8: float = 1.0
    major: int = 8

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of large matmuls, for plans."""
        share = 1.0 if self.measured else MATMUL_SHARE
        return share * self.peak_flops * self.float8

    @property
    def memory_rate(self) -> float:
        """Bytes/s of kernels that only move memory, for plans."""
        return self.bandwidth if self.measured else MEMORY_SHARE * self.bandwidth

    @property
    def data_sheet_flops(self) -> float:
        """The peak that MFU refers to: the data sheet's, also for a measured card of the table."""
        listed = gpu_named(self.name) if self.measured else None
        return (listed or self).peak_flops

    @property
    def link_rate(self) -> float:
        """Bytes/s of pinned copies in one direction, for plans."""
        return self.link if self.measured else LINK_SHARE * self.link

    @property
    def peer_rate(self) -> float:
        """Bytes/s of exchanges between a machine's GPUs in one direction, for plans."""
        if not self.peer:
            return min(self.link_rate, SOCKET_RATE)
        return self.peer if self.measured else LINK_SHARE * self.peer

    @property
    def disk_rates(self) -> tuple[float, float]:
        """Bytes/s at which files are (written, read), for plans: this GPU's share."""
        return DISK_WRITES / self.sharing, DISK_READS / self.sharing

    @property
    def usable_bytes(self) -> int:
        """Memory left for tensors."""
        return self.memory_bytes - CONTEXT_BYTES


# gpus.json has data sheet units. Its links to other GPUs are one direction: half of the sum that the
# data sheets give (NVLink 600, 900, 1800; Infinity Fabric 7 x 128), 0 if GPUs exchange over the host
# link. The attention backward of Hopper: profiles/rates.
_ROWS = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
GPUS = {
    name: Gpu(
        name=name,
        memory_bytes=int(row["gib"] * GiB),
        peak_flops=row["tflops"] * 1e12,
        bandwidth=row["tb_s"] * 1e12,
        link=row["link_gb_s"] * 1e9,
        attention_forward=row["attention_forward_tflops"] * 1e12,
        attention_backward=row["attention_backward_tflops"] * 1e12,
        source=row["source"],
        processors=row["processors"],
        peer=row["peer_gb_s"] * 1e9,
        major=row["major"],
    )
    for name, row in _ROWS.items()
}
_ALIASES = {
    "a100": "a100-80gb",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "a6000": "rtxa6000",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}


def gpu_row(name: str) -> Gpu:
    """The row called name, in any case, with or without spaces and dashes.

    Raises:
        ValueError: no such row; the message lists all names.
    """
    normalized = str(name).lower().replace(" ", "").replace("_", "-")
    names = (normalized, _ALIASES.get(normalized, ""), normalized.replace("-", ""))
    key = next((one for one in names if one in GPUS), str(name))
    refuse_unknown([key], (*GPUS, "this", "24GiB"), "--gpu")
    return GPUS[key]


def gpu_named(device_name: str) -> Gpu | None:
    """The row of a card by its driver's name ("NVIDIA A100-SXM4-80GB"), or None."""
    words = device_name.lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(words):  # cards of the same name with lower clocks
        return None
    words = [w for w in words if w not in ("nvidia", "geforce", "amd", "instinct")]
    whole = "".join(words)
    names = ("".join(words[:1]), "".join(words[:2]))
    rows = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in names]
    # if the card comes with two memories, the row of the memory in its name
    return max(rows, key=lambda gpu: gpu.name.partition("-")[2] in whole, default=None)
