"""Checkpointing of a whole layer with its input offloaded: for layers that cannot run tile by tile.

Non-reentrant `torch.utils.checkpoint` inside saved-tensor hooks: the hooks see only the layer's input, which goes to the session's
tier and comes back one layer ahead of its use.
"""

import weakref

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class _Held:
    """One layer's input on its way through the tier."""

    def __init__(self, session, x: Tensor):
        self.transfers = session.transfers
        self.before = session.last_held()
        self.saved, self.ticket = self.transfers.save(x), None
        session.last_held = weakref.ref(self)

    def fetch(self) -> None:
        if self.ticket is None:
            self.ticket = self.transfers.fetch([(self.saved, 0, self.saved.shape[1], None)])

    def get(self) -> Tensor:
        self.fetch()
        x = self.transfers.wait(self.ticket)[0]
        self.ticket = None
        if self.before is not None:
            self.before.fetch()
            self.before = None
        return x

    def __del__(self):
        self.saved.release()


def offloaded_checkpoint(session, run, x_BTD: Tensor):
    """run(x) checkpointed, x [B, T, D] kept where the session's policy says. `run` is called again in backward."""
    policy = session.policy(None, x_BTD)
    if policy.offload == "gpu":
        return checkpoint(run, x_BTD, use_reentrant=False)

    def pack(tensor):
        return _Held(session, tensor) if tensor.data_ptr() == x_BTD.data_ptr() else tensor

    def unpack(held):
        return held.get() if isinstance(held, _Held) else held

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = checkpoint(run, x_BTD, use_reentrant=False)
    session.transfers.settle()
    return y
