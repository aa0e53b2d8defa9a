"""What a model's tiled layers share: policies (policies.py), the order of their calls, frozen weights
on the host, and the lines already printed.

A backward follows the order of calls from its end: each call knows that of the layer below, and
prefetches its checkpoints. A segment (`every` > 1) is a chain of references, as we do not control
the loop over layers.
"""

import copy
import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hfpatch.budget import free as memory
from hfpatch.budget.limits import gib
from hfpatch.budget.policy import Checkpointing
from hfpatch.compat import (
    Turn,
    gradient_is_watched,
    not_for_deepspeed,
    same_memory,
    version,
)
from hfpatch.layer import policies
from hfpatch.layer.call import LayerCall
from hfpatch.layer.meter import Meter
from hfpatch.layer.policies import Policies, Shape, gradient_order_matters
from hfpatch.layer.residual_streams import Streams, joined, streams_of
from hfpatch.layer.streamed_weights import StreamedWeights, frozen_tables
from hfpatch.layer.traits import layers_in
from hfpatch.parallel.shards import Shards
from hfpatch.report import say
from hfpatch.store.device import on_host
from hfpatch.store.transfers import FetchQueue


class LayerRuntime(Policies):
    """One per list of layers (a stack's, or blocks of a tower). A copy or a pickle starts with the
    same settings and nothing in flight.

    Attributes:
        checkpointing: the user's settings.
        n_layers: how many layers share this runtime.
        shapes: what was decided, by batch shape.
        queues: by (device, place of checkpoints), each with transfers of its own.
        shards: how tensor-parallel ranks share a layer's input, or None.
        meters: the Meter of each device, None if its free memory is unknown.
        printed: policies of the last lines.
        row_ranks: the ranks that share the rows of the current call, or None.
        exchanges_tokens: whether ranks with batches of their own send each other's experts tokens.
        owner: a weak reference to the module whose parameters a step trains.
        copy_room: bytes that the sources of copies may take while a layer runs.
        padding_BT: True at padding whose gradient the running forward has yet to watch, or None.
        padding_read: whether a gradient reached padding, None before any backward could show it; a
            flag on the device until the host reads it.
        weights: frozen weights that wait on the host.
        turn: the model's lock.
        last_call: weak references to the last call and to its output, and how often that was
            written to.
    """

    def __init__(self, checkpointing: Checkpointing, n_layers: int, turn: Turn | None = None):
        self.checkpointing = checkpointing
        self.n_layers = n_layers
        self.shapes: dict[tuple, Shape] = {}
        self.queues: dict[tuple, FetchQueue] = {}
        self.shards: Shards | None = None
        self.meters: dict[torch.device, Meter | None] = {}
        self.printed: dict[tuple, Checkpointing] = {}
        self.owner = lambda: None
        self.row_ranks = None
        self.exchanges_tokens = False
        self.copy_room = 0
        self.padding_BT: Tensor | None = None
        self.padding_read: bool | Tensor | None = None
        self.weights = StreamedWeights(checkpointing.frozen_weights == "host")
        self.turn = Turn() if turn is None else turn
        self.last_call = (lambda: None, lambda: None, 0)

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
        if report is not None and line not in report.notes:
            say(line)
            report.notes.append(line)

    # -- padding -----------------------------------------------------------------------------------
    # Causality hides the padding behind a row from real tokens, so layers need no mask. But padding
    # sees itself, so its outputs are not transformers'. A loss that the model computes names the
    # tokens that it reads (loss/causal_model.py). Any other reader shows by its gradient.
    def watch_padding(self, x: Tensor) -> None:
        """Looks at the gradient of a layer's input, in the first layer whose input has one: it comes
        from all that reads padding behind that."""
        padding_BT = self.padding_BT
        if padding_BT is None or not x.requires_grad:
            return
        streams = streams_of(x, *padding_BT.shape)
        if streams is not None or x.shape[:-1] == padding_BT.shape:
            x.register_hook(partial(self._look, padding_BT, streams))
            self.padding_BT = None

    def _look(self, padding_BT: Tensor, streams: Streams | None, dy: Tensor) -> None:
        # NaN, which a mask of zeros does not remove, is not above 0.
        size_BT = torch.linalg.vector_norm(joined(dy.detach(), streams), torch.inf, -1)
        read = (padding_BT & (size_BT > 0)).any()
        self.padding_read = read if self.padding_read is None else read | self.padding_read

    def padding_is_read(self, unknown: bool) -> bool:
        """Whether a gradient reached padding in an earlier backward of this model. unknown: the
        answer before one could show it. Never under DeepSpeed: layers that run untiled on one rank
        alone give their gradients in another order there.
        """
        if gradient_order_matters():
            return False
        if isinstance(self.padding_read, Tensor):
            self.padding_read = bool(on_host(self.padding_read))
        return unknown if self.padding_read is None else self.padding_read

    # -- the order of calls ------------------------------------------------------------------------
    def link(self, call: LayerCall, x: Tensor) -> None:
        """Links a call to that of the layer below, whose output is x. every > 1 forms its segments
        here.
        """
        call.queue = self.queues[x.device, call.policy.offload]
        below = self._call_of(x)
        if below is not None:
            call.below = weakref.ref(below)
            # a segment makes no gradient of the hidden states inside it
            watched = call.policy.every > 1 and (x.is_leaf or gradient_is_watched(x))
            # A segment ends where the policy changes: another one keeps its input elsewhere.
            alike = below.policy == call.policy
            if not watched and alike and len(below.segment) + 1 < call.policy.every:
                call.segment = (*below.segment, below)

    def _call_of(self, x: Tensor) -> LayerCall | None:
        """The last call, if x is its output as it left it."""
        # a view of the output if the hidden states are residual streams
        last, output, count = self.last_call
        y = output()
        if y is None or version(x) != count:
            return None
        alike = y.shape == x.shape and y.stride() == x.stride()
        return last() if y is x or alike and same_memory(y, x) else None

    def kept_all(self, layer: nn.Module, x: Tensor, y) -> None:
        """Called after a layer that keeps all, with its output y."""
        y = y if isinstance(y, Tensor) else y[0]
        meter = self.meters.get(x.device)
        if meter is not None and meter.step is not None and y.requires_grad:
            y.register_hook(partial(meter.backward_keeping_all, meter.step, layer._hfpatch.index))

    # -- frozen weights ----------------------------------------------------------------------------
    def weights_to_host(self, owner: nn.Module, device: torch.device) -> None:
        """Moves the frozen weights of all layers in `owner` to host memory, if they are not there
        yet.
        """
        before = self.weights.host_bytes
        self.weights.pack(layers_in(owner), device)
        self.weights.make_slots()  # before free memory is measured
        if self.weights.host_bytes != before and policies.metered(device):
            host = gib(self.weights.host_bytes)
            slot = gib(self.weights.slot_bytes, 2)
            say(
                f"frozen weights, {host}, wait on the host; the device holds two layers at a time, "
                f"{slot} each."
            )

    def weights_staying(self, layer: nn.Module, function):
        """StreamedWeights.staying. Weights that do not fit on their new device stay on the host
        from then on.
        """
        owner = self.owner()
        to = function(torch.empty(0, device="cpu")).device
        auto = self.checkpointing.frozen_weights == "auto" and not self.weights.on
        first = owner is not None and layer._hfpatch.index == 0
        if auto and first and policies.metered(to) and frozen_tables(layer):
            coming = [p for p in owner.parameters() if p.device != to]
            nbytes = sum(p.numel() * p.element_size() for p in coming)
            self.weights.on = nbytes > memory.gpu_free(to)
        return self.weights.staying(layer, to)

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
        self.printed.clear()
        self.meters.clear()


@dataclass
class Waiting:
    """Names of the tensors that wait on the host now, in the runtime's model and in its PEFT
    wrapper.
    """

    runtime: LayerRuntime
    _hfpatch = True

    def __iter__(self):
        owner = self.runtime.owner()
        if owner is None or not self.runtime.weights.on:
            return
        waiting = {id(table[n]) for layer in layers_in(owner) for table, n in frozen_tables(layer)}
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            if id(tensor) in waiting:
                yield name
                yield f"base_model.model.{name}"
