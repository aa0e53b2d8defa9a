"""Hidden states in several streams a token, [S, B, T, D] (Gemma 3n) or [B, T, S, D] (GLM-5-Next): to
tiles they are rows of one [B, T, S*D].

S streams, B batch, T tokens, D hidden.
"""

from torch import Tensor

Streams = tuple[int, int]  # how many, and the axis that they are


def streams_of(x: Tensor, B: int, T: int) -> Streams | None:
    """Those of hidden states of B rows of T tokens, None where these are [B, T, D]."""
    if x.dim() != 4:
        return None
    if x.shape[1:3] == (B, T):
        return x.shape[0], 0
    return (x.shape[2], 2) if x.shape[:2] == (B, T) else None


def joined(x: Tensor, streams: Streams | None) -> Tensor:
    """[B, T, S*D], a view of what `split` gave; hidden states of one stream as they are."""
    return x if streams is None else x.movedim(streams[1], 2).flatten(2)


def split(x_BTC: Tensor, streams: Streams | None) -> Tensor:
    """[S, B, T, D] or [B, T, S, D], a view."""
    if streams is None:
        return x_BTC
    return x_BTC.unflatten(-1, (streams[0], -1)).movedim(2, streams[1])


def by_rows(forward, streams: Streams | None):
    """`forward`, a layer's, from rows to rows; itself where there are no streams."""
    if streams is None:
        return forward

    def run(x_BtC, *args, **kwargs):
        y = forward(split(x_BtC, streams).contiguous(), *args, **kwargs)
        rows = joined(y[0] if isinstance(y, tuple) else y, streams)
        return (rows, *y[1:]) if isinstance(y, tuple) else rows

    return run
