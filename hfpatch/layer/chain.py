"""The order in which layers are called, which a backward takes from its end: which call gave the
next one its input, whose checkpoints come back meanwhile.
"""

import weakref
from functools import partial

from torch import Tensor, nn

from hfpatch.budget.policy import Policy
from hfpatch.compat import same_memory
from hfpatch.layer.call import LayerCall
from hfpatch.layer.privacy import private_holders


class Chain:
    """The part of a model's LayerRuntime that knows which call follows which.

    Attributes:
        last_held: what layer/whole.py kept last, and what its layer gave.
    """

    def __init__(self):
        self._private: dict[type, tuple] = {}  # private_holders, by the class of hidden states
        # the call that came last, and what it gave, as weak references
        self.last_call = (lambda: None,) * 2
        self.last_held = None

    def link(self, call: LayerCall, x: Tensor) -> None:
        """Notes which call came before this one, where x is that one's output; every > 1 forms its
        segments here.
        """
        if type(x) not in self._private:
            self._private[type(x)] = private_holders(x)
        call.private = self._private[type(x)]
        call.queue = self.queues[x.device, call.policy.offload]
        before = self._before(x)
        if before is not None:
            call.previous = weakref.ref(before)
            if (call.policy.every > 1 or call.policy.chain > 1) and call.joins(before):
                call.earlier, call.position = before, before.position + 1

    def _before(self, x: Tensor) -> LayerCall | None:
        """The call that came last, where it gave x."""
        # which comes as a view where the hidden states are streams
        last, y = self.last_call[0], self.last_call[1]()
        as_given = (
            y is x
            or y is not None
            and y.stride() == x.stride()
            and y.shape == x.shape
            and same_memory(y, x)
        )
        return last() if as_given else None

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
