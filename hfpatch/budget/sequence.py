"""Sequence parallelism: the split of attention's heads over ranks and rounds. Standard library
only.

B batch, T tokens of whole rows, H query heads, K KV heads, P ranks.
"""

from dataclasses import dataclass

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
