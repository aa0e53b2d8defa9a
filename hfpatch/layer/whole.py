"""Checkpointing of a whole layer with its input offloaded, for layers that cannot run tile by tile.

Non-reentrant `torch.utils.checkpoint` runs inside saved-tensor hooks. The hooks see only the
layer's input, which goes to the runtime's tier until the layer runs again.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfpatch.compat import Snapshot, collecting, modules_in, same_memory
from hfpatch.layer.forward_state import ForwardState, as_in_forward
from hfpatch.layer.graph_bytes import whole_graph


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
        self.state = ForwardState(self.layer, modules_in(self.layer), Snapshot(self.layer))
        y = self.run(x)
        self.state.ran()
        return y


def offloaded_checkpoint(runtime, policy, layer: nn.Module, run, x_BTD: Tensor):
    """run(x), checkpointed. x waits in the policy's tier.

    `run` uses this layer. Backward calls it again.
    """
    meter = runtime.meters.get(x_BTD.device)
    run = _AsFirst(run, layer, meter and meter.step)
    if policy.offload == "gpu":
        return checkpoint(run, x_BTD, use_reentrant=False)
    transfers = runtime.queues[x_BTD.device, policy.offload].transfers
    # torch keeps the hooks and their closures until backward: x must not be in them.
    given = [x_BTD]

    def pack(tensor):
        if not given or not same_memory(tensor, given[0]):
            return tensor
        # One row of tokens, whatever its dimensions: copies go by rows, and a tower has patches.
        return transfers.save(tensor.flatten(0, -2)[None]), tensor.shape

    def unpack(kept):
        if isinstance(kept, Tensor):
            return kept
        saved, shape = kept
        return transfers.fetch([(saved, 0, saved.shape[1], None)]).wait()[0].view(shape)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(run, x_BTD, use_reentrant=False)
    finally:
        given.clear()
        transfers.settle()
