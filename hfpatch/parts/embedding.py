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
        if torch.compiler.is_compiling() or not (
            out.requires_grad and out.is_leaf and current.outer.embeds is not None
        ):
            return out
        hooks = forward_hooks(self)
        if not hooks or not all(map(asks_for_input_gradients, hooks)):
            return out
        trains = any(p.requires_grad for p in current.outer.embeds.parameters())
        return out.detach() if trains else out
