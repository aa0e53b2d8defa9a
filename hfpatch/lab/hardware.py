"""GPUs of the planner: memory, rates and the link to the host, each with its source. Standard
library only.

The table has data sheet peaks for dense bfloat16 with float32 sums. MATMUL_SHARE and the attention
columns give the part that a training step reaches. `--gpu this` measures the machine instead
(planner/measure.py).
"""

from dataclasses import dataclass

from hfpatch.budget.policy import refuse_unknown

GiB = 1 << 30

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
DISK_WRITES, DISK_READS = 3.5e9, 6.5e9
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
        known = gpu_named(self.name) if self.measured else None
        return (known or self).peak_flops

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


_A100 = "NVIDIA A100 data sheet (2021); attention: FlashAttention-2 (Dao, 2023), fig. 5 and 6"
# The backward: profiles/rates.
_HOPPER = (
    "NVIDIA {} data sheet; attention forward: published 539 TFLOP/s with cuDNN; backward 0.94 of it "
    "by published steps"
)
_SHARES = "{}; attention assumed at 0.5 (forward) and 0.4 (backward) of the peak"

# Links to other GPUs: one direction, half of the sum that the same data sheets give (NVLink 600,
# 900, 1800; Infinity Fabric 7 x 128); 0 if GPUs exchange over the host link.
#   name             GiB   TFLOP/s  TB/s    GB/s link  attention TFLOP/s fwd, bwd, processors, GB/s
# to other GPUs
_ROWS = (
    ("a100-40gb",    40.0, 312.0,   1.555,  32.0, 190.0,  165.0, 108, 300.0,  _A100),
    ("a100-80gb",    80.0, 312.0,   2.039,  32.0, 190.0,  165.0, 108, 300.0,  _A100),
    ("h100",         79.6, 989.4,   3.35,   64.0, 539.0,  507.0, 132, 450.0,
     _HOPPER.format("H100 SXM")),
    ("h200",         139.8, 989.4,  4.8,    64.0, 539.0,  507.0, 132, 450.0,
     _HOPPER.format("H200 SXM")),
    ("b200",         179.0, 2250.0, 8.0,    64.0, 1125.0, 900.0, 148, 900.0,
     _SHARES.format("NVIDIA DGX B200 data sheet / 8")),
    ("l40s",         45.0, 362.0,   0.864,  32.0, 181.0,  145.0, 142, 0.0,
     _SHARES.format("NVIDIA L40S data sheet")),
    ("l4",           22.0, 121.0,   0.3,    32.0, 60.5,   48.4, 58, 0.0,
     _SHARES.format("NVIDIA L4 data sheet")),
    ("a10g",         22.0, 70.0,    0.6,    32.0, 35.0,   28.0, 80, 0.0,
     _SHARES.format("NVIDIA A10G data sheet")),
    ("rtxa6000",     47.5, 154.8,   0.768,  32.0, 77.4,   61.9, 84, 0.0,
     _SHARES.format("NVIDIA RTX A6000 data sheet")),
    ("rtx3090",      24.0, 71.0,    0.936,  32.0, 35.5,   28.4, 82, 0.0,
     _SHARES.format("NVIDIA GA102 white paper")),
    ("rtx4090",      24.0, 165.2,   1.008,  32.0, 82.6,   66.1, 128, 0.0,
     _SHARES.format("NVIDIA Ada white paper")),
    ("rtx5090",      31.8, 209.5,   1.792,  64.0, 104.8,  83.8, 170, 0.0,
     _SHARES.format("NVIDIA Blackwell white paper")),
    ("mi300x",       192.0, 1307.4, 5.3,    64.0, 392.0,  327.0, 304, 448.0,
     "AMD Instinct MI300X data sheet; attention assumed at 0.3 (forward) and 0.25 (backward) of "
     "the peak"),
)  # fmt: skip

_MAJORS = {"h100": 9, "h200": 9, "mi300x": 9, "b200": 10, "rtx5090": 12}  # others: 8

GPUS = {
    name: Gpu(
        name, int(gib * GiB), tera * 1e12, tb * 1e12, link * 1e9, fwd * 1e12, bwd * 1e12, source,
        processors, peer=peer * 1e9, major=_MAJORS.get(name, 8),
    )
    for name, gib, tera, tb, link, fwd, bwd, processors, peer, source in _ROWS
}  # fmt: skip
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
    plain = str(name).lower().replace(" ", "").replace("_", "-")
    names = (plain, _ALIASES.get(plain, ""), plain.replace("-", ""))
    known = next((one for one in names if one in GPUS), str(name))
    refuse_unknown([known], (*GPUS, "this", "24GiB"), "--gpu")
    return GPUS[known]


def gpu_named(device_name: str) -> Gpu | None:
    """The row of a card by its driver's name ("NVIDIA A100-SXM4-80GB"), or None."""
    words = device_name.lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(words):  # cards of the same name with lower clocks
        return None
    words = [w for w in words if w not in ("nvidia", "geforce", "amd", "instinct")]
    rows = [
        (name.partition("-")[2] in "".join(words), gpu)
        for name, gpu in GPUS.items()
        if name.partition("-")[0] in ("".join(words[:1]), "".join(words[:2]))
    ]
    # if the card comes with two memories, the row of the memory in its name
    return max(rows, key=lambda row: row[0])[1] if rows else None
