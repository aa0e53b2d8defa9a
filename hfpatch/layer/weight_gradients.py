"""Weight gradients of one layer over several tiles, on stand-ins for its parameters.

The nested graphs of tiles are built on detached stand-ins. So the parameters' own hooks (tensor
hooks, post-accumulate hooks, those of DDP, FSDP and ZeRO) run once, when the layer's autograd
function returns the final gradients.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hfpatch.layer.forward_state import (
    STANDS_FOR,
    AsInForward,
    edited,  # noqa: F401 (these for callers of both)
    is_sharded,  # noqa: F401
)
from hfpatch.ops._wide_sums import into, sums_in_matmul
from hfpatch.ops.experts import EXPERT_SUMS

_WIDE = {torch.float32, torch.float64}  # dtypes of sums over tiles


@dataclass(eq=False)
class WeightGradients(AsInForward):
    """Context in which the layer's trained tensors are leaves, whose gradients are summed here.

    several: more than one tile contributes. Gradients narrower than float32 are then summed in
    float32 (those of matrices inside their matmuls, if the device can: `adding`), and `round()`
    casts the sums back. With one tile the gradients stay in the leaves until then.
    """

    several: bool
    leaves: list[Tensor] = field(default_factory=list, init=False)
    originals: list[Tensor] = field(default_factory=list, init=False)
    sums: list[Tensor | None] = field(init=False)
    # id of a stand-in -> its index in `originals`
    index: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self):
        self.sums = [None] * sum(self.then.trained)

    def _nothing_to_restore(self) -> bool:
        return False

    def _of(self, trained: bool, tensor: Tensor) -> Tensor:
        if not trained:
            return super()._of(trained, tensor)
        index = len(self.originals)
        self.originals.append(tensor)
        stand_in = tensor.detach()
        # Engines read their own marks on a parameter (ZeRO's ds_status, tensor parallelism's plan).
        stand_in.__dict__ |= tensor.__dict__
        stand_in.__dict__[STANDS_FOR] = tensor
        stand_in.requires_grad = True
        self.index[id(stand_in)] = index
        # No reference to the leaf here: its hook holds this object, and no collector sees that
        # cycle.
        if self.several:
            stand_in.register_post_accumulate_grad_hook(partial(self._take, index))
        else:
            self.leaves.append(stand_in)
        return stand_in

    def _take(self, index: int, stand_in: Tensor) -> None:
        grad, stand_in.grad = stand_in.grad, None
        if grad is not None:  # None: `_add` has it already
            self._add_gradient(index, grad)

    def _sum(self, index: int) -> Tensor | None:
        """The sum so far, widened again if `round` came between (a weight used before and after
        attention).
        """
        found = self.sums[index]
        if found is not None and self.several and found.dtype not in _WIDE:
            found = self.sums[index] = found.to(torch.promote_types(found.dtype, torch.float32))
        return found

    def _add_gradient(self, index: int, grad: Tensor) -> None:
        found = self._sum(index)
        if found is not None:
            found.add_(grad)
        else:  # not widened: a weight around a mixer's tiles may get one gradient only
            self.sums[index] = grad

    def adding(self, stand_in: Tensor):
        """A function that adds dy_NO^T x_NI to a matrix's sum inside the matmul, or per expert with
        rows up to offs_E of each. None with a single tile, or if the device cannot.
        """
        index = self.index.get(id(stand_in))
        if index is None or not self.several:
            return None
        if stand_in.dim() == 3:
            return partial(self._add_by_expert, index)
        return partial(self._add, index) if sums_in_matmul(stand_in, stand_in.dtype) else None

    def _add(self, index: int, dy_NO: Tensor, x_NI: Tensor) -> None:
        first = self._sum(index) is None
        if first:
            self.sums[index] = dy_NO.new_empty(dy_NO.shape[1], x_NI.shape[1], dtype=torch.float32)
        into(self.sums[index], dy_NO.t(), x_NI, first)

    def _add_by_expert(self, index: int, a_SM: Tensor, b_SN: Tensor, offs_E: Tensor) -> None:
        first = self._sum(index) is None
        if first:
            wide = torch.promote_types(a_SM.dtype, torch.float32)
            shape = len(offs_E), a_SM.shape[1], b_SN.shape[1]
            self.sums[index] = a_SM.new_empty(shape, dtype=wide)
        EXPERT_SUMS(self.sums[index], a_SM, b_SN, offs_E, first)

    def round(self) -> None:
        """Rounds the sums so far to each parameter's dtype, and frees the wide sums one by one."""
        if not self.several:
            self.sums = [leaf.grad for leaf in self.leaves] if self.leaves else self.sums
            return
        for index, original in enumerate(self.originals):
            if self.sums[index] is not None:
                self.sums[index] = self.sums[index].to(original.dtype)

    def handed_over(self) -> list[Tensor | None]:
        """Hands over the gradients of the trained tensors.

        No reference stays here or in a stand-in, which may live on (attention's sinks). Otherwise
        the engine would copy each gradient, and the original would live as long as the loss.
        """
        sums, self.sums = self.sums, []
        for leaf in self.leaves:
            leaf.grad = None
        return sums
