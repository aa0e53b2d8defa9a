"""Moments of a step outside the backward of tiled layers: the loss, the embedding, the last
forward, layers that keep everything. Standard library only; formula.py defines a moment.
"""

from dataclasses import dataclass

from hfpatch.budget.cuts import loss_chunk_rows
from hfpatch.budget.sizes import (
    Sizes,
    attention_scratch,
    embedding_partials,
    experts_tile,
    inner_bytes,
    mlp_kept,
    plain_bytes,
)

FORWARD = "last layer's forward"
# ops/embedding.py: fp32 bytes of one column slice of the incoming gradient
EMBEDDING_SLICE = 128 << 20


@dataclass(frozen=True)
class Moment:
    """Bytes that are alive on the device at one moment, parameters excluded.

    gradients: parameter gradients that exist by then.
    checkpoints: kept for the backward of later layers.
    layer: the working set of the layer (or embedding) that runs.
    loss: hidden states and logits of the loss.
    workspace: kernels' scratch and transfer buffers.
    """

    name: str
    gradients: int
    checkpoints: int = 0
    layer: int = 0
    loss: int = 0
    workspace: int = 0

    @property
    def beyond(self) -> int:
        """Everything except the gradients."""
        return self.checkpoints + self.layer + self.loss + self.workspace

    @property
    def total(self) -> int:
        return self.gradients + self.beyond


def loss_moment(z: Sizes, checkpoints: int) -> Moment:
    rows, chunks = loss_chunk_rows(z.shape, z.rows, z.s)
    single = chunks == 1 or z.s == 4
    wide = z.head if single else z.shape.trained_head * 4
    # The layer's output, the normed one, its gradient and its rstd; loss, lse and shifted labels;
    # logits of one chunk.
    loss = (
        3 * z.u
        + z.wide_loss
        + 4 * z.rows
        + 16 * z.rows
        + rows * -(-z.shape.vocab_size // 8) * 8 * z.s
    )
    return Moment(
        "loss", z.head, checkpoints=checkpoints, layer=z.always, loss=loss + wide - z.head
    )


def embedding_moments(z: Sizes) -> list:
    """The backward of the token embedding, when all other gradients exist."""
    if z.shape.adapters:
        return []
    D, V = z.shape.hidden_size, z.shape.vocab_size
    columns = max(1, EMBEDDING_SLICE // (4 * max(1, z.rows)))
    if columns >= D:
        slices, scratch = 0, embedding_partials(z.rows, V, D)
    else:
        slices = (V + z.rows) * columns * z.s
        scratch = embedding_partials(z.rows, V, columns)
    slices += z.embedding if z.shape.tied else 0
    moments = [
        Moment("embedding backward", z.gradients, layer=z.u + slices + z.always, workspace=scratch)
    ]
    if z.shape.tied and loss_chunk_rows(z.shape, z.rows, z.s)[1] > 1:
        # Both gradients and their sum: the head's gradient is a view of the wider sums, so autograd
        # does not add to it in place.
        moments.append(Moment("embedding sum", z.gradients, layer=2 * z.embedding + z.always))
    return moments


def forward_moment(
    z: Sizes,
    layer: int,
    t: int,
    single: bool,
    join: int,
    on_device: int,
    leaving: int = 0,
) -> Moment:
    """The last tiled layer's forward.

    The model holds the embedded tokens. The layer holds its input, the attention output, and then
    either q, k and v, or its own output and a tile's MLP.

    leaving: bytes that stay during the MLP (q, k and v on their way out).
    """
    shape = z.shape
    inner, beside, tile_D = inner_bytes(z, layer, t), 0, t * shape.hidden_size * z.s
    if shape.is_sparse(layer):  # gathered rows, and the experts' outputs
        beside = 2 * shape.experts_per_token * tile_D
    # An adapter's output, its scaled copy and the base's output exist together when they are
    # summed.
    wide = z.g // z.s
    acts = (
        3
        if not shape.adapters
        else (2 if shape.joined else 1) * (1 + 2 * wide) + (shape.gated and not shape.joined)
    )
    beside += wide * tile_D * (wide > 1)  # the copy that the adapter reads
    mlp = acts * inner + beside + 3 * tile_D + join - (z.u if single else 0)
    working = max(z.q + z.kv, leaving + z.u + mlp)
    return Moment(FORWARD, 0, on_device, 2 * z.u + z.out + z.lse + working + z.always)


def plain_moments(z: Sizes, n: int, on_device: int, plain: int, coming: int = 0) -> list:
    """The backward of the last layer that keeps everything, and of the first one (layer n).

    coming: bytes of the tiled layer before the first one that are on their way to the device.
    """
    shape, last = z.shape, z.shape.num_layers - 1
    scratch = attention_scratch(shape, z.batch, z.tokens, shape.num_kv_heads, z.s)

    def layer_moments(name, i, gradients, checkpoints, coming=0):
        working, mlp = [((1 + shape.gated) * inner_bytes(z, i, z.rows), 0)], mlp_kept(z, i)
        if shape.is_sparse(i):
            working = [(nbytes - mlp, dw) for nbytes, dw in experts_tile(z, i, z.rows)]
        found = [
            Moment(name, gradients + dw, checkpoints, b + z.u + z.always, workspace=coming)
            for b, dw in working
        ]
        gradients += shape.trained_after(i) * z.g
        attention = z.out + z.q + z.kv + z.always - mlp
        return [
            *found,
            Moment(
                f"{name}: attention", gradients, checkpoints, attention, workspace=scratch + coming
            ),
        ]

    done = shape.over(shape.trained_of, n + 1) * z.g
    return [
        *layer_moments("last layer, plain", last, z.head_gradient, on_device + plain),
        *layer_moments(
            "first plain layer", n, z.head_gradient + done, on_device + plain_bytes(z, n), coming
        ),
    ]
