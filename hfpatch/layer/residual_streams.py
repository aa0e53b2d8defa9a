"""Hidden states in several streams a token [S, B, T, D] (Gemma 3n): to tiles they are rows of one
[B, T, S*D].

S streams, B batch, T tokens, D hidden.
"""

from torch import Tensor


def joined(x_SBTD: Tensor) -> Tensor:
    """[B, T, S*D], a view of what `split` gave."""
    return x_SBTD.movedim(0, 2).flatten(2)


def split(x_BTC: Tensor, streams: int) -> Tensor:
    """[S, B, T, D], a view."""
    return x_BTC.unflatten(-1, (streams, -1)).movedim(2, 0)


def by_rows(forward, streams: int | None):
    """`forward`, a layer's, from rows to rows; itself where there are no streams."""
    if streams is None:
        return forward

    def run(x_BtC, *args, **kwargs):
        y = forward(split(x_BtC, streams).contiguous(), *args, **kwargs)
        return (joined(y[0]), *y[1:]) if isinstance(y, tuple) else joined(y)

    return run
