"""How many bytes of a device the layers of a step may take: what is free less what is still to come, and what steps have shown.

Where a step took more than was planned, or ran out of memory, the next one is given less. Nothing is learnt of memory in which
attention's backends were tried (ops/attention.py). Where several ranks must choose alike (`alone` is False) nothing is learnt:
each would learn something else.
"""

import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hfpatch.compat import is_shard
from hfpatch.memory.choice import reserve
from hfpatch.memory.free import gpu_free, to_come
from hfpatch.memory.hardware import Gpu, gpu_named
from hfpatch.ops.attention import trial_peaks, trials_without_room

ROOMS = weakref.WeakSet()
SHRINK = 0.85  # of what a step took that ran out of memory


class Gauge:
    """A CUDA device's counters, in bytes; ooms: how often its memory ran out."""

    def __init__(self, device: torch.device):
        self.device = device

    def free(self) -> int:
        return gpu_free(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def ooms(self) -> int:
        return torch.cuda.memory_stats(self.device).get("num_ooms", 0)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        torch.cuda.synchronize(self.device)

    def gpu(self) -> Gpu | None:
        return gpu_named(torch.cuda.get_device_name(self.device))


def told(optimizer: torch.optim.Optimizer) -> list["Room"]:
    """The rooms whose model it trains. Where it holds nobody's parameters: all of them, if it may be an engine's, which holds flat
    ones; of another model's, those whose own model is frozen, for it trains what stands around that (a projector, prompts)."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    of_rooms = {room: set(room.parameters() or ()) for room in list(ROOMS)}
    found = [room for room, own in of_rooms.items() if not held.isdisjoint(own)]
    of_a_model = held and all(isinstance(p, nn.Parameter) and not is_shard(p) for p in held)
    if found or not of_a_model:
        return found or [*of_rooms]
    return [room for room, own in of_rooms.items() if not any(p.requires_grad for p in own)]


class Room:
    """Of one device. parameters: a function giving the model's, or None of one that is gone; first_step: called once, as the
    first optimizer step has ended."""

    def __init__(self, gauge: Gauge, parameters, first_step=lambda: None):
        self.gauge, self.parameters, self.first_step = gauge, parameters, first_step
        self.gpu, self.ooms = gauge.gpu(), self._ooms()
        self.alone = True
        self.stepped = False  # whether an optimizer has: then its states are there, or never will be
        self.learnt: str | None = None  # why the next step keeps something else
        self.over, self.most = 1.0, None  # bytes measured over those planned; a bound that running out has set
        # (allocated and peak as it began, bytes planned), until an optimizer has stepped.
        self.step: tuple | None = None
        self.measured = False  # whether its backward has ended
        me = weakref.ref(self)
        for register, what in (
            (register_optimizer_step_pre_hook, Room.measure), (register_optimizer_step_post_hook, Room.end)
        ):  # fmt: skip
            tell = lambda stepping, *_, what=what: what(me()) if me() in told(stepping) else None  # noqa: E731
            weakref.finalize(self, register(tell).remove)
        ROOMS.add(self)

    def bytes(self, gathered: int = 0) -> int:
        """For the step that begins. gathered: what an engine takes for weights that it shards."""
        # Adam's two states, until a step has shown what there is.
        room = self.gauge.free() - self._to_come(states=0 if self.stepped else 2) - gathered
        return max(0, int((room if self.most is None else min(room, self.most)) / self.over))

    def _to_come(self, states: int = 0) -> int:
        return to_come(self.parameters() or (), states=states, device=self.gauge.device)

    def _ooms(self) -> int:
        """How often a step ran out of memory."""
        return self.gauge.ooms() - trials_without_room[self.gauge.device]

    def end(self) -> None:
        """An optimizer has stepped."""
        self.step = None
        if not self.stepped:
            self.stepped, self.learnt = True, self.learnt or ""
            self.gauge.wait()
            self.first_step()

    def begin(self, planned: int | None) -> None:
        """A step begins whose layers take `planned` bytes."""
        now = self.gauge.allocated(), self.gauge.peak(), planned, self._to_come()
        self.step, self.measured = None if planned is None else now, False

    def also(self, planned: int | None) -> None:
        """Other layers of the step, of another kind, were planned to take `planned` bytes with the rest."""
        if self.step is not None and planned is not None:
            allocated, peak, before, coming = self.step
            self.step = allocated, peak, max(before, planned), coming

    def measure(self) -> None:
        """A step's backward has ended: was it as planned?"""
        if self.step is None or self.measured:
            return
        (allocated, peak, planned, coming), self.measured = self.step, True
        took = self.gauge.peak() - allocated - coming
        peak = max(peak, trial_peaks.get(self.gauge.device, 0))
        if self.alone and self.gauge.peak() > peak and took > planned + reserve(planned):
            self.over *= took / planned
            self.learnt = f"a step took {took / 2**30:.1f} GiB where {planned / 2**30:.1f} were planned"

    def look(self) -> str | None:
        """Before a step: what was learnt from the last one, once; None where nothing was."""
        ran_out, self.ooms = self._ooms() > self.ooms, self._ooms()
        if ran_out and self.alone and self.step is not None:
            planned = self.step[2]
            self.most = int(SHRINK * (planned + reserve(planned)))
            self.learnt = "memory ran out"
        else:
            self.measure()
        self.step = None
        learnt, self.learnt = self.learnt, None
        return learnt
