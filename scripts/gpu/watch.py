"""Memory of a step while it runs, on the device and on the host, and the policy as a row has it."""

import resource
import threading

import common  # noqa: F401  (its root, where hfpatch is not installed)
import torch

from hfpatch.lab.watch import GiB, policy_used


def owned_bytes(model) -> int:
    """Parameters, and buffers beside them: a base in 4 bits keeps its scales there."""
    return sum(
        t.numel() * t.element_size()
        for group in (model.parameters(), model.buffers())
        for t in group
    )


class GradWatch:
    """The step's peak and what of it was gradients then, from the allocator's counters, read at
    each gradient."""

    def __init__(self, model):
        self.alive, self.moments, self.reserved = 0, [], 0
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.parameters = owned_bytes(model)
        self.hooks = [p.register_post_accumulate_grad_hook(self._grown) for p in parameters]
        self._reset()

    def _reset(self):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _note(self):
        if torch.cuda.is_available():
            self.moments.append((torch.cuda.max_memory_allocated(), self.alive))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
            self._reset()

    def _grown(self, parameter):
        self._note()
        self.alive += parameter.grad.numel() * parameter.grad.element_size()

    def close(self, before: int) -> dict:
        """Takes the hooks off. before: bytes on the device that belong to nobody here (ballast,
        other tensors)."""
        self._note()
        for hook in self.hooks:
            hook.remove()
        if not self.moments:
            return {}
        peak, gradients = max(self.moments)
        beyond = max(total - alive for total, alive in self.moments) - self.parameters - before
        return {
            "peak_gib": (peak - before) / GiB,
            "reserved_gib": (self.reserved - before) / GiB,
            "beyond_gib": (peak - gradients - self.parameters - before) / GiB,
            "beyond_at_most_gib": beyond / GiB,
            "parameters_gib": self.parameters / GiB,
            "gradients_gib": self.alive / GiB,
        }


class HostWatch:
    """The machine's host memory in use, beyond what was in use at the start; sampled by a
    thread."""

    def __init__(self, every: float = 0.1):
        self.every, self.low = every, self._available()
        self.start, self.stop = self.low, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    @staticmethod
    def _meminfo(name: str) -> int:
        with open("/proc/meminfo") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name)), 0)

    def _available(self) -> int:
        # A virtual machine's total can grow as it is used: what is in use is the total less what is
        # available.
        return self._meminfo("MemAvailable:") - self._meminfo("MemTotal:")

    def _watch(self):
        while not self.stop.wait(self.every):
            self.low = min(self.low, self._available())

    def close(self) -> dict:
        self.stop.set()
        self.thread.join()
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "host_used_gib": (self.start - min(self.low, self._available())) / GiB,
            "host_rss_gib": own / GiB,
        }


def policy_of(model) -> str:
    """The policy of the last shape as 10_plan.py reads it; "" where nothing ran in tiles."""
    p = policy_used(model)
    if p is None:
        return ""
    flags = f"save={int(p.save_attention)} again={p.again} wide={int(p.wide)}"
    kept = f"tile={p.tile} plain={p.plain} keep={','.join(p.keep)}"
    return f"{p.offload} every={p.every} {flags} {kept}"
