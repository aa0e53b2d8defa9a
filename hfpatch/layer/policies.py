"""What a model's layers keep: little in the first step of a batch shape (budget/first.py), then more,
as far as the memory allows that the model's own steps used (meter.py, budget/measured.py).
"""

import dataclasses
import sys
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.first import first_policy, step_bytes
from hfpatch.budget.measured import Abilities, rounded
from hfpatch.budget.policy import LEAST, Checkpointing, auto_tile, describe
from hfpatch.compat import autocast_dtype, in_fsdp2
from hfpatch.layer.forward_state import is_sharded
from hfpatch.layer.gate_up import gate_up_columns
from hfpatch.layer.gauge import Gauge
from hfpatch.layer.graph_bytes import meter_kind
from hfpatch.layer.meter import Meter
from hfpatch.layer.streamed_weights import frozen_tables
from hfpatch.layer.traits import layers_in
from hfpatch.parallel.shards import Shards, have_one_input, least_of, tensor_parallel_group
from hfpatch.report import say
from hfpatch.store.transfers import FetchQueue, Transfers


def metered(device: torch.device) -> bool:
    """Whether the device has memory of its own whose free bytes are known."""
    return device.type == "cuda"


def gradient_order_matters() -> bool:
    """Whether gradients must arrive in the same order on all ranks, as DeepSpeed's buckets need.

    A layer that keeps all and a tiled one differ in that order, and each rank chooses by its own memory and
    lengths. Where DeepSpeed is only imported (by accelerate, by TRL), its backend `cdb` is None.
    """
    return (
        getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


# The policy of a forward without gradients. Generation asks for it in every layer of every token.
_unkept = cache(partial(dataclasses.replace, LEAST, offload="gpu"))


@dataclasses.dataclass
class Shape:
    """What was decided for batches of one shape.

    Attributes:
        first: the policy where nothing is measured; `_grow` starts from it.
        policy: of its current or last step.
    """

    first: Checkpointing
    policy: Checkpointing


class Policies:
    """Chooses what layers keep. A base of LayerRuntime, which has the attributes."""

    @property
    def transfers(self) -> Transfers | None:
        """The copies of the first device, None before the first step."""
        return next((queue.transfers for queue in self.queues.values()), None)

    def meter_of(self, device: torch.device) -> Meter | None:
        """What is measured on a device; None if its free memory is unknown."""
        if device not in self.meters:
            owner = self.owner
            meter = None
            if metered(device):
                parameters = lambda: owner() and owner().parameters()  # noqa: E731
                meter = Meter(Gauge(device), parameters, self.n_layers)
            self.meters[device] = meter
        return self.meters[device]

    def begin(self, device: torch.device) -> None:
        """Called by the stack before its layers' forward."""
        for queue in self.queues.values():
            queue.begin()
        meter = self.meter_of(device)
        self.copy_room = 0
        if meter is not None and torch.is_grad_enabled():
            meter.begin()

    def policy(
        self, layer: nn.Module, x_BTD: Tensor, row_ranks=None, whole: bool = False
    ) -> Checkpointing:
        """The policy for this batch shape. Decides it where that is due: opens the queue of a new
        shape's copies, starts the meter's step if the stack has not, and prints a policy that
        changed.

        Args:
            whole: the layer cannot be tiled.
            row_ranks: the ranks that share its rows (parallel.exchange.RowRanks), which all choose
                alike.

        Raises:
            ValueError: the host cannot hold what the settings demand.
        """
        device = x_BTD.device
        self.row_ranks = row_ranks
        meter = self.meter_of(device)
        B, T = x_BTD.shape[:2]
        # Close lengths have one first policy, chosen for the longest of them.
        longest = T if meter is None else rounded(T)
        key = (B, longest, x_BTD.dtype, device, whole, row_ranks, autocast_dtype(device.type))
        shape = self.shapes.get(key)
        if not torch.is_grad_enabled():  # nothing is kept
            if shape is not None:
                return shape.policy
            tile = self.checkpointing.tile
            if tile == "auto":
                tile = auto_tile(B * T)
            return _unkept(tile=tile)
        if meter is not None and meter.step is None:  # a user calls a layer
            meter.begin()
        # [Step 1] The first policy of a new shape. Also after close(), or in a copied process.
        if shape is None or (device, shape.policy.offload) not in self.queues:
            first = self._opened(layer, x_BTD, longest, whole)
            shape = self.shapes[key] = Shape(first, first)
        # [Step 2] What this step keeps, decided as its first layer begins.
        if meter is None:
            return shape.policy
        step = meter.step
        if not step.tokens or step.plan.whole != whole:
            self._grow(meter, shape, layer, x_BTD, whole)
            self._say(meter, shape.policy, (B, T, whole), (B, longest, whole, step.key), x_BTD)
        return shape.policy

    def _settle(self, room: int) -> None:
        """Releases sources of copies, until those that stay take at most `room` bytes."""
        self.copy_room = room
        for queue in self.queues.values():
            queue.transfers.settle(room=room)

    def open_queue(self, device: torch.device, policy: Checkpointing) -> None:
        """Makes the queue of a policy's place, unless it exists."""
        if (device, policy.offload) not in self.queues:
            transfers = Transfers(device, policy.tier, policy.directory)
            self.queues[device, policy.offload] = FetchQueue(transfers)

    def _opened(self, layer, x_BTD: Tensor, longest: int, whole: bool) -> Checkpointing:
        """The first policy of a shape. Ranks that must choose alike do so together."""
        group = self._group(layer)
        found = self._resolve(layer, longest, x_BTD, whole, group)
        if found.every > 1 and is_sharded(layer):
            raise ValueError(
                f"hfpatch: every={found.every} runs several layers at once, and parameters "
                "sharded layer by layer do not allow that. Use Checkpointing(every=1), with a "
                "directory as offload if host memory is short."
            )
        self.open_queue(x_BTD.device, found)
        # Segments (every > 1) keep whole inputs; only single layers keep x in parts.
        shares = group is not None and self.row_ranks is None and not whole
        if shares and found.every == 1 and self.shards is None and have_one_input(layer):
            self.shards = Shards(group)
        return found

    def _group(self, layer: nn.Module):
        """The ranks that must choose alike: those that share rows, or a layer's weights. None if
        this one chooses alone.
        """
        if self.row_ranks is not None:
            return self.row_ranks.group
        return tensor_parallel_group(layer)

    def _resolve(self, layer: nn.Module, T: int, x: Tensor, whole: bool, group) -> Checkpointing:
        """The first policy of a shape: what is sure to be little.

        If even that does not fit, frozen weights move to the host first, where they may, and the
        policy is chosen again.
        """
        settings = self._settings(x, layer)
        meter = self.meter_of(x.device)
        free = [meter and meter.free(), self._host_free()]
        if group is not None:
            free = least_of(group, free)
        sizes = {"tokens": x.shape[0] * T, "width": x.shape[-1], "itemsize": x.element_size()}
        policy = first_policy(
            settings, **sizes, layers=self._keeping(x), whole=whole,
            chains=self._has_mixers(layer),
            card=meter and meter.card, free=free[0], host=free[1],
        )  # fmt: skip
        short = free[0] is not None and step_bytes(policy, **sizes) > free[0]
        alone = not (whole or is_sharded(layer)) and group is None and self.row_ranks is None
        if short and alone and self._stream_weights(layer, meter, x.device):
            return self._resolve(layer, T, x, whole, group)
        return policy

    def _stream_weights(self, layer: nn.Module, meter: Meter, device: torch.device) -> bool:
        """Moves all layers' frozen weights to the host, if the user leaves their place to hfpatch and
        the model trains something else. Returns whether it did. All shapes are then decided anew:
        those of other lengths may let layers keep everything.
        """
        asked = self.checkpointing.frozen_weights == "auto" and not self.weights.on
        if not (asked and meter.trained and frozen_tables(layer)):
            return False
        self.weights.on = True
        self.shapes.clear()
        self.weights_to_host(self.owner(), device)
        return True

    def _settings(self, x: Tensor, layer: nn.Module) -> Checkpointing:
        """The user's settings, with the fields set that this device, engine or layer dictates."""
        settings = self.checkpointing
        if settings.every == "auto" and is_sharded(layer):
            settings = dataclasses.replace(settings, every=1)
        # The device is the host, so a copy would only take memory. The meta device has nothing to
        # copy.
        host = self.meter_of(x.device) is None and settings.offload == "auto"
        if host or x.device.type == "meta":
            settings = dataclasses.replace(settings, offload="gpu")
        if self.weights.on:
            return dataclasses.replace(settings, frozen_weights="host", plain=0)
        # Mixers of shared rows need their tiles. A layer that keeps all exchanges no tokens in
        # backward.
        shared = self.row_ranks is not None and self._has_mixers(layer)
        # Modules that FSDP2 shards by themselves gather in another order in a backward that reruns.
        alike = (
            gradient_order_matters()
            or self.exchanges_tokens
            or any(map(in_fsdp2, layer._hfpatch.condition.snapshot.inside))
        )
        if shared or (alike and settings.plain == "auto"):
            settings = dataclasses.replace(settings, plain=0)
        return settings

    def _grow(self, meter: Meter, shape: Shape, layer, x: Tensor, whole: bool) -> None:
        """Sets the policy of the step that begins, by what earlier ones have shown."""
        columns = 0
        if not whole:
            columns = gate_up_columns(layer, layer._hfpatch.traits, x.device.type)
        able = Abilities(
            gate_up=columns * x.element_size(),
            checkpoint=2 * x.shape[-1] * x.element_size(),
            host=self._host_free(),
            link=self.queues[x.device, shape.first.offload].transfers.speed.now(),
        )
        settings = self._settings(x, layer)
        shape.policy = meter.next_policy(shape.first, settings, able, x.shape[0] * x.shape[1])
        meter.step.plan.whole = whole
        group = self._group(layer)
        if group is not None:
            self._agree(meter, shape, group)

    def _say(
        self, meter: Meter, policy: Checkpointing, shape: tuple, key: tuple, x: Tensor
    ) -> None:
        """Prints a policy, if it is another than that of the last such step and of the last line."""
        told = self.printed.get(key)
        self.printed[key] = policy
        if policy in (told, self.printed.get(shape)):
            return
        why = f"{meter.why}; " if meter.why and told else ""
        self.printed[shape] = policy
        meter.why = ""
        layers = self._keeping(x)
        what = describe(policy, layers, self.n_layers - layers)
        say(f"{why}{shape[0]} x {shape[1]:,} tokens: {what}{meter.words()}.")

    def _agree(self, meter: Meter, shape: Shape, group) -> None:
        """Sets the policy of ranks that must decide alike: the least of theirs. Asked in each step,
        because what is free changes: an optimizer makes its states in its first step.
        """
        own = shape.policy
        # least_of() takes no -1
        plain, tile, keep = least_of(group, [own.plain, own.tile, own.keep + 1])
        shape.policy = dataclasses.replace(own, plain=plain, tile=tile, keep=keep - 1)
        meter.agree_on(shape.policy)

    def layer_begins(self, layer: nn.Module, x: Tensor, policy: Checkpointing) -> bool:
        """A layer's forward begins: releases sources of copies that have no room beside it. Returns
        whether it keeps all that autograd saves.
        """
        if not torch.is_grad_enabled():
            return False
        index = layer._hfpatch.index
        dictated = index >= self.n_layers - policy.plain
        meter = self.meters[x.device]
        if meter is None:
            self._settle(0)
            return dictated
        kind = meter_kind(layer, x)
        if meter.tries(index, kind):
            self._settle(0)
        transfers = [queue.transfers for queue in self.queues.values()]
        waiting = sum(t.unsettled_bytes + sum(n for _, n, _ in t.copied) for t in transfers)
        planned = meter.layer_begins(index, kind, waiting)
        self._settle(meter.step.forward.room)
        return planned if self.checkpointing.plain == "auto" else dictated

    def layer_ended(self, layer: nn.Module, device: torch.device) -> None:
        """A layer's forward has ended."""
        if layer._hfpatch.index != self.n_layers - 1 or not torch.is_grad_enabled():
            return
        self._settle(0)
        meter = self.meters.get(device)
        if meter is not None and meter.step is not None and meter.step.tokens:
            meter.forward_ended()

    def _layers(self) -> list[nn.Module]:
        """The layers that share this runtime."""
        owner = self.owner()
        return [] if owner is None else layers_in(owner)

    def _has_mixers(self, layer: nn.Module) -> bool:
        """Whether something other than attention mixes tokens in this layer or another."""
        return any(one._hfpatch.traits.mixers for one in (layer, *self._layers()))

    def _keeping(self, x: Tensor) -> int:
        """How many layers keep something: those from the first trained one on."""
        layers = [] if x.requires_grad else self._layers()
        if not layers:
            return self.n_layers
        trains = (one for one in layers if any(p.requires_grad for p in one.parameters()))
        return self.n_layers - next((one._hfpatch.index for one in trains), self.n_layers)

    def _host_free(self) -> int | None:
        """Free host memory of this rank, with the unused memory of this runtime's pools."""
        free = memory.rank_host_free()
        waits = sum(q.transfers.pool.bytes_free for q in self.queues.values())
        return None if free is None else free + waits
