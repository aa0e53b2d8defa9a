"""What a model's tiled layers share: what they keep, the order of their calls, frozen weights on the
host, and the lines already printed.

For a first step of a batch shape layers keep the least (budget/first.py), then what the model's own
steps have shown that there is room for (meter.py, budget/measured.py).

A backward follows the order of calls from its end: the previous call, and when to prefetch its
checkpoints. Segments are links between calls, not loops around them: the model's own forward calls
its layers one by one.
"""

import copy
import dataclasses
import sys
import weakref
from collections import Counter
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.cuts import tile_bounds
from hfpatch.budget.first import first_policy, step_bytes
from hfpatch.budget.limits import environment_number
from hfpatch.budget.measured import HOST_SHARE, Layers, rounded
from hfpatch.budget.policy import LEAST, Checkpointing, auto_tile, describe
from hfpatch.compat import (
    Turn,
    all_parameters,
    autocast_dtype,
    gradient_is_watched,
    not_for_deepspeed,
    pytree,
    same_memory,
    version,
)
from hfpatch.layer.call import LayerCall
from hfpatch.layer.forward_state import is_sharded
from hfpatch.layer.gauge import Gauge
from hfpatch.layer.graph_bytes import kind_of
from hfpatch.layer.meter import Meter
from hfpatch.layer.parts import gate_up_columns
from hfpatch.layer.streamed_weights import StreamedWeights, frozen_tables
from hfpatch.layer.traits import layers_in
from hfpatch.parallel.shards import Shards, least_of, tensor_parallel_group, together
from hfpatch.report import say
from hfpatch.store.device import on_host
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


@cache
def unkept(tile: int) -> Checkpointing:
    """The policy of a forward without gradients."""
    return dataclasses.replace(LEAST, offload="gpu", tile=tile)


@dataclasses.dataclass
class Shape:
    """What was decided for batches of one shape.

    Attributes:
        first: the policy of its first step.
        policy: of its current or last step.
        reserved: the policy whose host memory is reserved.
        steps: of ranks that decide alike, so far; agreed: what they decided last.
    """

    first: Checkpointing
    policy: Checkpointing
    reserved: Checkpointing | None = None
    steps: int = 0
    agreed: Checkpointing | None = None


class LayerRuntime:
    """One per patched model. A copy or a pickle starts with the same settings and nothing in
    flight.

    Attributes:
        checkpointing: the user's settings.
        n_layers: how many layers share this runtime.
        shapes: what was decided, by batch shape.
        queues: by (device, place of checkpoints), each with transfers of its own.
        shards: how tensor-parallel ranks share a layer's input, or None.
        meters: the Meter of each device, None if its free memory is unknown.
        said: policies of the last lines.
        sequence: the ranks that share the rows of the current call, or None.
        exchange: ranks with batches of their own that send each other tokens in each tile, or None.
        owner: a weak reference to the module whose parameters a step trains.
        spare: bytes that the sources of copies may take while a layer runs.
        warned: lines already printed.
        padding_read: whether a gradient came to outputs at padding, as a flag on the device until
            the host reads it.
        tried: why mixers do not run in tiles here, by class, device and dtype (time_trial.py).
        weights: frozen weights that wait on the host.
        turn: the model's lock.
        last_call: weak references to the last call and to its output, and how often that was
            written to; last_held: to the last input that layer/whole.py kept and its layer's output.
    """

    def __init__(self, checkpointing: Checkpointing, n_layers: int, turn: Turn | None = None):
        self.checkpointing = checkpointing
        self.n_layers = n_layers
        self.shapes: dict[tuple, Shape] = {}
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.meters: dict[torch.device, Meter | None] = {}
        self.said: dict[tuple, Checkpointing] = {}
        self.owner = lambda: None
        self.sequence = None
        self.exchange = None
        self.spare = 0
        self._found: list = []  # weak references to the layers
        self._begun = False  # whether the stack began a forward and no layer ran yet
        self.warned: set[str] = set()
        self.padding_read: bool | Tensor = False
        self.tried: dict[tuple, str | None] = {}
        self.weights = StreamedWeights(checkpointing.frozen_weights == "host")
        self.turn = Turn() if turn is None else turn
        self.last_call = (lambda: None, lambda: None, 0)
        self.last_held = None

    def __deepcopy__(self, memo):
        made = LayerRuntime(self.checkpointing, self.n_layers, copy.deepcopy(self.turn, memo))
        made.owned_by(memo.get(id(self.owner())))
        return made

    def __reduce__(self):
        return LayerRuntime, (self.checkpointing, self.n_layers, self.turn)

    def owned_by(self, module: nn.Module | None) -> None:
        """Sets the module whose parameters a step trains, unless one is known."""
        if module is not None and self.owner() is None:
            self.owner = weakref.ref(module)

    def tell(self, line: str) -> None:
        """Prints a line once, and adds it to the report. A small instance says nothing."""
        report = getattr(self.owner(), "_hfpatch_report", None)
        if line not in self.warned and report is not None:
            self.warned.add(line)
            say(line)
            report.notes.append(line)

    # -- padding -----------------------------------------------------------------------------------
    # Causality hides the padding behind a row from real tokens, so layers need no mask. But padding
    # sees itself, so its outputs are not transformers'. A loss that the model computes names the
    # tokens that it reads (loss/causal_model.py). Any other reader shows by its gradient.
    def watch_padding(self, out, hidden_BT: Tensor) -> None:
        """Looks at the gradients of a stack's outputs [B, T, D]. hidden_BT: True at padding."""
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.requires_grad and x.shape[:-1] == hidden_BT.shape:
                x.register_hook(partial(self._look, hidden_BT))

    def _look(self, hidden_BT: Tensor, dy_BTD: Tensor) -> None:
        # NaN, which a mask of zeros does not remove, is not above 0.
        size_BT = torch.linalg.vector_norm(dy_BTD.detach(), torch.inf, -1)
        self.padding_read |= (hidden_BT & (size_BT > 0)).any()

    def padding_is_read(self) -> bool:
        """Whether a gradient came to padding in an earlier backward of this model."""
        if isinstance(self.padding_read, Tensor):
            self.padding_read = bool(on_host(self.padding_read))
        return self.padding_read

    # -- what layers keep --------------------------------------------------------------------------
    @property
    def policies(self) -> list[Checkpointing]:
        """Those of the last steps, one a batch shape."""
        return [shape.policy for shape in self.shapes.values()]

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
        meter = self.meter_of(device)
        self.spare = 0
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
        device = x_BTD.device
        if device not in self.meters:
            self.begin(device)
        begins = self._begun
        self._begun = False
        self.sequence = sequence
        meter = self.meters[device]
        B, T = x_BTD.shape[:2]
        # Close lengths have one first policy, chosen for the longest of them.
        longest = T if meter is None else rounded(T)
        key = (B, longest, x_BTD.dtype, device, whole, sequence, autocast_dtype(device.type))
        shape = self.shapes.get(key)
        if not torch.is_grad_enabled():  # nothing is kept
            if shape is not None:
                return shape.policy
            tile = self.checkpointing.tile
            return unkept(auto_tile(B * T) if tile == "auto" else tile)
        # [Step 1] The first policy of a new shape. A forked process has no queues.
        if shape is None or (device, shape.policy.offload) not in self.queues:
            first = self._opened(layer, x_BTD, longest, whole)
            shape = self.shapes[key] = Shape(first, first)
        # [Step 2] What this step keeps, decided as it begins.
        step = None if meter is None else meter.step
        if step is not None and (begins or step.plan is None or step.plan.whole != whole):
            self._grow(meter, shape, layer, x_BTD, whole)
            self._say(meter, shape.policy, (B, T, whole), (B, longest, whole, step.key), x_BTD)
        # [Step 3] Its host memory.
        if shape.reserved != shape.policy:
            del self.shapes[key]  # a reservation that fails is tried again
            group = None if whole else tensor_parallel_group(layer)
            reserve = partial(self._reserve, shape.policy, layer, x_BTD, longest, meter)
            self._together(group, reserve)
            self.shapes[key] = shape
            shape.reserved = shape.policy
        return shape.policy

    def _settle(self, room: int) -> None:
        """Releases sources of copies, until those that stay take at most `room` bytes."""
        self.spare = room
        for queue in self.queues.values():
            queue.transfers.settle(room=room)

    def _opened(self, layer, x_BTD: Tensor, longest: int, whole: bool) -> Checkpointing:
        """The first policy of a shape. Ranks that must choose alike do so together."""
        group = None if whole else tensor_parallel_group(layer)

        def open_shape():
            found = self._resolve(layer, longest, x_BTD, whole, group)
            if found.every > 1 and is_sharded(layer):
                raise ValueError(
                    f"hfpatch: every={found.every} runs several layers at once, and parameters "
                    "sharded layer by layer do not allow that. Use Checkpointing(every=1), with a "
                    "directory as offload if host memory is short."
                )
            queue = x_BTD.device, found.offload
            if queue not in self.queues:
                self.queues[queue] = FetchQueue(
                    Transfers(x_BTD.device, found.tier, found.directory)
                )
            return found

        found = self._together(group, open_shape)
        # Segments (every > 1) keep whole inputs; only single layers keep x in parts.
        if group is not None and found.every == 1 and self.shards is None:
            self.shards = Shards(group)
        return found

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

    def _resolve(self, layer: nn.Module, T: int, x: Tensor, whole: bool, group) -> Checkpointing:
        """The first policy of a shape: what is sure to be little."""
        settings = self._settings(x, layer)
        meter = self.meter_of(x.device)
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
            self.shapes.clear()  # those of other lengths may let layers keep everything
            self.weights_to_host(self.owner(), x.device)
            return self._resolve(layer, T, x, whole, group)
        return policy

    def _settings(self, x: Tensor, layer: nn.Module) -> Checkpointing:
        """The user's settings, with the fields set that this device, engine or layer dictates."""
        settings = self.checkpointing
        change = dataclasses.replace
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

    def _grow(self, meter: Meter, shape: Shape, layer, x: Tensor, whole: bool) -> None:
        """Sets the policy of the step that begins, by what earlier ones have shown."""
        columns = 0
        if not whole:
            columns = gate_up_columns(layer, layer._hfpatch.traits, x.device.type)
        able = Layers(
            gate_up=columns * x.element_size(),
            wide=2 * x.shape[-1] * x.element_size(),
            host=self._host_free(),
            link=self.queues[x.device, shape.first.offload].transfers.speed.now(),
        )
        settings = self._settings(x, layer)
        shape.policy = meter.plan(shape.first, settings, able, x.shape[0] * x.shape[1])
        meter.step.plan.whole = whole
        group = None if whole else tensor_parallel_group(layer)
        if self.sequence is not None or group is not None:
            self._agree(meter, shape, group)

    def _say(
        self, meter: Meter, policy: Checkpointing, shape: tuple, key: tuple, x: Tensor
    ) -> None:
        """Prints a policy, if it is another than that of the last such step and of the last line."""
        told = self.said.get(key)
        self.said[key] = policy
        if policy in (told, self.said.get(shape)):
            return
        why = f"{meter.why}; " if meter.why and told else ""
        self.said[shape] = policy
        meter.why = ""
        layers = self._keeping(x)
        what = describe(policy, layers, self.n_layers - layers)
        say(f"{why}{shape[0]} x {shape[1]:,} tokens: {what}{meter.words()}.")

    def _agree(self, meter: Meter, shape: Shape, group) -> None:
        """Sets the policy of ranks that must decide alike: the least of theirs, asked for at a
        shape's 1st, 2nd, 4th, 8th ... step.
        """
        own = shape.policy
        shape.steps += 1
        if shape.steps & (shape.steps - 1) == 0:
            # numbers from 0
            plain, tile, keep = self._least(group, [own.plain, own.tile, own.keep + 1])
            shape.agreed = dataclasses.replace(own, plain=plain, tile=tile, keep=keep - 1)
        shape.policy = shape.agreed
        meter.firm(shape.policy)

    def untiled(self, layer: nn.Module, x: Tensor, policy: Checkpointing) -> bool:
        """Whether this layer keeps everything. Called as its forward begins."""
        meter = self.meters.get(x.device)
        index = layer._hfpatch.index
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
        if layer._hfpatch.index != self.n_layers - 1 or not torch.is_grad_enabled():
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
        return any(bool(one._hfpatch.traits.mixers) for one in (layer, *self._layers()))

    def _keeping(self, x: Tensor) -> int:
        """How many layers keep something: those from the first trained one on."""
        layers = [] if x.requires_grad else self._layers()
        if not layers:
            return self.n_layers
        trains = (one for one in layers if any(p.requires_grad for p in one.parameters()))
        return self.n_layers - next((one._hfpatch.index for one in trains), self.n_layers)

    def _host_free(self) -> int | None:
        """Free host memory of this rank, with the unused memory of this runtime's pools."""
        free = memory.host_free()
        ranks = environment_number("LOCAL_WORLD_SIZE", 1, 1)
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
        pool = self.queues[x.device, "host"].transfers.pool
        free = memory.host_free()
        if free is not None and free < SCARCE_HOST:
            pool.give_back()  # host memory is scarce: hold no more than this length takes
        below = self.n_layers - self._keeping(x)
        layers = -(-(self._keeping(x) - policy.plain) // policy.every)
        ranks = 1 if self.shards is None else self.shards.world
        rows = x[:, :1, ..., 0].numel() * T
        computed = (autocast_dtype(x.device.type) or x.dtype).itemsize

        def named(name: str) -> int:
            return max((getattr(c, name, 0) or 0 for c in layer._hfpatch.configs), default=0)

        heads = named("num_attention_heads")
        head = layer._hfpatch.condition.head_dim
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
                sizes[x.shape[0] * (b - a) * meter.step.plan.gate_up // 2] += 2 * gates
        most = self._host_free()
        pool.reserve(+sizes, most and int(HOST_SHARE * most))

    # -- the order of calls ------------------------------------------------------------------------
    def link(self, call: LayerCall, x: Tensor) -> None:
        """Links a call to the previous one if x is the output of that. every > 1 forms its segments
        here.
        """
        call.queue = self.queues[x.device, call.policy.offload]
        before = self._before(x)
        if before is not None:
            call.previous = weakref.ref(before)
            # a segment makes no gradient of the hidden states inside it
            watched = call.policy.every > 1 and (x.is_leaf or gradient_is_watched(x))
            # A segment ends where the policy changes: another one keeps its input elsewhere.
            alike = before.policy == call.policy
            if not watched and alike and len(before.segment) + 1 < call.policy.every:
                call.segment = (*before.segment, before)

    def _before(self, x: Tensor) -> LayerCall | None:
        """The last call, if x is its output as it left it."""
        # a view of the output if the hidden states are residual streams
        last, output, count = self.last_call
        y = output() if version(x) == count else None
        as_given = (
            y is x
            or y is not None
            and y.stride() == x.stride()
            and y.shape == x.shape
            and same_memory(y, x)
        )
        return last() if as_given else None

    def ran_plain(self, layer: nn.Module, x: Tensor, y) -> None:
        """Called after a layer that keeps everything, with its output y."""
        y = y if isinstance(y, Tensor) else y[0]
        meter = self.meters.get(x.device)
        if meter is not None and meter.step is not None and y.requires_grad:
            y.register_hook(partial(_measure, meter.step, layer._hfpatch.index))

    # -- frozen weights ----------------------------------------------------------------------------
    def weights_to_host(self, owner: nn.Module, device: torch.device) -> None:
        """Moves the frozen weights of all layers in `owner` to host memory, if they are not there
        yet.
        """
        before = self.weights.host_bytes
        with self.weights.lock:
            self.weights.pack(layers_in(owner), device)
            self.weights.make_slots()  # before free memory is measured
        if self.weights.host_bytes != before and metered(device):
            host = self.weights.host_bytes / 2**30
            slot = self.weights.slot_bytes / 2**30
            say(
                f"frozen weights, {host:.1f} GiB, wait on the host; two slots of {slot:.2f} GiB "
                "on the device take them in turn."
            )

    def weights_staying(self, layer: nn.Module, function):
        """StreamedWeights.staying. Weights that do not fit on their new device stay on the host
        from then on.
        """
        owner = self.owner()
        first = layer._hfpatch.index == 0 and not self.weights.on
        if (
            first
            and self.checkpointing.frozen_weights == "auto"
            and owner is not None
            and frozen_tables(layer)
        ):
            device = function(torch.empty(0, dtype=torch.uint8, device="cpu")).device
            if metered(device):
                coming = sum(
                    p.numel() * p.element_size() for p in owner.parameters() if p.device != device
                )
                self.weights.on = coming > memory.gpu_free(device)
        return self.weights.staying(layer, function)

    def close(self) -> None:
        """Frees host memory, streams and files, except what a graph still holds."""
        for queue in self.queues.values():
            queue.reset()
            queue.drop_ring()
            queue.transfers.close()
        self.weights.close()
        owner = self.owner()
        for parameter in () if owner is None else owner.parameters():
            not_for_deepspeed(parameter, False)
        self.queues.clear()
        self.shapes.clear()
        self.said.clear()
        self.meters.clear()


def _measure(step, index: int, _grad: Tensor) -> None:
    """Tensor hook: the backward of an untiled layer begins."""
    step.meter.untiled(step, index)


class Waiting:
    """Names of the tensors that wait on the host now, in the runtime's model and in its PEFT
    wrapper.
    """

    _hfpatch = True

    def __init__(self, runtime: LayerRuntime):
        self.runtime = runtime

    def __iter__(self):
        owner = self.runtime.owner() if self.runtime.weights.on else None
        layers = () if owner is None else layers_in(owner)
        waiting = {id(table[n]) for layer in layers for table, n in frozen_tables(layer)}
        tensors = () if owner is None else (*owner.named_parameters(), *owner.named_buffers())
        return iter(
            [
                prefix + n
                for n, t in tensors
                if id(t) in waiting
                for prefix in ("", "base_model.model.")
            ]
        )
