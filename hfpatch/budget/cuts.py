"""Splits of a batch: tiles of tokens, groups of heads, chunks of logits. Standard library only."""

from functools import lru_cache

# Workspace bytes of the loss per token: loss, lse in two numbers, best, label, sort key and order.
LOSS_BYTES_PER_TOKEN = 56
ALIGNED = 128  # tiles are multiples of this many rows, as matmul kernels are


def tiles(batch: int, tokens: int, tile: int) -> tuple[int, int]:
    """(count, tokens of each tile but the last); a tile has at most `tile` tokens over all rows.

    The count is the least possible, and all tiles but the last have one length: a multiple of 128
    tokens, or of a smaller power of two if 128 would leave less than half a tile for the last one.
    """
    most = max(1, tile // batch)
    count = -(-tokens // most)
    step = -(-tokens // count)
    aligned = ALIGNED if count > 1 and most > ALIGNED else 1
    while aligned > 1:
        rounded = -(-step // aligned) * aligned
        if rounded <= most and 2 * (tokens - (count - 1) * rounded) >= rounded:
            return count, rounded
        aligned //= 2
    return -(-tokens // step), step


@lru_cache(maxsize=256)
def tile_bounds(batch: int, tokens: int, tile: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of each tile of `tiles`."""
    starts = range(0, tokens, tiles(batch, tokens, tile)[1])
    return tuple(zip(starts, [*starts[1:], tokens]))


@lru_cache(maxsize=256)
def heads_per_group(batch: int, tokens: int, n_heads: int, n_kv_heads: int) -> int:
    """KV heads per group: as few as keep a large GPU busy (512 blocks of 128 queries)."""
    blocks = batch * (n_heads // n_kv_heads) * -(-tokens // 128)
    n = min(-(-512 // max(blocks, 1)), n_kv_heads)
    while n_kv_heads % n:
        n += 1
    return n


@lru_cache(maxsize=256)
def chunk_bounds(rows: int, row_bytes: int, workspace: int) -> tuple[tuple[int, int], ...]:
    """[start, end) of as few chunks as `workspace` bytes allow, of row_bytes a row.

    Lengths are multiples of 128 rows, or less where the workspace holds fewer. Its remainder may
    lengthen the last chunk, so that one row more than a round number does not cost another chunk.

    Raises:
        ValueError: the workspace holds no row.
    """
    most = workspace // row_bytes
    if most < 1:
        raise ValueError(
            f"hfpatch: workspace_bytes must leave {row_bytes:,} bytes for the logits of one token, "
            f"got {max(0, workspace):,}. Raise it."
        )
    size = most // ALIGNED * ALIGNED or most
    count = max(1, -(-(rows - (most - size)) // size)) if rows else 0
    if count > 1 and size > ALIGNED:
        size = min(size, -(-rows // (count * ALIGNED)) * ALIGNED)
    starts = range(0, count * size, size)
    return tuple(zip(starts, [*starts[1:], rows]))


def attended(tokens: int, window: int) -> float:
    """Pairs of tokens in one causal row of attention: half the square, or a band of it with a
    window.
    """
    return tokens * window - window * window / 2 if 0 < window < tokens else tokens * tokens / 2
