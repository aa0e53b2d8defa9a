"""Checkpointing of a whole layer with its input offloaded, for layers that cannot run tile by tile.

Non-reentrant `torch.utils.checkpoint` runs inside saved-tensor hooks. The hooks see only the
layer's input, which goes to the runtime's tier until the layer runs again.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfpatch.compat import Snapshot, collecting, same_memory
from hfpatch.layer.forward_state import ForwardState, as_in_forward
from hfpatch.layer.graph_bytes import whole_graph


def offloaded_checkpoint(runtime, policy, layer: nn.Module, run, x_BTD: Tensor):
    """run(x), checkpointed. x waits in the policy's tier.

    `run` uses this layer. Backward calls it again, on the tensors and switches of the first run.
    """
    # [Step 1] Make the function that torch's checkpoint calls. Its first call notes the layer's
    # state, later calls run in that state.
    meter = runtime.meters.get(x_BTD.device)
    step = meter and meter.step
    state: ForwardState | None = None

    def as_first(x):
        nonlocal state
        if state is None:
            state = ForwardState(layer, Snapshot(layer))
            y = run(x)
            state.ran()
            return y
        # A hook that computes a gradient reruns this within the forward, which records outputs.
        built = whole_graph(step, layer, x)
        try:
            with as_in_forward(state), collecting({}):
                return run(x)
        finally:  # torch raises an exception to end the rerun early
            built([])

    # [Step 2] On the device torch keeps the input itself.
    if policy.offload == "gpu":
        return checkpoint(as_first, x_BTD, use_reentrant=False)
    # [Step 3] Elsewhere, saved-tensor hooks send the input to its tier and fetch it again.
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
            return checkpoint(as_first, x_BTD, use_reentrant=False)
    finally:
        given.clear()
        transfers.settle()
