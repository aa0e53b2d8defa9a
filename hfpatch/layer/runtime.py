"""The state that a model's tiled layers share: the resolved policy, the copies under way, and the
order of the calls.
"""

import copy
import dataclasses
import sys
import time
import weakref
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpatch.attention.attention import deterministic_scratch
from hfpatch.budget import free as memory
from hfpatch.budget.choice import HOST_SHARE, PINNED_MOST, Budget, decide
from hfpatch.budget.cuts import head_groups, tile_bounds
from hfpatch.budget.flops import step_flops
from hfpatch.budget.formula import ModelShape, spare_bytes, step_memory
from hfpatch.budget.hardware import PIN_BYTES_PER_SECOND, Gpu, at_place, place_of
from hfpatch.budget.limits import environment_number
from hfpatch.budget.policy import (
    KEEPABLE,
    LOSS_WORKSPACE,
    TIME_TILE_LEAST,
    Checkpointing,
    Policy,
    auto_tile,
    describe,
    time_tile,
)
from hfpatch.budget.seconds import step_time
from hfpatch.compat import Turn, autocast_dtype, not_for_deepspeed, same_memory, told_of_forks
from hfpatch.layer.call import LayerCall
from hfpatch.layer.privacy import private_holders
from hfpatch.layer.room import Gauge, Room
from hfpatch.layer.streamed_weights import StreamedWeights, frozen_tables
from hfpatch.layer.weight_gradients import is_sharded
from hfpatch.parallel.shards import Shards, least_of, tensor_parallel_group, together
from hfpatch.parts.quantised import as_trained
from hfpatch.report import say
from hfpatch.store.transfers import FetchQueue, Transfers

SCARCE_HOST = 2 << 30  # bytes of free host memory below which none is held for longer batches


def _rounded(tokens: int) -> int:
    """Up to the next sixteenth of a power of two."""
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def metered(device: torch.device) -> bool:
    """Whether the device's free memory is known, and no other than what checkpoints may be kept
    in.
    """
    return device.type == "cuda"


def arrival_counts() -> bool:
    """Whether ranks must see gradients arrive in one order: DeepSpeed's buckets fill so. Within a
    plain layer and a tiled one it is not the same, and ranks choose by their own memory and
    lengths.
    """
    return "deepspeed" in sys.modules and dist.is_initialized() and dist.get_world_size() > 1


def _local_ranks() -> int:
    return environment_number("LOCAL_WORLD_SIZE", 1, 1)


def _beside_others(gpu: Gpu | None) -> Gpu | None:
    """A card as one of those whose processes share this machine."""
    return gpu and dataclasses.replace(gpu, sharing=_local_ranks())


class LayerRuntime:
    """One per patched model. A copy or a pickle of it starts with the same settings and nothing
    under way.

    checkpointing: the user's settings; shape: the model's, None where its layers are not Llama's
    (their inputs are kept whole); n_layers: how many layers share this session; turn: the model's
    lock.
    """

    def __init__(
        self,
        checkpointing: Checkpointing,
        shape: ModelShape | None,
        n_layers: int,
        turn: Turn | None = None,
    ):
        self.checkpointing, self.shape, self.n_layers = checkpointing, shape, n_layers
        self.told: set[str] = set()
        self.policies: dict[tuple, Policy] = {}
        # by (device, tier): each with transfers of its own
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.rooms: dict[torch.device, Room] = {}
        self.owner = lambda: None  # weak reference to the module whose parameters a step trains
        # by policy, B and T: bytes on the device, by the closed form
        self.planned: dict[tuple, int] = {}
        # seconds; began is None once the first step has ended
        self.began, self.pinning = time.monotonic(), 0.0
        # layers, by index and mode, that were seen to draw random numbers
        self.draws: set[tuple] = set()
        self.opened: set[tuple] = set()  # shapes whose host memory is reserved
        self.loss_bytes = LOSS_WORKSPACE  # of the step under way
        self.spare = 0  # bytes that the sources of copies may take when the layer under way ends
        # by policy, B and T: of each layer (memory.formula.spare_bytes)
        self._spares: dict[tuple, tuple] = {}
        self.sequence = None  # parallel.exchange.Sequence of the call under way
        self.weights = StreamedWeights(checkpointing.frozen_weights == "host")
        self._private: dict[type, tuple] = {}
        self._last = (lambda: None,) * 2  # the call that came last, and what it gave
        self._last_index = 0  # of the layer that asked for a policy
        self.last_held = None  # layer/whole.py: the input saved before, and what its layer gave
        self.turn = Turn() if turn is None else turn
        told_of_forks(self)

    def _at_fork_reinit(self) -> None:
        """What was under way is the parent's, and so are the threads for its files."""
        self.queues.clear()

    def __deepcopy__(self, memo):
        made = LayerRuntime(
            self.checkpointing, self.shape, self.n_layers, copy.deepcopy(self.turn, memo)
        )
        made.owned_by(memo.get(id(self.owner())))
        return made

    def __reduce__(self):
        return LayerRuntime, (self.checkpointing, self.shape, self.n_layers, self.turn)

    def owned_by(self, module: nn.Module | None) -> None:
        """The module whose parameters a step trains, where there is one and none is known."""
        if module is not None and self.owner() is None:
            self.owner = weakref.ref(module)

    # -- policy ------------------------------------------------------------------------------------
    def tell(self, line: str) -> None:
        """The same line once."""
        if line not in self.told:
            self.told.add(line)
            say(line)

    def policy(
        self,
        layer: nn.Module,
        x_BTD: Tensor,
        sequence=None,
        whole: bool = False,
        able=lambda: KEEPABLE,
    ) -> Policy:
        """The policy for this batch shape; chosen, and host memory reserved, when the shape is
        first seen.

        whole: the layer cannot be tiled; sequence: the ranks that share its rows
        (parallel.exchange.Sequence), which all choose alike; able: a function giving those of
        KEEPABLE that it can keep. Raises ValueError where the host cannot hold what was asked for.
        """
        self.sequence = sequence
        for queue in self.queues.values():
            queue.begin()
        B, T, _ = x_BTD.shape
        device, training = x_BTD.device, torch.is_grad_enabled()
        room = self.room_of(device)
        begins = layer._hfpatch_index <= self._last_index
        first = room is not None and training and begins
        self._last_index = layer._hfpatch_index
        if first:
            self._look_back(room)
        whole = whole or self.shape is None
        # Lengths that are close have one policy: it is chosen for the longest of them.
        longest = T if room is None else _rounded(T)
        key = (B, longest, x_BTD.dtype, device, whole, sequence, autocast_dtype(device.type))
        policy = self.policies.get(key)
        if policy is None and not training:  # nothing is kept
            tile = self.checkpointing.tile
            return Policy("gpu", tile=auto_tile(B * T) if tile == "auto" else tile)
        opened = (*key, T)
        if (
            policy is None
            or training
            and (opened not in self.opened or (device, policy.offload) not in self.queues)
        ):

            def open_shape():
                self.shape = as_trained(self.shape, layer)
                found = policy or self._chosen(layer, x_BTD, longest, whole, able(), group)
                self._open(found, whole, B, T, x_BTD)
                return found

            group = None if whole else tensor_parallel_group(layer)
            if sequence is not None:
                policy = sequence.together(open_shape)
            else:
                policy = open_shape() if group is None else together(group, open_shape)
            self.opened.add(opened)
        self.policies[key] = policy  # last: what failed before is tried again
        self.loss_bytes = policy.loss_bytes
        if training:
            self._leave_room(layer, policy, B, longest, x_BTD, alone=begins or whole)
        if room is not None and training:
            (room.begin if first else room.also)(self.planned.get((policy, B, longest)))
        return policy

    def _leave_room(
        self, layer: nn.Module, policy: Policy, B: int, T: int, x: Tensor, alone: bool
    ) -> None:
        """Before a layer runs forward: sources of earlier layers' copies stay as far as the plan
        has room for them beside it.

        alone: none may stay, for a pass begins, or nobody knows what the layer takes.
        """
        key, i = (policy, B, T), layer._hfpatch_index
        if key not in self._spares:
            self._spares[key] = (0,) * (self.n_layers + 1)
            if (
                self.shape is not None
                and self.sequence is None
                and self.shape.num_layers == self.n_layers
            ):
                sizes = {"batch": B, "tokens": T, "itemsize": x.element_size()}
                memory = step_memory(self.shape, policy, **sizes)
                self._spares[key] = spare_bytes(memory, self.shape, policy, **sizes)
        spares = self._spares[key]
        self.spare = spares[i + 1]
        for queue in self.queues.values():
            queue.transfers.settle(room=0 if alone else spares[i])

    # -- frozen weights ----------------------------------------------------------------------------
    def weights_to_host(self, owner: nn.Module, device: torch.device) -> None:
        """The frozen weights of all layers in `owner` into host memory, where they are not there
        yet.
        """
        began, before = time.monotonic(), self.weights.host_bytes
        with self.weights.lock:
            self.weights.pack([m for m in owner.modules() if "_hfpatch_index" in vars(m)], device)
            self.weights.make_slots()  # before anybody asks what is free
        if self.weights.host_bytes != before and metered(device):
            self.pinning += time.monotonic() - began
            host, slot = self.weights.host_bytes / 2**30, self.weights.slot_bytes / 2**30
            say(
                f"frozen weights, {host:.1f} GiB, wait on the host; two slots of {slot:.2f} GiB "
                "on the device take them in turn."
            )

    def weights_staying(self, layer: nn.Module, function):
        """StreamedWeights.staying; weights that do not fit on the device which they are sent to
        stay on the host from then on.
        """
        owner, first = self.owner(), layer._hfpatch_index == 0 and not self.weights.on
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

    def room_of(self, device: torch.device) -> Room | None:
        """The memory budget of a device; None where no memory is counted."""
        if not metered(device):
            return None
        if device not in self.rooms:
            owner, me = self.owner, weakref.ref(self)
            ended = lambda: me() and me()._first_step_ended()  # noqa: E731
            self.rooms[device] = Room(
                Gauge(device), lambda: owner() and owner().parameters(), ended
            )
        return self.rooms[device]

    def _look_back(self, room: Room) -> None:
        """Where the last step showed that there is less memory than was thought, or more, shapes
        get other policies.
        """
        learnt = room.look()
        if learnt is not None:
            self.policies.clear()
            self.opened.clear()
        if learnt:
            say(f"{learnt}: layers keep less from now on.")

    def _first_step_ended(self) -> None:
        if self.began is not None:
            took, self.began = time.monotonic() - self.began, None
            say(
                f"from apply to the end of the first step: {took:.0f} s, {self.pinning:.0f} of "
                "them to pin host memory."
            )

    def planned_seconds(self, B: int, T: int, stays) -> tuple[float, float] | None:
        """Seconds of a pass at [B, T], both ways, and of the optimizer's step, by the step model
        under the policy that was chosen; None where nobody knows the device's rates, or no closed
        form describes the model. stays: what a placement keeps.
        """
        for (batch, longest, dtype, device, whole, *_), policy in self.policies.items():
            gpu = device in self.rooms and self.rooms[device].gpu
            if (batch, longest) == (B, _rounded(T)) and gpu and not whole:
                sizes = {"batch": B, "tokens": T}
                taken = (
                    step_flops(self.shape, policy, **sizes),
                    step_memory(self.shape, policy, **sizes, itemsize=dtype.itemsize),
                )
                time, _ = step_time(
                    _beside_others(gpu),
                    *taken,
                    policy,
                    self.shape,
                    stays,
                    **sizes,
                    itemsize=dtype.itemsize,
                )
                return time.total - time.optimizer, time.optimizer
        return None

    def is_plain(self, layer: nn.Module, policy: Policy) -> bool:
        """Whether this is one of the last layers, which keep everything."""
        return layer._hfpatch_index >= self.n_layers - policy.plain

    def ran_plain(self, layer: nn.Module, policy: Policy, x: Tensor, y) -> None:
        """A layer that keeps everything gave y. Behind the last one no copy's source stays. In
        backward, the first of several hides the first copies for the tiled layer before it; a
        single one runs where memory is shortest.
        """
        queue = self.queues.get((x.device, policy.offload))
        if queue is None:
            return
        if layer._hfpatch_index == self.n_layers - 1:
            queue.transfers.settle()
        call, y = self._before(x), y if isinstance(y, Tensor) else y[0]
        waits = call is not None and call.queue is queue and call.earlier is None
        if waits and policy.plain > 1 and y.requires_grad:
            y.register_hook(partial(self._prefetch, weakref.ref(call)))

    def _prefetch(self, call, _grad: Tensor) -> None:
        """A hook: the backward of the layer behind this call begins."""
        call = call()
        if call is not None:
            with self.turn:
                call.queue.begin()
                call.prefetch()

    def _chosen(
        self, layer: nn.Module, x_BTD: Tensor, T: int, whole: bool, able: tuple, group
    ) -> Policy:
        """group: ranks that run each layer between them, and so must choose alike."""
        B, device = x_BTD.shape[0], x_BTD.device
        policy = self._resolve(B, T, x_BTD, whole, able, is_sharded(layer), group)
        if device.type == "cuda" and torch.are_deterministic_algorithms_enabled() and not whole:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._refuse_large_splits(*x_BTD.shape[:2], processors, memory.gpu_free(device))
        if policy.every > 1 and is_sharded(layer):
            raise ValueError(
                f"hfpatch: every={policy.every} runs several layers at once, which parameters "
                "sharded layer by layer "
                "do not allow; use Checkpointing(every=1) with a directory as offload where host "
                "memory is short."
            )
        # Layers that run again from one input keep what they are given; only a layer of its own
        # gives x in parts.
        if group is not None and policy.every == 1 and self.shards is None:
            self.shards = Shards(group)
        return policy

    def _resolve(
        self, B: int, T: int, x: Tensor, whole: bool, able: tuple, sharded: bool, group
    ) -> Policy:
        settings = self.checkpointing
        if sharded and settings.every == "auto":
            settings = dataclasses.replace(settings, every=1)
        room = self.room_of(x.device)
        if room is None and settings.offload == "auto":
            # The device is the host: a copy would only take memory.
            settings = dataclasses.replace(settings, offload="gpu")
        if x.device.type == "meta":  # of shapes alone there is nothing to copy
            settings = dataclasses.replace(settings, offload="gpu")
        if self.weights.on:
            settings = dataclasses.replace(settings, frozen_weights="host", plain=0)
        plain = 0 if settings.plain == "auto" else settings.plain
        if arrival_counts():
            settings = dataclasses.replace(settings, plain=plain)
        if self.shape is None:
            # Sizes that no closed form describes: everything that is worth keeping goes to the
            #     host.
            tier = (
                "disk"
                if settings.directory
                else "host"
                if settings.offload == "auto"
                else settings.offload
            )
            every = 1 if whole or settings.every == "auto" else settings.every
            save = not whole and (
                every == 1 if settings.save_attention == "auto" else settings.save_attention
            )
            tile, in_time = settings.tile, 0
            if tile == "auto" and settings.aim == "least":
                tile = TIME_TILE_LEAST
            elif tile == "auto":
                tile = auto_tile(B * T)
                in_time = time_tile(tile, x.shape[-1], room and room.bytes())
            keep = () if whole or every > 1 or settings.keep == "auto" else tuple(settings.keep)
            return Policy(
                offload=tier, every=every, save_attention=save, tile=tile, time_tile=in_time,
                plain=plain, keep=keep,
            )  # fmt: skip
        if whole:
            # Each layer keeps its input, no more: no closed form knows what else they would.
            settings = dataclasses.replace(
                settings, every=1, save_attention=False, plain=plain, keep=()
            )
        # An engine that shards weights gathers two layers' and one layer's gradients.
        gathered = 3 * self.shape.layer_parameters * x.element_size() if sharded else 0
        free, gpu = (
            [None if room is None else room.bytes(gathered), self._host_free()],
            room and room.gpu,
        )
        if self.sequence is not None or group is not None:
            # All that a choice depends on and ranks may have otherwise: of cards of several kinds,
            #     the slowest is planned for.
            least = self.sequence.least if self.sequence is not None else partial(least_of, group)
            *free, place = least([*free, place_of(gpu)], x.device)
            gpu = at_place(place)
            if room is not None:
                room.alone = False
        option = decide(
            settings, self.shape if whole else self._shared(), batch=B, tokens=T,
            itemsize=x.element_size(),
            gpu_free=free[0], host_free=free[1], gpu=_beside_others(gpu), able=able,
        )  # fmt: skip
        alone = not (whole or sharded) and group is None and self.sequence is None
        if (
            alone
            and settings.frozen_weights == "auto"
            and self.shape.adapters
            and self.owner() is not None
        ):
            # Weights that left do not come back: they stay for a step that would fit once one was
            #     measured.
            if not Budget(room and room.bytes(gathered, careful=False), free[1]).admits_device(
                option
            ):
                self.weights.on = True
                self.policies.clear()  # of other lengths: some may have let layers keep everything
                self.weights_to_host(self.owner(), x.device)
                return self._resolve(B, T, x, whole, able, sharded, group)
        self.planned[option.policy, B, T] = option.device
        if room is not None:
            kept = describe(option.policy, self.shape.num_layers)
            pin = option.host / PIN_BYTES_PER_SECOND
            takes = f", {option.seconds:.1f} s planned" if gpu else ""
            say(
                f"{B} x {T:,} tokens: {kept}; {option.device / 2**30:.1f} of "
                f"{free[0] / 2**30:.1f} GiB free on the device, "
                f"{option.host / 2**30:.1f} GiB on the "
                f"host{f', about {pin:.0f} s to pin once' if pin >= 1 else ''}{takes}."
            )
        return option.policy

    def _host_free(self) -> int | None:
        """Free host memory of this rank, what this session's own pool holds in wait counted as
        free.
        """
        free, ranks = memory.host_free(), _local_ranks()
        waits = sum(q.transfers.pool.bytes_free for q in self.queues.values())
        return None if free is None else free // ranks + waits

    def _shared(self) -> ModelShape:
        """The model's shape for the ranks that share the rows under way."""
        return (
            self.shape
            if self.sequence is None
            else dataclasses.replace(self.shape, ranks=self.sequence.size)
        )

    def _refuse_large_splits(self, B: int, T: int, processors: int, free: int) -> None:
        """Deterministic attention backward at long lengths: its scratch is said before the step,
        not by an out-of-memory error.
        """
        s = self.shape
        heads = s.num_heads // head_groups(B, T, self._shared())
        if self.sequence is None:
            scratch = deterministic_scratch(B, T, heads, s.head_dim, processors)
        else:
            ranks = self.sequence.size
            scratch = deterministic_scratch(B, T * ranks, heads // ranks, s.head_dim, processors)
        activations = 6 * B * T * s.hidden_size * 2
        if scratch + activations > free:
            raise ValueError(
                f"hfpatch: expected {(scratch + activations) / 2**30:.1f} GiB for a layer's "
                f"deterministic backward at {T} tokens "
                f"({scratch / 2**30:.1f} GiB of them split dq sums), {free / 2**30:.1f} GiB are "
                "free; "
                "call torch.use_deterministic_algorithms(False) or shorten the sequence."
            )

    def _open(self, policy: Policy, whole: bool, B: int, T: int, x: Tensor) -> None:
        """Copies for this policy, and host memory for a step of it."""
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
        sizes = self._block_sizes(policy, whole, B, T, itemsize, computed)
        free = memory.host_free()
        if free is not None and free < SCARCE_HOST:
            transfers.pool.give_back()  # others are short of it: no more than this length takes
        most = self._host_free()
        if most is not None:
            most = min(int(HOST_SHARE * most), PINNED_MOST if policy.keep else most)
        began = time.monotonic()
        transfers.pool.reserve(sizes, most)
        self.pinning += time.monotonic() - began

    @property
    def transfers(self) -> Transfers | None:
        """The copies of the first device, None before the first step."""
        return next((queue.transfers for queue in self.queues.values()), None)

    def _block_sizes(
        self, policy, whole: bool, B: int, T: int, itemsize: int, computed: int
    ) -> dict[int, int]:
        """How many host blocks of which size one step takes: {bytes: count}. itemsize: of x;
        computed: of q, k, v and out, smaller under autocast.
        """
        tiled, s, rows = self.n_layers - min(policy.plain, self.n_layers), self.shape, B * T
        bounds, kept = tile_bounds(B, T, policy.tile), rows
        if self.shards is not None and not whole and policy.every == 1:
            kept = B * self.shards.bounds(bounds)[-1][1]
        sizes = Counter({kept * s.hidden_size * itemsize: -(-tiled // policy.every)})
        if policy.park and not whole:
            sizes[rows * s.hidden_size * itemsize] += 1
        if whole:
            return sizes
        groups = head_groups(B, T, self._shared(), policy.wide)
        saved = (tiled - min(policy.again, tiled)) * (policy.save_attention and policy.every == 1)
        if policy.by_group:
            # of the segment that runs again
            sizes[rows * s.hidden_size * itemsize] += policy.every - 1
            saved += policy.every - 1
            unsaved = policy.again or not policy.save_attention
            for columns in (
                s.q_size,
                s.kv_size,
                s.v_size,
                s.out_size,
                *[s.out_size] * bool(unsaved),
            ):
                sizes[rows * columns // groups * computed] += groups
        pieces = (
            groups if policy.stream_attention or policy.by_group or self.sequence is not None else 1
        )
        for nbytes in (
            rows * s.out_size // pieces * computed,
            rows * s.num_heads // pieces * max(4, computed),
        ):
            sizes[nbytes] += saved * pieces
        if policy.every > 1:
            return +sizes
        if "qkv" in policy.keep:
            for columns in (s.q_size, s.kv_size, s.v_size):
                sizes[rows * columns * computed] += tiled
        for a, b in bounds:
            sizes[B * (b - a) * s.hidden_size * itemsize] += tiled * ("mid" in policy.keep)
            inner = s.intermediate_size * (2 if s.joined else 1)
            sizes[B * (b - a) * inner * itemsize] += (
                (1 if s.joined else 2) * tiled * ("gate_up" in policy.keep)
            )
        return +sizes

    # -- the order of calls ------------------------------------------------------------------------
    def private(self, x: Tensor) -> tuple:
        kind = type(x)
        if kind not in self._private:
            self._private[kind] = private_holders(x)
        return self._private[kind]

    def link(self, call: LayerCall, x: Tensor) -> None:
        """Notes which call came before this one, where x is that one's output; every > 1 forms its
        segments here.
        """
        call.queue = self.queues[x.device, call.policy.offload]
        before = self._before(x)
        if before is not None:
            call.previous = weakref.ref(before)
            # Segments end where the policy does: their inputs are kept by another one's transfers.
            if before.policy == call.policy and before.position + 1 < call.policy.every:
                call.earlier, call.position = before, before.position + 1

    def _before(self, x: Tensor) -> LayerCall | None:
        """The call that came last, where it gave x."""
        # which comes as a view where the hidden states are streams
        last, y = self._last[0], self._last[1]()
        as_given = (
            y is x
            or y is not None
            and y.stride() == x.stride()
            and y.shape == x.shape
            and same_memory(y, x)
        )
        return last() if as_given else None

    def linked(self, call: LayerCall, y: Tensor) -> None:
        self._last = weakref.ref(call), weakref.ref(y)

    def close(self) -> None:
        """Gives back host memory, streams and files; what a graph still holds stays until that
        goes.
        """
        for queue in self.queues.values():
            queue.reset()
            queue.drop_ring()
            queue.transfers.close()
        self.weights.close()
        owner = self.owner()
        for parameter in () if owner is None else owner.parameters():
            not_for_deepspeed(parameter, False)
        self.queues.clear()
        self.policies.clear()
        self.opened.clear()
        self.rooms.clear()


class Waiting:
    """Names of the tensors that wait on the host now, in the session's model and in one that PEFT
    wrapped it into.
    """

    _hfpatch = True

    def __init__(self, session: LayerRuntime):
        self.session = session

    def __iter__(self):
        owner = self.session.owner() if self.session.weights.on else None
        layers = (
            () if owner is None else (m for m in owner.modules() if "_hfpatch_index" in vars(m))
        )
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
