"""A CUDA device's counters, read on the host without waiting. All but `host` are the caching
allocator's.
"""

from dataclasses import dataclass

import torch

from hfpatch.budget.free import gpu_free, held, share_of_device
from hfpatch.store.device import device_for


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes allocated now and at most, errors and retries of the allocator so far. gaps: free bytes
    beside tensors in segments that do not expand, which serve small tensors alone. host: bytes of host
    memory that checkpoints hold."""

    allocated: int = 0
    peak: int = 0
    ooms: int = 0
    retries: int = 0
    gaps: int = 0
    host: int = 0


class Gauge:
    """A CUDA device's counters."""

    def __init__(self, device: torch.device):
        self.device = device

    def read(self) -> Counters:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        whole = stats["allocated_bytes"]["all"]
        gaps = stats["inactive_split_bytes"]["all"]["current"]  # none where segments expand
        return Counters(
            whole["current"],
            whole["peak"],
            stats["num_ooms"],
            stats["num_alloc_retries"],
            gaps,
            held(),
        )

    def limit(self) -> int:
        """The most bytes that can be allocated; asks the driver."""
        return gpu_free(self.device) + self.read().allocated

    def card(self) -> int:
        return share_of_device(torch.cuda.mem_get_info(self.device)[1], self.device)

    def clock(self):
        """An event on the compute stream that knows its time."""
        return device_for(self.device).clock()
