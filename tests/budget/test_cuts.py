"""Splits of attention's work: what a window sees, and which rank computes which heads."""

import pytest

from hfpatch.budget.sequence import rounds_of


@pytest.mark.parametrize(
    "n_heads, n_kv_heads, ranks", [(32, 8, 8), (32, 8, 16), (8, 1, 4), (16, 16, 2), (12, 6, 2)]
)
@pytest.mark.parametrize("tokens", [512, 16384, 1 << 20])
def test_every_head_is_computed_once_with_its_own_keys(n_heads, n_kv_heads, ranks, tokens):
    rounds, seen = rounds_of(1, tokens, n_heads, n_kv_heads, ranks), []
    for rank in range(ranks):
        first = rank * n_kv_heads // ranks  # KV head of this rank's first query head
        known = None
        for r in range(rounds.count):
            heads = range(
                rank * rounds.own + r * rounds.width, rank * rounds.own + (r + 1) * rounds.width
            )
            keys = range(first + rounds.keys(r).start, first + rounds.keys(r).stop)
            assert {h * n_kv_heads // n_heads for h in heads} == set(keys)
            assert rounds.new_keys(r) is (known != keys)
            known = keys if not rounds.last_keys(r) else None
            seen += heads
        assert known is None
    assert seen == list(range(n_heads))
    assert rounds.width * -(-tokens // 128) >= 512 or rounds.count == 1
