"""What a model's layers keep for each batch shape. Chosen once per shape, from the memory that is
free as its first step begins, and again if a step shows less memory, or more.
"""

import dataclasses
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.choice import HOST_SHARE, PINNED_MOST, Budget, decide
from hfpatch.budget.formula import ModelShape, spare_bytes, step_memory
from hfpatch.budget.hardware import Gpu, at_place, place_of
from hfpatch.budget.host_blocks import host_blocks
from hfpatch.budget.limits import environment_number
from hfpatch.budget.policy import (
    KEEPABLE,
    Checkpointing,
    Policy,
    auto_tile,
    describe,
)
from hfpatch.compat import autocast_dtype
from hfpatch.layer.forward_state import is_sharded
from hfpatch.layer.room import Gauge, Learned, Room, without_shape
from hfpatch.parallel.shards import Shards, least_of, tensor_parallel_group, together
from hfpatch.parts.quantised import as_trained, holds_packed
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


def beside_others(gpu: Gpu | None) -> Gpu | None:
    """A card, with the number of processes that share this machine."""
    return gpu and dataclasses.replace(gpu, sharing=environment_number("LOCAL_WORLD_SIZE", 1, 1))


class Policies:
    """The part of a model's LayerRuntime that chooses what layers keep, and reserves memory for it.
    The runtime's `weights` are the frozen ones that may wait on the host.

    Attributes:
        checkpointing: the user's settings.
        shape: the model's sizes, None if no closed form describes it (then room.without_shape).
        n_layers: how many layers share this runtime.
        policies: by batch shape; queues: by (device, tier), each with transfers of its own.
        shards: how tensor-parallel ranks share a layer's input, or None.
        rooms: the memory budget of each device, None if its free memory is unknown.
        planned: (policy, B, T) -> bytes that a step takes on the device, by the closed form; without
            one, a bound from the last measured step.
        opened: shapes whose host memory is reserved.
        spare: bytes that the sources of copies may take when the current layer ends.
        sequence: the ranks that share the rows of the current call, or None.
        exchange: ranks with batches of their own that send each other tokens in each tile, or None.
        owner: a weak reference to the module whose parameters a step trains.
        learned: results of earlier steps, for layers without a closed form (room.Learned).
    """

    def __init__(self, checkpointing: Checkpointing, shape: ModelShape | None, n_layers: int):
        self.checkpointing, self.shape, self.n_layers = checkpointing, shape, n_layers
        self.policies: dict[tuple, Policy] = {}
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.rooms: dict[torch.device, Room | None] = {}
        self.planned: dict[tuple, int] = {}
        self.opened: set[tuple] = set()
        self.spare, self.sequence = 0, None
        self.owner, self.learned, self.exchange = lambda: None, Learned(), None
        self._spares: dict[tuple, tuple] = {}  # keys as in `planned`; of each layer (spare_bytes)
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
        unknown = whole or self.shape is None
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
            # Sources of earlier layers' copies stay as far as the plan has room beside this layer.
            # None stay when a pass begins, or if this layer's bytes are unknown.
            shape = policy, B, longest
            if shape not in self._spares:
                self._spares[shape] = self._spares_of(layer, *shape, x_BTD)
            spares = self._spares[shape]
            self.spare = spares[index + 1]
            for queue in self.queues.values():
                queue.transfers.settle(room=0 if begins or unknown else spares[index])
            if room is not None:
                (room.begin if begins else room.also)(self.planned.get(shape))
                if unknown and not whole and not self.weights.on:
                    self.learned.step = shape
        return policy

    def _opened(self, policy, layer, x_BTD: Tensor, longest: int, whole: bool, able) -> Policy:
        """Chooses a policy if there is none, and reserves memory for this length. Ranks that must
        choose alike do so together.
        """
        group = None if whole or self.shape is None else tensor_parallel_group(layer)

        def open_shape():
            self.shape = as_trained(self.shape, layer)
            found = policy or self._chosen(layer, x_BTD, longest, whole, able(), group)
            self._open(found, whole, *x_BTD.shape[:2], x_BTD)
            return found

        if self.sequence is not None:
            return self.sequence.together(open_shape)
        return open_shape() if group is None else together(group, open_shape)

    def _spares_of(self, layer: nn.Module, policy: Policy, B: int, T: int, x: Tensor) -> tuple:
        """Bytes that sources of copies may take during each layer, and after the last."""
        # 4-bit experts are dequantized for a phase, which no closed form counts
        known = self.shape is not None and not any(map(holds_packed, layer.modules()))
        if not known or self.sequence is not None or self.shape.num_layers != self.n_layers:
            return (0,) * (self.n_layers + 1)
        sizes = {"batch": B, "tokens": T, "itemsize": x.element_size()}
        return spare_bytes(step_memory(self.shape, policy, **sizes), self.shape, policy, **sizes)

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

    def _chosen(
        self, layer: nn.Module, x_BTD: Tensor, T: int, whole: bool, able: tuple, group
    ) -> Policy:
        """Chooses a policy. group: the tensor-parallel ranks of each layer, which must choose
        alike.
        """
        policy = self._resolve(x_BTD.shape[0], T, x_BTD, whole, able, is_sharded(layer), group)
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

    def _resolve(
        self, B: int, T: int, x: Tensor, whole: bool, able: tuple, sharded: bool, group
    ) -> Policy:
        """The policy of a shape. able: the names in KEEPABLE that layers can keep; sharded: an
        engine gathers each layer's weights; group: as in _chosen.
        """
        settings, room = self._settings(x, whole, sharded), self.room_of(x.device)
        # independent of one rank's free memory
        if self.exchange is not None and settings.tile == "auto":
            settings = dataclasses.replace(settings, tile=auto_tile(B * T))
        if self.shape is None:
            free, learned = room and room.bytes(), not whole and self.learned.policies.get((B, T))
            return learned or without_shape(self, settings, B * T, whole, x, free)
        # An engine that shards weights gathers two layers' weights and one layer's gradients.
        gathered = 3 * self.shape.layer_parameters * x.element_size() if sharded else 0
        free, gpu = self._free(room, gathered, x.device, group)
        option = decide(
            settings, self.shape if whole else self._shared(), batch=B, tokens=T,
            itemsize=x.element_size(),
            gpu_free=free[0], host_free=free[1], gpu=beside_others(gpu), able=able,
        )  # fmt: skip
        alone = not (whole or sharded) and group is None and self.sequence is None
        if alone and self._weights_must_leave(option, settings, room, gathered, free[1]):
            self.weights.on = True
            self.policies.clear()  # those of other lengths may let layers keep everything
            self.weights_to_host(self.owner(), x.device)
            return self._resolve(B, T, x, whole, able, sharded, group)
        self.planned[option.policy, B, T] = option.device
        if room is not None:
            takes = f", {option.seconds:.1f} s planned" if gpu else ""
            chosen = describe(option.policy, self.shape.num_layers)
            say(f"{B} x {T:,} tokens: {chosen}; {option.line(free[0])}{takes}.")
        return option.policy

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
        if arrival_counts() or self.shape is None or self.exchange is not None:
            settings = change(settings, plain=plain)
        if whole and self.shape is not None:
            # Each layer keeps only its input: no closed form describes more.
            settings = change(settings, every=1, save_attention=False, plain=plain, keep=())
        return settings

    def _free(self, room: Room | None, gathered: int, device, group) -> tuple[list, Gpu | None]:
        """([free bytes on the device, on the host], the card): the least of all ranks that must
        choose alike.
        """
        gpu, free = room and room.gpu, [room and room.bytes(gathered), self._host_free()]
        if self.sequence is None and group is None:
            return free, gpu
        # All values that a choice depends on and that may differ between ranks. Of several kinds of
        # cards, the plan is for the slowest.
        least = self.sequence.least if self.sequence is not None else partial(least_of, group)
        *free, place = least([*free, place_of(gpu)])
        if room is not None:
            room.alone = False
        return free, at_place(place)

    def _weights_must_leave(self, option, settings, room, gathered: int, host_free) -> bool:
        """Whether frozen weights go to the host because a step does not fit beside them.

        Weights do not come back. So they stay for a step that fits without the reserve for
        unmeasured steps.
        """
        if settings.frozen_weights != "auto" or not self.shape.adapters or self.owner() is None:
            return False
        budget = Budget(room and room.bytes(gathered, careful=False), host_free)
        return not budget.admits_device(option)

    def _host_free(self) -> int | None:
        """Free host memory of this rank, with the unused memory of this runtime's pools."""
        free, ranks = memory.host_free(), environment_number("LOCAL_WORLD_SIZE", 1, 1)
        waits = sum(q.transfers.pool.bytes_free for q in self.queues.values())
        return None if free is None else free // ranks + waits

    def _shared(self) -> ModelShape:
        """The model's shape, with the number of ranks that share the current rows."""
        if self.sequence is None:
            return self.shape
        return dataclasses.replace(self.shape, ranks=self.sequence.size)

    def _open(self, policy: Policy, whole: bool, B: int, T: int, x: Tensor) -> None:
        """Creates the transfers of a policy, and reserves host memory for a step."""
        key = (x.device, policy.offload)
        if key not in self.queues:
            self.queues[key] = FetchQueue(
                Transfers(x.device, policy.offload, self.checkpointing.directory)
            )
        transfers = self.queues[key].transfers
        if policy.offload != "host" or self.shape is None:
            return
        itemsize = x.element_size()
        computed = (autocast_dtype(x.device.type) or x.dtype).itemsize
        shards = None if self.shards is None or whole or policy.every > 1 else self.shards
        sizes = host_blocks(
            self._shared(), policy, batch=B, tokens=T, layers=self.n_layers, itemsize=itemsize,
            computed=computed, whole=whole, ranks=1 if shards is None else shards.world,
            pieces=self.sequence is not None,
        )  # fmt: skip
        free = memory.host_free()
        if free is not None and free < SCARCE_HOST:
            transfers.pool.give_back()  # host memory is scarce: hold no more than this length takes
        most = self._host_free()
        if most is not None:
            most = min(int(HOST_SHARE * most), PINNED_MOST if policy.keep else most)
        transfers.pool.reserve(sizes, most)
