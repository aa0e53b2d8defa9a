"""What a model's layers keep for each batch shape. Chosen once per shape, from the memory that is
free as its first step begins, and again if a step shows less memory, or more.
"""

import dataclasses
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.limits import environment_number
from hfpatch.budget.policy import (
    KEEPABLE,
    Checkpointing,
    Policy,
    auto_tile,
)
from hfpatch.compat import autocast_dtype
from hfpatch.layer.forward_state import is_sharded
from hfpatch.layer.room import Gauge, Learned, Room, without_shape
from hfpatch.parallel.shards import Shards, least_of, tensor_parallel_group, together
from hfpatch.report import say
from hfpatch.store.transfers import FetchQueue, Transfers

SCARCE_HOST = 2 << 30  # bytes of free host memory below which none is held for longer batches


def rounded(tokens: int) -> int:
    """`tokens` rounded up to a sixteenth of the largest power of two within."""
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def metered(device: torch.device) -> bool:
    """Whether the device has memory of its own whose free bytes are known."""
    return device.type == "cuda"


def arrival_counts() -> bool:
    """Whether gradients must arrive in the same order on all ranks, as DeepSpeed's buckets need.

    A plain layer and a tiled one differ in that order, and each rank chooses by its own memory and
    lengths.
    """
    return "deepspeed" in sys.modules and dist.is_initialized() and dist.get_world_size() > 1


class Policies:
    """The part of a model's LayerRuntime that chooses what layers keep, and reserves memory for it.
    The runtime's `weights` are the frozen ones that may wait on the host.

    Attributes:
        checkpointing: the user's settings.
        n_layers: how many layers share this runtime.
        policies: by batch shape; queues: by (device, tier), each with transfers of its own.
        shards: how tensor-parallel ranks share a layer's input, or None.
        rooms: the memory budget of each device, None if its free memory is unknown.
        planned: (policy, B, T) -> the most bytes that a step takes on the device, from the last
            measured one.
        opened: shapes whose host memory is reserved.
        sequence: the ranks that share the rows of the current call, or None.
        exchange: ranks with batches of their own that send each other tokens in each tile, or None.
        owner: a weak reference to the module whose parameters a step trains.
        learned: results of earlier steps (room.Learned).
    """

    def __init__(self, checkpointing: Checkpointing, n_layers: int):
        self.checkpointing, self.n_layers = checkpointing, n_layers
        self.policies: dict[tuple, Policy] = {}
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.rooms: dict[torch.device, Room | None] = {}
        self.planned: dict[tuple, int] = {}
        self.opened: set[tuple] = set()
        self.sequence = None
        self.owner, self.learned, self.exchange = lambda: None, Learned(), None
        self._begun = False  # whether the stack began a forward and no layer ran yet
        self._last_index = 0  # of the layer that last requested a policy

    @property
    def transfers(self) -> Transfers | None:
        """The copies of the first device, None before the first step."""
        return next((queue.transfers for queue in self.queues.values()), None)

    def begin(self, device: torch.device) -> None:
        """Called by the stack before its layers' forward, or by the first layer if a user calls
        layers directly.
        """
        for queue in self.queues.values():
            queue.begin()
        room = self.room_of(device)
        if room is not None and torch.is_grad_enabled():
            self._look_back(room)
        self._begun = True

    def policy(
        self,
        layer: nn.Module,
        x_BTD: Tensor,
        sequence=None,
        whole: bool = False,
        able=lambda: KEEPABLE,
    ) -> Policy:
        """The policy for this batch shape. A new shape gets a policy, and host memory is reserved
        for it.

        whole: the layer cannot be tiled; sequence: the ranks that share its rows
        (parallel.exchange.Sequence), which all choose alike; able: returns the names in KEEPABLE
        that the layer can keep. Raises ValueError if the host cannot hold what the settings demand.
        """
        device, index, training = x_BTD.device, layer._hfpatch_index, torch.is_grad_enabled()
        begins = self._begun or index <= self._last_index
        if begins and not self._begun or device not in self.rooms:
            self.begin(device)
        self._begun, self._last_index, self.sequence = False, index, sequence
        room, B, T = self.rooms[device], *x_BTD.shape[:2]
        # Close lengths share one policy, chosen for the longest of them.
        longest = T if room is None else rounded(T)
        key = (B, longest, x_BTD.dtype, device, whole, sequence, autocast_dtype(device.type))
        policy = self.policies.get(key)
        if policy is None and not training:  # nothing is kept
            tile = self.checkpointing.tile
            return Policy("gpu", tile=auto_tile(B * T) if tile == "auto" else tile)
        # A forked process has no queues.
        ready = policy and (*key, T) in self.opened and (device, policy.offload) in self.queues
        if training and not ready:
            policy = self._opened(policy, layer, x_BTD, longest, whole, able)
            self.opened.add((*key, T))
        self.policies[key] = policy  # last: a choice that failed is tried again
        if training:
            shape = policy, B, longest
            for queue in self.queues.values():
                queue.transfers.settle()
            if room is not None:
                (room.begin if begins else room.also)(self.planned.get(shape))
                if not whole and not self.weights.on:
                    self.learned.step = shape
        return policy

    def _opened(self, policy, layer, x_BTD: Tensor, longest: int, whole: bool, able) -> Policy:
        """Chooses a policy if there is none, and reserves memory for this length. Ranks that must
        choose alike do so together.
        """
        group = None if whole else tensor_parallel_group(layer)

        def open_shape():
            found = policy or self._chosen(layer, x_BTD, longest, whole, group)
            self._open(found, x_BTD.device)
            return found

        if self.sequence is not None:
            return self.sequence.together(open_shape)
        return open_shape() if group is None else together(group, open_shape)

    def room_of(self, device: torch.device) -> Room | None:
        """The memory budget of a device; None if its free memory is unknown."""
        if device not in self.rooms:
            self.rooms[device] = None
            if not metered(device):
                return None
            owner = self.owner
            self.rooms[device] = Room(Gauge(device), lambda: owner() and owner().parameters())
        return self.rooms[device]

    def _look_back(self, room: Room) -> None:
        """Drops policies after a step that showed less memory than planned, or more."""
        learnt = room.look()
        if learnt is not None:
            self.policies.clear()
            self.opened.clear()
        if learnt:
            self.learned.policies.clear()
            say(f"{learnt}: layers keep less from now on.")
        grown = self.learned.grow(room, self.checkpointing, self.n_layers, self.planned)
        self.policies = {k: p for k, p in self.policies.items() if k[:2] != grown}

    def _chosen(self, layer: nn.Module, x_BTD: Tensor, T: int, whole: bool, group) -> Policy:
        """Chooses a policy. group: the tensor-parallel ranks of each layer, which must choose
        alike.
        """
        policy = self._resolve(x_BTD.shape[0], T, x_BTD, whole, is_sharded(layer), group)
        if policy.every > 1 and is_sharded(layer):
            raise ValueError(
                f"hfpatch: every={policy.every} runs several layers at once, which parameters "
                "sharded layer by layer "
                "do not allow; use Checkpointing(every=1) with a directory as offload where host "
                "memory is short."
            )
        # Segments (every > 1) keep whole inputs; only single layers keep x in parts.
        if group is not None and policy.every == 1 and self.shards is None:
            self.shards = Shards(group)
        return policy

    def _resolve(self, B: int, T: int, x: Tensor, whole: bool, sharded: bool, group) -> Policy:
        """The policy of a shape: what the last steps have shown to fit, else a careful one.
        sharded: an engine gathers each layer's weights.
        """
        settings, room = self._settings(x, whole, sharded), self.room_of(x.device)
        # independent of one rank's free memory
        if self.exchange is not None and settings.tile == "auto":
            settings = dataclasses.replace(settings, tile=auto_tile(B * T))
        if not whole and (B, T) in self.learned.policies:
            return self.learned.policies[B, T]
        free = [room and room.bytes(), self._host_free()]
        if self.sequence is not None:
            free = self.sequence.least(free, x.device)
        elif group is not None:
            free = least_of(group, free, x.device)
        return without_shape(self, settings, B * T, whole, x, *free)

    def _settings(self, x: Tensor, whole: bool, sharded: bool) -> Checkpointing:
        """The user's settings, with the fields set that this device, engine or layer dictates."""
        settings, change = self.checkpointing, dataclasses.replace
        if sharded and settings.every == "auto":
            settings = change(settings, every=1)
        # The device is the host, so a copy would only take memory. The meta device has nothing to
        # copy.
        host = self.room_of(x.device) is None and settings.offload == "auto"
        if host or x.device.type == "meta":
            settings = change(settings, offload="gpu")
        if self.weights.on:
            settings = change(settings, frozen_weights="host", plain=0)
        plain = 0 if settings.plain == "auto" else settings.plain
        return change(settings, plain=plain)

    def _host_free(self) -> int | None:
        """Free host memory of this rank, with the unused memory of this runtime's pools."""
        free, ranks = memory.host_free(), environment_number("LOCAL_WORLD_SIZE", 1, 1)
        waits = sum(q.transfers.pool.bytes_free for q in self.queues.values())
        return None if free is None else free // ranks + waits

    def _open(self, policy: Policy, device: torch.device) -> None:
        """Creates the transfers of a policy."""
        key = (device, policy.offload)
        if key not in self.queues:
            self.queues[key] = FetchQueue(
                Transfers(device, policy.offload, self.checkpointing.directory)
            )
