"""Steps of shorter rows (steps.py): what they split as whole rows do, and the cost of whole rows from
theirs."""

from contextlib import contextmanager
from dataclasses import replace

from hfpatch.attention import heads
from hfpatch.budget.cuts import chunk_bounds
from hfpatch.lab.compat import for_now
from hfpatch.ops import _linear_ce_loop

MANY = 1 << 20  # tokens whose logits are cut into chunks of nearly their room
SQUARE = 0.02  # growth is quadratic if a tile adds more than the tile before by above this share


def onward(x: float, y: float, z: float, beyond: float, bends: bool) -> float:
    """A number of bytes or seconds `beyond` further steps after x, y and z, of three equal steps.

    bends: it may grow quadratically, as a mask of [tokens, tokens] does. Else a jump at one of them
    alone comes from another instant and is not growth.
    """
    bend = z - 2 * y + x
    if bends and bend > SQUARE * (z - y) > 0:
        return z + beyond * (z - y + bend / 2 * (beyond + 1))
    return z + beyond * max(0, min(z - y, y - x))


def to_full_length(costs: list, lengths: list, tokens: int, table: tuple):
    """The Cost at `tokens`, from two or three shorter lengths, a tile apart. Bytes and seconds grow
    linearly, attention's seconds and all FLOPs have a square too. A mixer of whole rows may hold a
    mask of [tokens, tokens], whose bytes grow quadratically.

    table: the embedding's shape. Its backward has partial sums of as many rows as tokens, up to the
    vocabulary.
    """
    # [Step 1] The last two lengths, b and c, and the one before, a. With two lengths `a is b`.
    vocabulary, width = table
    full = 4 * width * max(0, tokens - max(vocabulary, lengths[-1]))
    a = costs[0]
    b, c = costs[-2:]
    two, three = lengths[-2:]
    tile = three - two
    beyond = (tokens - three) / tile

    def further(x, y, z) -> int:
        # Without a third length, the one before is taken to lie on the same line.
        x = 2 * y - z if a is b else x
        return round(onward(x, y, z, beyond, bool(c.whole_row_layers)))

    def straight(y, z) -> float:
        return z + beyond * max(0.0, z - y)

    def curve(x, y) -> float:
        square = (y / three - x / two) / tile
        return (x / two - square * two) * tokens + square * tokens**2

    # [Step 2] The peaks, by name. One that a shorter step lacks does not grow.
    before = {m.name: m.beyond for m in a.moments}
    between = {m.name: m.beyond for m in b.moments}
    moments = []
    for m in c.moments:
        y = between.get(m.name, m.beyond)
        grown = further(before.get(m.name, y), y, m.beyond)
        if "embedding_dense_backward" in m.name:
            grown -= full
        moments.append(m._replace(beyond=grown))
    # [Step 3] FLOPs and bytes.
    fields = {n: curve(getattr(b, n), getattr(c, n)) for n in ("flops", "model")}
    for n in ("host", "up", "down", "stands", "loss", "after", "tiled"):
        fields[n] = further(getattr(a, n), getattr(b, n), getattr(c, n))
    # [Step 4] Seconds by part, and the passes, which grow as their sum does.
    seconds = {}
    for part, spent in c.seconds.items():
        way = straight if part in ("copy_wait", "python_wait") else curve
        seconds[part] = way(b.seconds[part], spent)
    share = sum(seconds.values()) / sum(c.seconds.values())
    fields |= {n: share * getattr(c, n) for n in ("forward", "backward", "layers_forward")}
    return replace(c, moments=tuple(moments), seconds=seconds, **fields)


@contextmanager
def as_at_full_length(width: int | None):
    """A context for steps of shorter lengths. As at the full length, attention takes `width` KV
    heads a group, and chunks of logits have the length of many equal ones. None changes nothing.
    """
    if width is None:
        yield
        return
    groups = heads.heads_per_group

    def group(B: int, T: int, H: int, K: int) -> int:
        return groups(B, T, H, K) if K % width else width

    def chunks(rows: int, row_bytes: int, workspace: int) -> tuple[tuple[int, int], ...]:
        size = chunk_bounds(MANY, row_bytes, workspace)[0][1]
        starts = range(0, rows, size)
        return tuple(zip(starts, [*starts[1:], rows]))

    with (
        for_now(heads, heads_per_group=group),
        for_now(_linear_ce_loop, chunk_bounds=chunks),
    ):
        yield
