"""Embeddings without a gradient that is unread."""

import torch

from hfpatch.compat import asks_for_input_gradients, forward_hooks
from hfpatch.context.current import current


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
        embeds = current.outer.embeds
        if torch.compiler.is_compiling() or embeds is None:
            return out
        hooks = forward_hooks(self)
        if not out.requires_grad or not out.is_leaf or not hooks:
            return out
        trains = any(p.requires_grad for p in embeds.parameters())
        return out.detach() if trains and all(map(asks_for_input_gradients, hooks)) else out
