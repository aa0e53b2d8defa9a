"""The memory budget of a device: bytes that the layers of a step may take.

The budget is the free memory less gradients and optimizer states that do not exist yet. A step that
took more than planned, or ran out of memory, lowers the budget of the next one. Peaks of
attention's trials (attention/backends.py) do not count. If several ranks must choose alike (`alone`
is False) nothing is learnt: each rank would learn something else.
"""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hfpatch.attention.backends import trial_peaks, trials_without_room
from hfpatch.budget.choice import reserve
from hfpatch.budget.free import gpu_fragments, gpu_free, to_come
from hfpatch.budget.ladder import unplanned
from hfpatch.budget.measured import Step, next_policy
from hfpatch.budget.policy import Checkpointing, Policy, describe
from hfpatch.compat import is_shard
from hfpatch.report import say

ROOMS = weakref.WeakSet()
SHRINK = 0.85  # the next budget, as a share of the planned bytes of a step that ran out of memory


class Gauge:
    """A CUDA device's memory counters, in bytes; ooms: the number of out-of-memory errors."""

    def __init__(self, device: torch.device):
        self.device = device

    def free(self) -> int:
        return gpu_free(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def fragments(self) -> int:
        return gpu_fragments(self.device)

    def unused(self) -> int:
        """Reserved and not allocated at the peak."""
        return torch.cuda.max_memory_reserved(self.device) - self.peak()

    def ooms(self) -> int:
        return torch.cuda.memory_stats(self.device).get("num_ooms", 0)


def told(optimizer: torch.optim.Optimizer) -> list["Room"]:
    """The memory budgets that this optimizer's step concerns.

    These are the budgets of the models whose parameters it holds. If it holds no model's: an
    engine's optimizer, which holds flat parameters, concerns all; an ordinary one concerns the
    frozen models, since it trains modules around one (a projector, prompts).
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    of_rooms = {room: set(room.parameters() or ()) for room in list(ROOMS)}
    found = [room for room, own in of_rooms.items() if not held.isdisjoint(own)]
    of_a_model = held and all(isinstance(p, nn.Parameter) and not is_shard(p) for p in held)
    if found or not of_a_model:
        return found or [*of_rooms]
    return [room for room, own in of_rooms.items() if not any(p.requires_grad for p in own)]


# Reserve while no step was measured: a share of the step's bytes, and at least so many bytes.
UNMEASURED_SHARE, UNMEASURED_LEAST = 0.10, 2 << 30


def unmeasured(free: int) -> int:
    """The part of `free` bytes that a policy may plan with while no step was measured, including
    its own reserve (budget/choice.py).
    """
    step = max(0, min(free - UNMEASURED_LEAST, int(free / (1 + UNMEASURED_SHARE))))
    return min(free, step + reserve(step)) if step else 0


class Room:
    """The budget of one device.

    parameters: a function that returns the model's parameters, or None once the model is gone.
    """

    def __init__(self, gauge: Gauge, parameters):
        self.gauge, self.parameters = gauge, parameters
        self.ooms = self._ooms()
        self.alone = True
        # whether an optimizer stepped: then its states exist, or never will
        self.stepped = False
        self.learnt: str | None = None  # why the next step keeps something else
        # measured bytes over planned ones; bound set by an out-of-memory error; most bytes that the
        # allocator held but could not use at a peak
        self.over, self.most, self.unused = 1.0, None, 0
        # (allocated and peak bytes at its start, planned bytes, bytes of gradients to come), until
        # an optimizer has stepped
        self.step: tuple | None = None
        # of the last measured step: bytes without its gradients (an upper bound), and bytes of
        # these
        self.took: tuple[int, int] | None = None
        self.measured = False  # whether its backward has ended
        # whether any step was measured: until then only the closed form predicts a step's bytes
        self.proven = False
        me = weakref.ref(self)
        for register, what in (
            (register_optimizer_step_pre_hook, Room.measure),
            (register_optimizer_step_post_hook, Room.end)
        ):  # fmt: skip
            tell = lambda stepping, *_, what=what: what(me()) if me() in told(stepping) else None  # noqa: E731
            weakref.finalize(self, register(tell).remove)
        ROOMS.add(self)

    def bytes(self, gathered: int = 0, careful: bool = True) -> int:
        """The budget of the step that begins.

        gathered: bytes of weights that an engine gathers. careful: keeps a larger reserve while no
        step was measured.
        """
        # Two states (Adam's), until a step has shown the optimizer's own.
        room = self.gauge.free() - max(self.unused, self.gauge.fragments())
        room -= self._to_come(states=0 if self.stepped else 2) + gathered
        room = max(0, int((room if self.most is None else min(room, self.most)) / self.over))
        return unmeasured(room) if careful and not self.proven else room

    def _to_come(self, states: int = 0) -> int:
        return to_come(self.parameters() or (), states=states, device=self.gauge.device)

    def _ooms(self) -> int:
        """How often a step ran out of memory."""
        return self.gauge.ooms() - trials_without_room[self.gauge.device]

    def end(self) -> None:
        """Called after an optimizer step."""
        if not self.stepped:
            self.learnt = self.learnt or ""
        self.step, self.stepped = None, True

    def begin(self, planned: int | None) -> None:
        """Called when a step begins. planned: the bytes planned for its layers, None if unknown."""
        self.step = self.gauge.allocated(), self.gauge.peak(), planned, self._to_come()
        self.measured, self.took = False, None

    def also(self, planned: int | None) -> None:
        """Called for layers of another kind in the same step: with them it takes `planned`
        bytes."""
        if self.step is not None and planned is not None:
            allocated, peak, before, coming = self.step
            self.step = allocated, peak, max(before or 0, planned), coming

    def measure(self) -> None:
        """Called after a step's backward: lowers the budget if it took more than planned."""
        if self.step is None or self.measured:
            return
        (allocated, peak, planned, coming), self.measured, self.proven = self.step, True, True
        took = self.gauge.peak() - allocated - coming
        self.took = took, coming
        peak = max(peak, trial_peaks.get(self.gauge.device, 0))
        if self.alone:
            self.unused = max(self.unused, self.gauge.unused())
        rose = self.alone and planned is not None and self.gauge.peak() > peak
        if rose and took > planned + reserve(planned):
            self.over *= took / planned
            self.learnt = (
                f"a step took {took / 2**30:.1f} GiB where {planned / 2**30:.1f} were planned"
            )

    def look(self) -> str | None:
        """The result learnt from the last step, returned once; None without one."""
        ran_out, self.ooms = self._ooms() > self.ooms, self._ooms()
        planned = None if self.step is None else self.step[2]
        if ran_out and self.alone and planned is not None:
            self.most = int(SHRINK * (planned + reserve(planned)))
            self.learnt = "memory ran out"
        else:
            self.measure()
        self.step = None
        learnt, self.learnt = self.learnt, None
        return learnt


class Learned:
    """Policies of layers, learnt from the bytes of their earlier steps.

    Attributes:
        policies: by B and T.
        step: (policy, B, T) of the current step; None if nothing can be learnt from it.
    """

    def __init__(self):
        self.policies: dict[tuple, Policy] = {}
        self.step: tuple | None = None

    def grow(self, room: Room, settings: Checkpointing, n_layers: int, planned: dict) -> tuple:
        """Lets the next step of the last shape keep more if the last one left room. Returns that
        shape, (B, T), or () if nothing changes. planned: receives the bytes at most, by policy and
        shape.
        """
        last, self.step = self.step, None
        # each rank would learn something else
        alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        if last is None or room.took is None or settings.aim == "least" or not alone:
            return ()
        policy, B, T = last
        free = room.bytes()
        found, most = next_policy(Step(policy, *room.took, B * T, n_layers), settings, free)
        if found == policy:
            return ()
        self.policies[B, T], planned[found, B, T] = found, most
        say(
            f"{B} x {T:,} tokens: {describe(found, n_layers)}; at most {most / 2**30:.1f} of "
            f"{free / 2**30:.1f} GiB free on the device."
        )
        return B, T


def without_shape(runtime, settings, rows: int, whole: bool, x, free: int | None, host: int | None):
    """The policy of layers of which no step was measured, from the bytes of one layer's gradients
    and whether the host is short.

    runtime: layer.runtime.LayerRuntime; x: [B, T, D]; free: bytes on the device, None if unknown.
    """
    owner, width = runtime.owner(), x.shape[-1]
    trained = [p.numel() for p in owner.parameters() if p.requires_grad] if owner else []
    # input and attention output of each layer
    wanted = 2 * runtime.n_layers * rows * width * x.element_size()
    short = settings.offload in ("auto", "host") and host is not None and wanted > host
    return unplanned(
        settings, rows, whole, width, free, 4 * sum(trained) // runtime.n_layers, short
    )
