"""Sequence parallelism: the split of attention's heads over ranks. Standard library only."""


def why_not_shared_out(n_heads: int, n_kv_heads: int, ranks: int) -> str | None:
    """The reason why the heads do not divide evenly over the ranks, in a few words, or None."""
    if n_heads % ranks == 0 and (n_kv_heads % ranks == 0 or ranks % n_kv_heads == 0):
        return None
    return f"{n_heads} query and {n_kv_heads} KV heads do not go evenly over {ranks} ranks"
