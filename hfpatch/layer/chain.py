"""The order of layer calls, which a backward follows from its end: the previous call, and when to
prefetch its checkpoints.

Segments are links between calls, not loops around them: the model's own forward calls
its layers one by one.
"""

import weakref
from functools import partial

from torch import Tensor, nn

from hfpatch.budget.policy import Policy
from hfpatch.compat import gradient_is_watched, same_memory, version
from hfpatch.layer.call import LayerCall


class Chain:
    """The part of a model's LayerRuntime that knows the order of calls.

    Attributes:
        last_held: weak references to the last input that layer/whole.py kept and its layer's
            output.
    """

    def __init__(self):
        # weak references to the last call and to its output, and how often that was written to
        self.last_call = (lambda: None, lambda: None, 0)
        self.last_held = None

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

    def ran_plain(self, layer: nn.Module, policy: Policy, x: Tensor, y) -> None:
        """Called after a layer that keeps everything, with its output y."""
        y = y if isinstance(y, Tensor) else y[0]
        meter = self.meters.get(x.device)
        if meter is not None and meter.step is not None and y.requires_grad:
            y.register_hook(partial(_measure, meter.step, layer._hfpatch_index))


def _measure(step, index: int, _grad: Tensor) -> None:
    """Tensor hook: the backward of an untiled layer begins."""
    step.meter.untiled(step, index)
