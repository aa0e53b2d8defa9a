"""Cutting and packing keep every token exactly once, in rows that are never too long."""

import random

import pytest

from hfpatch.trainer import packing
from hfpatch.trainer.packing import Piece


@pytest.mark.parametrize(
    "options, pieces, documents, tokens",
    [
        (
            {},
            [Piece(0, 0, 4), Piece(1, 0, 4), Piece(1, 4, 4), Piece(1, 8, 2), Piece(3, 0, 3)],
            0,
            0,
        ),
        ({"long_rows": "truncate"}, [Piece(0, 0, 4), Piece(1, 0, 4), Piece(3, 0, 3)], 1, 6),
        ({"long_rows": "drop"}, [Piece(0, 0, 4), Piece(3, 0, 3)], 1, 10),
    ],
)
def test_cut(options, pieces, documents, tokens):
    done = packing.cut([4, 10, 0, 3], 4, **options)
    assert (done.pieces, done.documents, done.tokens) == (pieces, documents, tokens)


@pytest.mark.parametrize("limit, count", [(1, 3), (7, 40), (64, 500), (1000, 2000)])
def test_pack_keeps_each_piece_once_and_fills_rows(limit, count):
    random.seed(limit)
    pieces = [Piece(i, 0, min(limit, 1 + int(random.expovariate(4 / limit)))) for i in range(count)]
    rows = packing.pack(pieces, limit)
    assert sorted((p for row in rows for p in row), key=lambda p: p.document) == pieces
    assert all(row and sum(p.length for p in row) <= limit for row in rows)
    least = -(-sum(p.length for p in pieces) // limit)
    assert len(rows) <= 11 / 9 * least + 1, (
        "best-fit decreasing never needs more than 11/9 of the least, plus one"
    )
    assert packing.pack(pieces, limit) == rows


def test_attention_share():
    rows = [[Piece(0, 0, 4)], [Piece(1, 0, 2), Piece(2, 0, 2)]]
    assert packing.attention_share(rows, 4) == (16 + 4 + 4) / 32
    assert packing.attention_share([], 4) == 1.0


def test_attention_share_of_windows():
    """Pair by pair: five layers of a window and one that sees all, as Gemma 3's; the closed form
    leaves half the diagonal out.
    """
    rows = [[Piece(0, 0, 40)], [Piece(1, 0, 24), Piece(2, 0, 16)]]

    def pairs(tokens):
        return sum(k * (sum(min(i + 1, w or tokens) for i in range(tokens)) - min(w or tokens,
                                                                                  tokens) / 2)
                   for w, k in ((8, 5), (0, 1)))  # fmt: skip

    wanted = (pairs(40) + pairs(24) + pairs(16)) / (2 * pairs(40))
    assert packing.attention_share(rows, 40, {8: 5, 0: 1}) == pytest.approx(wanted)
    assert packing.attention_share(rows, 40) < wanted
