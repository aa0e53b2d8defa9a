"""Embeddings: a backward in slices, and no gradient that is unread."""

import torch
from torch import Tensor, nn

from hfpatch.compat import asks_for_input_gradients, forward_hooks
from hfpatch.context.current import current
from hfpatch.ops.embedding import Embedding


class FreeEmbedding:
    """An embedding that ignores enable_input_require_grads() where only reentrant checkpoints need
    it.

    As a leaf that requires a gradient, the output would live for the whole step, and the first
    layer would compute a gradient that is unread. The hook still works where the user calls the
    embedding directly, where hidden states are returned (the caller may read the gradient), and in
    a frozen model (the backward has no other leaf).
    """

    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling() or not (
            out.requires_grad and out.is_leaf and current.embeds is not None
        ):
            return out
        hooks = forward_hooks(self)
        if not hooks or not all(map(asks_for_input_gradients, hooks)):
            return out
        trains = any(p.requires_grad for p in current.embeds.parameters())
        return out.detach() if trains else out


class _Sliced:
    """Uses the embedding op whose backward works in slices (ops/embedding.py)."""

    def forward(self, input: Tensor) -> Tensor:
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if trains and plain and not torch.compiler.is_compiling():
            return Embedding.apply(input, self.weight, self.padding_idx)
        return super().forward(input)


class FusedEmbedding(FreeEmbedding, _Sliced):
    """Swapped in for nn.Embedding."""


class _SlicedEmbedding(_Sliced, nn.Embedding):
    """The base class that replaces nn.Embedding under a family's own embedding."""


class ScaledEmbedding(FreeEmbedding):
    """Mixed over a family's own subclass of nn.Embedding (Gemma scales the result)."""

    _hfpatch_beneath = (_SlicedEmbedding,)
