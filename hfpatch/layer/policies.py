"""What a model's layers keep: for a first step of a batch shape the least (budget/first.py), then
what the model's own steps have shown that there is room for (meter.py, budget/measured.py).
"""

import dataclasses
import sys
import weakref
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.cuts import tile_bounds
from hfpatch.budget.first import first_policy, step_bytes
from hfpatch.budget.limits import environment_number
from hfpatch.budget.measured import HOST_SHARE, Layers, rounded
from hfpatch.budget.policy import LEAST, Checkpointing, auto_tile, describe
from hfpatch.compat import all_parameters, autocast_dtype
from hfpatch.layer.forward_state import is_sharded
from hfpatch.layer.gauge import Gauge
from hfpatch.layer.graph_bytes import kind_of
from hfpatch.layer.meter import Meter
from hfpatch.layer.packed_weights import frozen_tables
from hfpatch.layer.parts import gate_up_columns
from hfpatch.layer.traits import layers_in
from hfpatch.parallel.shards import Shards, least_of, tensor_parallel_group, together
from hfpatch.report import say
from hfpatch.store.transfers import FetchQueue, Transfers

SCARCE_HOST = 2 << 30  # bytes of free host memory below which none is held for longer batches


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
        policies: by batch shape; firsts: those of their first steps.
        queues: by (device, tier), each with transfers of its own.
        shards: how tensor-parallel ranks share a layer's input, or None.
        meters: the Meter of each device, None if its free memory is unknown.
        opened: policies, by shape, whose host memory is reserved; said: those of the last lines;
            agreed: (steps, those) of ranks that decide alike.
        sequence: the ranks that share the rows of the current call, or None.
        exchange: ranks with batches of their own that send each other tokens in each tile, or None.
        owner: a weak reference to the module whose parameters a step trains.
        spare: bytes that the sources of copies may take while a layer runs.
    """

    def __init__(self, checkpointing: Checkpointing, n_layers: int):
        self.checkpointing, self.n_layers = checkpointing, n_layers
        self.policies: dict[tuple, Checkpointing] = {}
        self.firsts: dict[tuple, Checkpointing] = {}
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.meters: dict[torch.device, Meter | None] = {}
        self.opened: dict[tuple, Checkpointing] = {}
        self.said: dict[tuple, Checkpointing] = {}
        self.agreed: dict[tuple, tuple[int, Checkpointing]] = {}
        self.owner, self.sequence, self.exchange = lambda: None, None, None
        self.spare = 0
        self._found: list = []  # weak references to the layers
        self._begun = False  # whether the stack began a forward and no layer ran yet

    @property
    def transfers(self) -> Transfers | None:
        """The copies of the first device, None before the first step."""
        return next((queue.transfers for queue in self.queues.values()), None)

    def meter_of(self, device: torch.device) -> Meter | None:
        """What is measured on a device; None if its free memory is unknown."""
        if device not in self.meters:
            owner = self.owner
            self.meters[device] = (
                Meter(Gauge(device), lambda: owner() and all_parameters(owner()), self.n_layers)
                if metered(device)
                else None
            )
        return self.meters[device]

    def begin(self, device: torch.device) -> None:
        """Called by the stack before its layers' forward, or by a layer that a user calls before."""
        for queue in self.queues.values():
            queue.begin()
        meter, self.spare = self.meter_of(device), 0
        if meter is not None and torch.is_grad_enabled():
            meter.begin()
        self._begun = True

    def policy(
        self, layer: nn.Module, x_BTD: Tensor, sequence=None, whole: bool = False
    ) -> Checkpointing:
        """The policy for this batch shape. A new shape gets a policy, and host memory is reserved
        for it.

        whole: the layer cannot be tiled; sequence: the ranks that share its rows
        (parallel.exchange.Sequence), which all choose alike. Raises ValueError if the host cannot
        hold what the settings demand.
        """
        device, training = x_BTD.device, torch.is_grad_enabled()
        if device not in self.meters:
            self.begin(device)
        begins, self._begun, self.sequence = self._begun, False, sequence
        meter, B, T = self.meters[device], *x_BTD.shape[:2]
        # Close lengths have one first policy, chosen for the longest of them.
        longest = T if meter is None else rounded(T)
        key = (B, longest, x_BTD.dtype, device, whole, sequence, autocast_dtype(device.type))
        policy = self.policies.get(key)
        if policy is None and not training:  # nothing is kept
            tile = self.checkpointing.tile
            tile = auto_tile(B * T) if tile == "auto" else tile
            return dataclasses.replace(LEAST, offload="gpu", tile=tile)
        if training:
            # A forked process has no queues.
            if policy is None or (device, policy.offload) not in self.queues:
                self.firsts[key] = policy = self._opened(layer, x_BTD, longest, whole)
            self.policies[key] = policy
            if meter is not None and meter.step is not None:
                policy = self._grown(meter, key, self.firsts[key], layer, x_BTD, begins)
            if self.opened.get(key) != policy:
                del self.policies[key]  # a reservation that fails is tried again
                group = None if whole else tensor_parallel_group(layer)
                reserve = partial(self._reserve, policy, layer, x_BTD, longest, meter)
                self._together(group, reserve)
                self.policies[key] = policy
                self.opened[key] = policy
        return policy

    def _settle(self, room: int) -> None:
        """Releases sources of copies, until those that stay take at most `room` bytes."""
        self.spare = room
        for queue in self.queues.values():
            queue.transfers.settle(room=room)

    def _opened(self, layer, x_BTD: Tensor, longest: int, whole: bool) -> Checkpointing:
        """The first policy of a shape. Ranks that must choose alike do so together."""
        group = None if whole else tensor_parallel_group(layer)

        def open_shape():
            found = self._chosen(layer, x_BTD, longest, whole, group)
            queue = x_BTD.device, found.offload
            if queue not in self.queues:
                self.queues[queue] = FetchQueue(
                    Transfers(x_BTD.device, found.tier, found.directory)
                )
            return found

        return self._together(group, open_shape)

    def _together(self, group, work):
        """Runs work() on all ranks that must choose alike; if one raises, all raise. group: the
        tensor-parallel ranks, or None.
        """
        if self.sequence is not None:
            return self.sequence.together(work)
        return work() if group is None else together(group, work)

    def _least(self, group, numbers: list) -> list:
        """The least of each number, of all ranks that must choose alike; group as in _together."""
        if self.sequence is not None:
            return self.sequence.least(numbers)
        return numbers if group is None else least_of(group, numbers)

    def _chosen(self, layer: nn.Module, x_BTD: Tensor, T: int, whole: bool, group) -> Checkpointing:
        """Chooses a first policy. group: the tensor-parallel ranks of each layer, which must choose
        alike.
        """
        policy = self._resolve(layer, T, x_BTD, whole, group)
        if policy.every > 1 and is_sharded(layer):
            raise ValueError(
                f"hfpatch: every={policy.every} runs several layers at once, and parameters "
                "sharded layer by layer do not allow that. Use Checkpointing(every=1), with a "
                "directory as offload if host memory is short."
            )
        # Segments (every > 1) keep whole inputs; only single layers keep x in parts.
        if group is not None and policy.every == 1 and self.shards is None:
            self.shards = Shards(group)
        return policy

    def _resolve(self, layer: nn.Module, T: int, x: Tensor, whole: bool, group) -> Checkpointing:
        """The first policy of a shape: what is sure to be little."""
        settings, meter = self._settings(x, layer), self.meter_of(x.device)
        # independent of one rank's free memory
        if self.exchange is not None and settings.tile == "auto":
            settings = dataclasses.replace(settings, tile=auto_tile(x.shape[0] * T))
        free = self._least(group, [meter and meter.free(), self._host_free()])
        sizes = {"rows": x.shape[0] * T, "width": x.shape[-1], "itemsize": x.element_size()}
        policy = first_policy(
            settings, **sizes, layers=self._keeping(x), whole=whole,
            chains=self._mixes(layer),
            card=meter and meter.card, free=free[0], host=free[1],
        )  # fmt: skip
        short = free[0] is not None and step_bytes(policy, **sizes) > free[0]
        alone = not (whole or is_sharded(layer)) and group is None and self.sequence is None
        asked = settings.frozen_weights == "auto" and not self.weights.on
        if short and alone and asked and meter.trained and frozen_tables(layer):
            self.weights.on = True
            self.policies.clear()  # those of other lengths may let layers keep everything
            self.weights_to_host(self.owner(), x.device)
            return self._resolve(layer, T, x, whole, group)
        return policy

    def _settings(self, x: Tensor, layer: nn.Module) -> Checkpointing:
        """The user's settings, with the fields set that this device, engine or layer dictates."""
        settings, change = self.checkpointing, dataclasses.replace
        if settings.every == "auto" and is_sharded(layer):
            settings = change(settings, every=1)
        # The device is the host, so a copy would only take memory. The meta device has nothing to
        # copy.
        host = self.meter_of(x.device) is None and settings.offload == "auto"
        if host or x.device.type == "meta":
            settings = change(settings, offload="gpu")
        if self.weights.on:
            return change(settings, frozen_weights="host", plain=0)
        alike = arrival_counts() or self.exchange is not None
        return change(settings, plain=0) if alike and settings.plain == "auto" else settings

    def _grown(
        self, meter: Meter, key, first: Checkpointing, layer, x: Tensor, begins: bool
    ) -> Checkpointing:
        """The policy of the step that begins, by what earlier ones have shown; then the step's."""
        step, whole, (B, T) = meter.step, key[4], x.shape[:2]
        if begins or step.plan is None or step.whole != whole:
            settings = self._settings(x, layer)
            traits, itemsize = layer._hfpatch_traits, x.element_size()
            columns = 0 if whole else gate_up_columns(layer, traits, x.device.type)
            queue = self.queues[x.device, first.offload].transfers
            able = Layers(
                columns * itemsize, 2 * x.shape[-1] * itemsize, self._host_free(), queue.speed.now()
            )
            policy, step.whole = meter.plan(first, settings, able, B * T), whole
            group = None if whole else tensor_parallel_group(layer)
            if self.sequence is not None or group is not None:
                policy = self._agreed(meter, key, policy, group)
            self.policies[key] = policy
            self._say(meter, policy, (B, T, whole), (B, key[1], whole, step.key), x)
        return self.policies.get(key, first)

    def _say(
        self, meter: Meter, policy: Checkpointing, shape: tuple, key: tuple, x: Tensor
    ) -> None:
        """Prints a policy, if it is another than that of the last such step and of the last line."""
        told, self.said[key] = self.said.get(key), policy
        if policy in (told, self.said.get(shape)):
            return
        why = f"{meter.why}; " if meter.why and told else ""
        self.said[shape], meter.why = policy, ""
        layers = self._keeping(x)
        what = describe(policy, layers, self.n_layers - layers)
        say(f"{why}{shape[0]} x {shape[1]:,} tokens: {what}{meter.words()}.")

    def _agreed(self, meter: Meter, key: tuple, own: Checkpointing, group) -> Checkpointing:
        """The policy of ranks that must decide alike: the least of theirs, asked for at a shape's
        1st, 2nd, 4th, 8th ... step.
        """
        steps, agreed = self.agreed.get(key, (0, own))
        steps += 1
        if steps & (steps - 1) == 0:
            plain, tile, keep = self._least(group, [own.plain, own.tile, own.keep])
            agreed = dataclasses.replace(own, plain=plain, tile=tile, keep=keep)
        self.agreed[key] = steps, agreed
        meter.firm(agreed)
        return agreed

    def untiled(self, layer: nn.Module, x: Tensor, policy: Checkpointing) -> bool:
        """Whether this layer keeps everything. Called as its forward begins."""
        meter, index = self.meters.get(x.device), layer._hfpatch_index
        if not torch.is_grad_enabled():
            return False
        if meter is None or meter.step is None:
            self._settle(0)
            return index >= self.n_layers - policy.plain
        waiting = 0
        for transfers in (queue.transfers for queue in self.queues.values()):
            waiting += transfers.unsettled_bytes + sum(n for _, n, _ in transfers.copied)
        planned = meter.layer(index, kind_of(layer, x), waiting)
        self._settle(meter.step.forward.room)
        fixed = self.checkpointing.plain != "auto"
        return index >= self.n_layers - policy.plain if fixed else planned

    def ended(self, layer: nn.Module, device: torch.device) -> None:
        """A layer's forward has ended."""
        if layer._hfpatch_index != self.n_layers - 1 or not torch.is_grad_enabled():
            return
        self._settle(0)
        meter = self.meters.get(device)
        if meter is not None and meter.step is not None:
            meter.ended()

    def _layers(self) -> list[nn.Module]:
        """The layers that share this runtime; found once, as a walk over all modules takes ms."""
        owner = self.owner()
        if owner is not None and not self._found:
            self._found = [weakref.ref(m) for m in layers_in(owner)]
        return [layer for one in self._found if (layer := one()) is not None]

    def _mixes(self, layer: nn.Module) -> bool:
        """Whether some layers mix tokens other than by attention."""
        return any(bool(one._hfpatch_traits.mixers) for one in (layer, *self._layers()))

    def _keeping(self, x: Tensor) -> int:
        """How many layers keep something: those from the first trained one on."""
        layers = [] if x.requires_grad else self._layers()
        if not layers:
            return self.n_layers
        trains = (one for one in layers if any(p.requires_grad for p in one.parameters()))
        return self.n_layers - next((one._hfpatch_index for one in trains), self.n_layers)

    def _host_free(self) -> int | None:
        """Free host memory of this rank, with the unused memory of this runtime's pools."""
        free, ranks = memory.host_free(), environment_number("LOCAL_WORLD_SIZE", 1, 1)
        waits = sum(q.transfers.pool.bytes_free for q in self.queues.values())
        return None if free is None else free // ranks + waits

    def _reserve(
        self, policy: Checkpointing, layer, x: Tensor, T: int, meter: Meter | None
    ) -> None:
        """Reserves host memory for a step of at most T tokens a row, in one block: each block has to
        be pinned.
        """
        if policy.offload != "host" or self._mixes(layer):  # they save tensors of several sizes
            return
        pool, free = self.queues[x.device, "host"].transfers.pool, memory.host_free()
        if free is not None and free < SCARCE_HOST:
            pool.give_back()  # host memory is scarce: hold no more than this length takes
        below = self.n_layers - self._keeping(x)
        layers = -(-(self._keeping(x) - policy.plain) // policy.every)
        ranks = 1 if self.shards is None else self.shards.world
        rows = x[:, :1, ..., 0].numel() * T
        computed = (autocast_dtype(x.device.type) or x.dtype).itemsize

        def named(name: str) -> int:
            return max((getattr(c, name, 0) or 0 for c in layer._hfpatch_configs), default=0)

        heads, head = named("num_attention_heads"), layer._hfpatch_condition.head_dim
        saved = layers * policy.saves_attention
        one = rows * x.shape[-1] * x.element_size()
        sizes = Counter({one // ranks: layers})
        bounds = tile_bounds(len(x), T, policy.tile)
        # the gradient of the input of the layer whose backward runs
        sizes[one] += policy.parks_dx and len(bounds) > 1
        sizes[rows * (heads * (named("v_head_dim") or head) or x.shape[-1]) * computed] += saved
        sizes[rows * heads * max(4, computed)] += saved
        gates = min(policy.keep, self.n_layers - policy.plain) - below
        if meter is not None and meter.step is not None and gates > 0:
            for a, b in bounds:
                sizes[x.shape[0] * (b - a) * meter.step.gate_up // 2] += 2 * gates
        most = self._host_free()
        pool.reserve(+sizes, most and int(HOST_SHARE * most))
