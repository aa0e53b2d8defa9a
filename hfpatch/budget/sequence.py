"""Sequence parallelism: the split of attention's heads over ranks and rounds. Standard library
only.

B batch, T tokens of whole rows, H query heads, K KV heads, P ranks.
"""

from dataclasses import dataclass

# up to this many tokens, rotary angles in float32 are as exact as bf16 cos and sin
FLOAT32_ANGLES = 131072
BLOCKS = 512  # blocks of 128 queries that keep a large GPU busy


@dataclass(frozen=True)
class Rounds:
    """The rounds of attention on each rank.

    Attributes:
        own: query heads of a rank.
        width: query heads of one round.
        repeat: a rank's query heads of one KV head.
        sharing: ranks that have the same KV head.
    """

    own: int
    width: int
    repeat: int
    sharing: int

    @property
    def count(self) -> int:
        return self.own // self.width

    @property
    def of_keys(self) -> int:
        """The rounds that add to the gradients of one KV head; 1 if a round has several."""
        return max(1, self.repeat // self.width)

    def keys(self, r: int) -> slice:
        """The KV heads of round r, among a rank's."""
        first = r * self.width // self.repeat
        return slice(first, first + max(1, self.width // self.repeat))

    def new_keys(self, r: int) -> bool:
        """Whether round r is the first of its KV heads."""
        return r * self.width % self.repeat == 0

    def last_keys(self, r: int) -> bool:
        return (r + 1) * self.width % self.repeat == 0


def why_not_shared_out(n_heads: int, n_kv_heads: int, ranks: int) -> str | None:
    """The reason why the heads do not divide evenly over the ranks, in a few words, or None."""
    if n_heads % ranks == 0 and (n_kv_heads % ranks == 0 or ranks % n_kv_heads == 0):
        return None
    return f"{n_heads} query and {n_kv_heads} KV heads do not go evenly over {ranks} ranks"


def rounds_of(batch: int, tokens: int, n_heads: int, n_kv_heads: int, ranks: int) -> Rounds:
    """The rounds with as few query heads as keep a large GPU busy: a part of one KV head's, or all
    of several KV heads.

    tokens: of whole rows.
    """
    if why := why_not_shared_out(n_heads, n_kv_heads, ranks):
        raise ValueError(f"hfpatch: {why}. Take another number of ranks.")
    own, sharing = n_heads // ranks, max(1, ranks // n_kv_heads)
    repeat = min(own, n_heads // n_kv_heads)
    wanted = -(-BLOCKS // max(1, batch * -(-tokens // 128)))
    fits = [n for n in range(1, own + 1) if own % n == 0 and (repeat % n == 0 or n % repeat == 0)]
    return Rounds(own, next((n for n in fits if n >= wanted), own), repeat, sharing)


def rounds_for(shape, batch: int, tokens: int) -> Rounds:
    """The rounds of a shape's heads. tokens: of one rank."""
    return rounds_of(batch, tokens * shape.ranks, shape.num_heads, shape.num_kv_heads, shape.ranks)


def exchange_bytes(shape, batch: int, tokens: int, s: int, *, ahead: bool) -> int:
    """Bytes of a round's heads over whole rows, in attention's backward (parallel/exchange.py).

    tokens: of one rank. ahead: whether the next round's exchange runs at the same time.
    """
    rounds, rows = rounds_for(shape, batch, tokens), batch * tokens * shape.ranks * s
    q, v = (
        rows * rounds.width * shape.head_dim,
        rows * rounds.width * (shape.v_head_dim or shape.head_dim),
    )
    n = max(1, rounds.width // rounds.repeat)
    keys = rows * n * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
    now = 2 * q + 2 * v + 2 * keys  # q, dout, out, k, v; dq, dk, dv
    if rounds.of_keys > 1:
        # dk and dv summed over a KV head's rounds, in float32 if there are more than two rounds
        now += keys * 4 // s if s < 4 and rounds.of_keys > 2 else keys
    if ahead and rounds.count > 1:
        now += 2 * q  # the round before: dq on its way, sent and received
        now += 2 * (q + 2 * v)
        now += 2 * keys if rounds.own > rounds.repeat else 0
    return now


def sent_bytes(shape, rows: int, s: int, *, forwards: float) -> int:
    """Bytes that a rank sends to the others in one step. rows: tokens of one rank. forwards:
    attention forwards per layer.
    """
    rounds = rounds_for(shape, 1, rows)
    q, v = shape.q_size, shape.out_size
    keys = (
        (shape.kv_size + shape.v_size)
        / shape.num_kv_heads
        * rounds.own
        // rounds.repeat
        * shape.ranks
    )
    once = forwards * (q + keys + v) + (q + 2 * v + keys) + (q + keys)
    return int(rows * s * once * shape.num_layers * (shape.ranks - 1) / shape.ranks)
