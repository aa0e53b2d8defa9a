"""Cuts documents into pieces and packs pieces into rows. No torch: lengths in, pieces out."""

import bisect
from collections import Counter
from dataclasses import dataclass

from hfpatch.budget.cuts import attended

FULL = {0: 1}  # a layer that sees all tokens, however many there are of it


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of document `document`."""

    document: int
    start: int
    length: int


def cut(lengths, limit: int, *, long_rows: str = "split") -> list[Piece]:
    """One piece a document, or several where it is longer than `limit` tokens.

    long_rows: "split" keeps all tokens, as pieces of their own; "truncate" keeps the first `limit`;
    "drop" leaves the document out.
    """
    pieces = []
    for document, length in enumerate(map(int, lengths)):
        if length <= limit or long_rows == "split":
            starts = range(0, length, limit)
            pieces += [Piece(document, start, min(limit, length - start)) for start in starts]
        elif long_rows == "truncate":
            pieces.append(Piece(document, 0, limit))
    return pieces


def pack(pieces, limit: int) -> list[list[Piece]]:
    """Best-fit decreasing: rows of at most `limit` tokens, each a list of pieces. Deterministic.

    The longest piece first, each into the fullest row with space. At most 22% more rows than the
    best packing (Johnson 1974), in practice within a percent or two.
    """
    spaces: list[int] = []  # the tokens left of the rows that have any, ascending
    rows_with: dict[int, list[int]] = {}  # tokens left -> those rows
    rows: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: -p.length):  # stable: equal lengths keep their order
        at = bisect.bisect_left(spaces, piece.length)
        if at == len(spaces):
            row = len(rows)
            space = limit
            rows.append([])
        else:
            space = spaces[at]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[space]
                spaces.pop(at)
        rows[row].append(piece)
        new_space = space - piece.length
        if new_space:
            if new_space not in rows_with:
                rows_with[new_space] = []
                bisect.insort(spaces, new_space)
            rows_with[new_space].append(row)
    return rows


def attention_share(lengths, rows: int, limit: int, windows) -> float:
    """The cost of causal attention over isolated documents of these lengths in so many rows, as a
    share of its cost over whole rows.

    windows: window size in tokens (0: all) -> number of layers with it. A window of a few tokens
    costs much the same in either.
    """

    def pairs(length: int) -> int:
        return sum(layers * attended(length, window) for window, layers in windows.items())

    isolated = sum(number * pairs(length) for length, number in Counter(lengths).items())
    return isolated / (rows * pairs(limit))
