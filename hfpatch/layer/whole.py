"""Checkpointing of a whole layer with its input offloaded, for layers that cannot run tile by tile.

Non-reentrant `torch.utils.checkpoint` runs inside saved-tensor hooks. The hooks see only the
layer's input, which goes to the runtime's tier and comes back one layer ahead of its use.
"""

import weakref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfpatch.compat import collecting, modules_in, same_memory
from hfpatch.layer.forward_state import ForwardState, as_in_forward
from hfpatch.layer.graph_bytes import whole_graph


class _Held:
    """One layer's input in the tier. before: weak reference to the previous layer's, whose backward
    is next.
    """

    def __init__(self, transfers, x: Tensor, before):
        self.transfers, self.before, self.shape = transfers, before, x.shape
        # One row of tokens, whatever its dimensions: copies go by rows, and a tower has patches.
        self.saved = transfers.save(x.flatten(0, -2)[None])
        self.ticket = None

    def fetch(self):
        ticket = self.ticket
        # Memory fetched on another stream would return to that stream.
        if ticket is None or ticket.owner != self.transfers.device.current():
            ticket = self.ticket = self.transfers.fetch(
                [(self.saved, 0, self.saved.shape[1], None)]
            )
        return ticket

    def get(self) -> Tensor:
        x = self.fetch().wait()[0].view(self.shape)
        self.ticket = None
        before = self.before()
        if before is not None:
            before.fetch()
        return x


class _AsFirst:
    """Calls run(x), which uses this layer. Later calls use the tensors and switches of the first."""

    def __init__(self, run, layer: nn.Module, step=None):
        self.run, self.layer, self.step = run, layer, step
        self.state = None

    def __call__(self, x):
        if self.state is not None:
            # A hook that computes a gradient reruns this within the forward, which records outputs.
            built = whole_graph(self.step, self.layer, x)
            try:
                with as_in_forward(self.state), collecting({}):
                    return self.run(x)
            finally:  # torch stops the rerun by an exception once it has every tensor
                built([])
        self.state = ForwardState(self.layer, modules_in(self.layer))
        y = self.run(x)
        self.state.ran()
        return y


def offloaded_checkpoint(runtime, policy, layer: nn.Module, run, x_BTD: Tensor):
    """run(x), checkpointed. x [B, T, D] waits in the policy's tier; without a policy (another
    shape), on the device.

    `run` uses this layer. Backward calls it again.
    """
    meter = runtime.meters.get(x_BTD.device)
    run = _AsFirst(run, layer, meter and meter.step)
    if policy is None or policy.offload == "gpu":
        return checkpoint(run, x_BTD, use_reentrant=False)
    transfers = runtime.queues[x_BTD.device, policy.offload].transfers
    before, y_before = runtime.last_held or (None, None)
    before = before if before is not None and y_before() is x_BTD else lambda: None
    # torch keeps the hooks and their closures until backward: x must not be in them.
    held = []
    given = [x_BTD]

    def pack(tensor):
        if not given or not same_memory(tensor, given[0]):
            return tensor
        kept = _Held(transfers, tensor, before)
        held.append(weakref.ref(kept))
        return kept

    def unpack(held):
        return held.get() if isinstance(held, _Held) else held

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = checkpoint(run, x_BTD, use_reentrant=False)
    finally:
        given.clear()
        transfers.settle()
    first = y if isinstance(y, Tensor) else y[0]
    runtime.last_held = (held[0], weakref.ref(first)) if held else None
    return y
