"""Hidden states in several streams a token [S, B, T, D] (Gemma 3n): to tiles they are rows of one [B, T, S*D].

S streams, B batch, T tokens, D hidden.
"""

from torch import Tensor

ROWS = "_hfpatch_rows"  # of a tensor in streams: the rows that it is a view of


def joined(x_SBTD: Tensor) -> Tensor:
    """[B, T, S*D]: the tensor that `split` was given, where this came of it."""
    rows = getattr(x_SBTD, ROWS, None)
    return x_SBTD.movedim(0, 2).flatten(2) if rows is None else rows


def split(x_BTC: Tensor, streams: int) -> Tensor:
    """[S, B, T, D], a view."""
    found = x_BTC.unflatten(-1, (streams, -1)).movedim(2, 0)
    setattr(found, ROWS, x_BTC)
    return found


def by_rows(forward, streams: int | None):
    """`forward`, a layer's, from rows to rows; itself where there are no streams."""
    if streams is None:
        return forward

    def run(x_BtC, *args, **kwargs):
        y = forward(split(x_BtC, streams).contiguous(), *args, **kwargs)
        return (joined(y[0]), *y[1:]) if isinstance(y, tuple) else joined(y)

    return run
