"""Hidden states with several residual streams a token: [S, B, T, D] (Gemma 3n) or [B, T, S, D]
(GLM-5-Next). Tiles see them joined, as [B, T, S*D].

S streams, B batch, T tokens, D hidden.
"""

from torch import Tensor

Streams = tuple[int, int]  # (number of streams, their axis)


def streams_of(x: Tensor, B: int, T: int) -> Streams | None:
    """The Streams of the hidden states of B rows of T tokens; None for [B, T, D]."""
    if x.dim() != 4:
        return None
    if x.shape[1:3] == (B, T):
        return x.shape[0], 0
    return (x.shape[2], 2) if x.shape[:2] == (B, T) else None


def joined(x: Tensor, streams: Streams | None) -> Tensor:
    """Hidden states as [B, T, S*D], a view if x comes from `split`. Without streams, x itself."""
    return x if streams is None else x.movedim(streams[1], 2).flatten(2)


def split(x_BTC: Tensor, streams: Streams | None) -> Tensor:
    """The inverse of `joined`: [S, B, T, D] or [B, T, S, D], a view."""
    if streams is None:
        return x_BTC
    return x_BTC.unflatten(-1, (streams[0], -1)).movedim(2, streams[1])


def by_rows(forward, streams: Streams | None):
    """A layer's `forward` on joined hidden states. Without streams, `forward` itself."""
    if streams is None:
        return forward

    def run(x_BtC, *args, **kwargs):
        y = forward(split(x_BtC, streams).contiguous(), *args, **kwargs)
        rows = joined(y[0] if isinstance(y, tuple) else y, streams)
        return (rows, *y[1:]) if isinstance(y, tuple) else rows

    return run
