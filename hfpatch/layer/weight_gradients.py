"""Weight gradients of one layer over several tiles.

`walk` asks autograd for the gradients of a tile's inputs and of the layer's weights. They come as
tensors and go to no `.grad`: the parameters' own hooks (those of DDP, FSDP and ZeRO too) run once,
when the layer's autograd function returns the sums.
"""

from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from hfpatch.compat import hooked, without_hooks
from hfpatch.layer.forward_state import ForwardState, as_in_forward, tensor_at
from hfpatch.ops._wide_sums import add_product, sums_in_matmul
from hfpatch.ops.experts import EXPERT_SUMS

_WIDE = {torch.float32, torch.float64}  # dtypes of sums over tiles


class WeightGradients(ExitStack):
    """Context of a layer's backward: the layer is as in its forward, and gradients of its trained
    tensors are summed here.

    several: more than one tile contributes. Gradients narrower than float32 are then summed in
    float32 (those of matrices inside their matmuls, if the device can: `adding`), and `round()`
    casts the sums back.
    """

    def __init__(self, state: ForwardState, several: bool):
        super().__init__()
        self.state = state
        self.several = several
        self.sums: list[Tensor | None] = [None] * len(state.trained)

    def __enter__(self):
        super().__enter__()
        self.enter_context(as_in_forward(self.state))
        self.tensors = [tensor_at(*place) for place in self.state.trained]
        for x in self.tensors:
            if not x.requires_grad:  # frozen since the forward
                self.callback(x.requires_grad_, False)
                x.requires_grad_(True)
        for x in hooked(self.tensors):
            self.enter_context(without_hooks(x))
        self.index = {id(x): i for i, x in enumerate(self.tensors)}
        return self

    def _sum(self, index: int) -> Tensor | None:
        """The sum so far, widened again if `round` came between (a weight used before and after
        attention).
        """
        found = self.sums[index]
        if found is not None and self.several and found.dtype not in _WIDE:
            found = self.sums[index] = found.to(torch.promote_types(found.dtype, torch.float32))
        return found

    def add(self, index: int, grad: Tensor) -> None:
        found = self._sum(index)
        if found is not None:
            found.add_(grad)
        else:  # _sum widens it if a second one comes; of w + v autograd hands out one tensor twice
            self.sums[index] = grad.clone() if id(grad) in map(id, self.sums) else grad

    def adding(self, weight: Tensor):
        """Returns f(dy_NO, x_NI, offs_E=None), which adds dy^T x to this weight's sum inside the
        matmul; with offs_E, expert e's rows end at offs_E[e]. None: frozen, a single tile, or a
        matrix on a device without such matmuls.
        """
        index = self.index.get(id(weight))
        if index is None or not self.several:
            return None
        if weight.dim() == 3 or sums_in_matmul(weight, weight.dtype):
            return partial(self._add, index)
        return None

    def _add(self, index: int, a_NM: Tensor, b_NK: Tensor, offs_E: Tensor | None = None) -> None:
        first = self._sum(index) is None
        if first:
            experts = () if offs_E is None else (len(offs_E),)
            wide = torch.promote_types(a_NM.dtype, torch.float32)
            self.sums[index] = a_NM.new_empty(*experts, a_NM.shape[1], b_NK.shape[1], dtype=wide)
        if offs_E is None:
            add_product(self.sums[index], a_NM.t(), b_NK, first)
        else:
            EXPERT_SUMS(self.sums[index], a_NM, b_NK, offs_E, first)

    def round(self) -> None:
        """Rounds the sums so far to each parameter's dtype, and frees the wide sums one by one."""
        for index, x in enumerate(self.tensors if self.several else ()):
            if self.sums[index] is not None:
                self.sums[index] = self.sums[index].to(x.dtype)

    def handed_over(self) -> list[Tensor | None]:
        """Hands over the gradients of the trained tensors. No reference stays here: the engine would
        copy each gradient.
        """
        sums = self.sums
        self.sums = []
        return sums


def walk(sums: list[WeightGradients], outputs, grads, inputs) -> list[Tensor | None]:
    """The gradients of `inputs`, None where it wants none, from the gradients of a tile's outputs;
    outputs without one, or without a graph, are left out. The gradients of the weights of `sums` are
    added there.
    """
    pairs = [(y, dy) for y, dy in zip(outputs, grads) if dy is not None and y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    weights = [x for one in sums for x in one.tensors]
    if not pairs or not (wanted or weights):
        return [None] * len(inputs)
    ys, dys = zip(*pairs)
    found = iter(torch.autograd.grad(ys, [*wanted, *weights], dys, allow_unused=True))
    made = [next(found) if x.requires_grad else None for x in inputs]
    for one in sums:
        for index, grad in enumerate(islice(found, len(one.tensors))):
            if grad is not None:
                one.add(index, grad)
    return made
