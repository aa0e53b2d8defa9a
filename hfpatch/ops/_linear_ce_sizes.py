"""The chunk length of a loss: how many tokens have logits at a time within the workspace.

Legend: N tokens, C rows of one chunk, D hidden, V vocabulary.
"""

from hfpatch.compat import is_fake

ROWS = 128  # chunks are multiples of this many tokens, the row tile of the matmuls
# Workspace bytes per token: loss, lse in two numbers, best, label, sort key and order.
BYTES_PER_TOKEN = 56
# More bytes for entropy and related values: three numbers, twice, and the backward's factors.
STATS_BYTES_PER_TOKEN = 56
COLUMNS = 256  # a matmul's tile has ROWS rows and COLUMNS columns
# A pass over the float32 sum of dW takes as long as dX of this many rows: by data-sheet rates 428
# on an A100 and 827 on an H100.
ROWS_OF_A_PASS = 512


def chunk_bounds(
    tokens: int, row_bytes: int, workspace_bytes: int, best=None
) -> list[tuple[int, int]]:
    """Cuts the tokens into as few chunks of equal length as workspace_bytes allows.

    Lengths are multiples of 128 rows, or less where the budget holds fewer. The budget's remainder
    may lengthen the last chunk, so that one token more than a round number does not cost another
    chunk.

    Args:
        tokens: the number of rows.
        row_bytes: the bytes of one row of logits and its buffers.
        workspace_bytes: the budget.
        best: the longest chunk that fits -> the length to use; None uses the longest.

    Returns:
        [start, end) of each chunk.

    Raises:
        ValueError: the budget holds no row.
    """
    most = workspace_bytes // row_bytes
    if most < 1:
        raise ValueError(
            f"hfpatch: expected at least {row_bytes:,} bytes for the logits of one token, "
            f"workspace_bytes leaves {max(0, workspace_bytes):,}; raise it."
        )
    size = most // ROWS * ROWS or most
    if best is not None and tokens > most and size > ROWS:
        size = best(size)
    count = max(1, -(-(tokens - (most - size)) // size)) if tokens else 0
    if count > 1 and size > ROWS:
        size = min(size, -(-tokens // (count * ROWS)) * ROWS)
    starts = range(0, count * size, size or 1)
    return list(zip(starts, [*starts[1:], tokens]))


def rows_that_fill(
    most: int, tokens: int, hidden_size: int, processors: int, pass_rows: int = 0
) -> int:
    """The chunk length, a multiple of 128 rows up to `most`, for which all dX matmuls take the
    least time.

    dX [C, D] has few tiles. At 2,048 x 4,096 they fill an A100's 108 processors 2.37 times and take
    3 rounds; at 1,664 x 4,096 they fill them 1.93 times and take 2.

    Args:
        most: the longest chunk; returned if no other length saves a sixteenth.
        tokens: the number of rows in all.
        hidden_size: D.
        processors: the number of the GPU's processors.
        pass_rows: a chunk's fixed cost, in rows of dX that take as long.
    """
    across = -(-hidden_size // COLUMNS)

    def cost(rows: int) -> float:
        rounds = -(-(-(-rows // ROWS) * across) // processors)
        return rounds * processors / across * ROWS + pass_rows

    def whole(size: int) -> float:
        full, last = divmod(tokens, size)
        return full * cost(size) + (cost(last) if last else 0.0)

    best = min(range(most, 0, -ROWS), key=whole)
    return best if 16 * whole(best) < 15 * whole(most) else most


def processors_of(x) -> int | None:
    """The number of processors of x's GPU; None on a CPU and for fake tensors."""
    from hfpatch.kernels._launch import sm_count

    return sm_count(x.device) if x.is_cuda and not is_fake(x) else None
