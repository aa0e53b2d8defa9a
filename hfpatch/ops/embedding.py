"""Token embedding whose backward needs no float32 copy of the whole gradient.

`embedding_dense_backward` sums repeated tokens in float32 partials as large as the output's
gradient: 2.2 GiB for 131,072 tokens of 4096. In column slices only one slice of partials exists at
a time.

N tokens, V vocabulary, D hidden.
"""

import torch

SLICE_BYTES = 128 << 20  # float32 partials of one slice


class Embedding(torch.autograd.Function):
    """weight[ids]: apply(ids [...], weight [V, D], padding_idx) -> [..., D]. It has one derivative.

    padding_idx: a row whose gradient is zero, or None.
    """

    @staticmethod
    def forward(ctx, ids, weight_VD, padding_idx):
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = weight_VD.shape[0], -1 if padding_idx is None else padding_idx
        return torch.nn.functional.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "hfpatch: the embedding has no second derivative, got create_graph=True. Call "
                "hfpatch.undo(model), and model.set_attn_implementation('eager')."
            )
        (ids,) = ctx.saved_tensors
        D = dy.shape[-1]
        columns = max(1, SLICE_BYTES // (4 * max(1, ids.numel())))
        backward = torch.ops.aten.embedding_dense_backward
        if columns >= D:
            return None, backward(dy, ids, ctx.rows, ctx.padding_idx, False), None
        dw_VD = dy.new_empty(ctx.rows, D)
        for start in range(0, D, columns):
            part = slice(start, start + columns)
            dw_VD[:, part] = backward(
                dy[..., part].contiguous(), ids, ctx.rows, ctx.padding_idx, False
            )
        return None, dw_VD, None
