"""Cutting and packing keep every token exactly once, in rows that are never too long."""

import random

import pytest
import tiny
import torch
from transformers import Trainer, TrainingArguments

import hfpatch
from hfpatch.trainer import packing
from hfpatch.trainer.packing import Piece


@pytest.mark.parametrize(
    "options, pieces",
    [
        (
            {},
            [Piece(0, 0, 4), Piece(1, 0, 4), Piece(1, 4, 4), Piece(1, 8, 2), Piece(3, 0, 3)],
        ),
        ({"long_rows": "truncate"}, [Piece(0, 0, 4), Piece(1, 0, 4), Piece(3, 0, 3)]),
        ({"long_rows": "drop"}, [Piece(0, 0, 4), Piece(3, 0, 3)]),
    ],
)
def test_cut(options, pieces):
    assert packing.cut([4, 10, 0, 3], 4, **options) == pieces


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


@pytest.mark.parametrize("rows, how, words", [
    ([{"text": "a"}], {}, "must have input_ids, got text. Tokenize"),
    ([[1, 2]], {}, "must have input_ids, got 1, 2. Tokenize"),
    (iter([]), {}, "must have a length, got list_iterator. Load it without streaming"),
    ([{"input_ids": [1, 2]}], {"long_rows": "drp"}, "got drp. Did you mean drop"),
])  # fmt: skip
def test_what_cannot_be_packed_is_said(rows, how, words):
    with pytest.raises(ValueError, match=words):
        hfpatch.pack(rows, 32, **how)


def test_any_dataset_packs_for_any_trainer():
    """Each document's loss is that of the document alone."""
    random.seed(0)
    rows = [{"input_ids": random.choices(range(3, 40), k=n)} for n in (5, 30, 16, 1, 9, 11)]
    rows.append({"input_ids": [1, 2, 3], "labels": [-100, 2, -100]})
    packed = hfpatch.pack(rows, 32, pad_id=1)
    assert len(packed) == 3 and {len(row["input_ids"]) for row in packed} == {32}
    said = [
        tuple(ids.tolist())
        for row in packed
        for ids in row["input_ids"].tensor_split((row["position_ids"] == 0).nonzero()[1:, 0])
    ]
    assert {tuple(row["input_ids"]) for row in rows} <= {*said}
    assert sum((row["labels"] != -100).sum() for row in packed) == 4 + 29 + 15 + 0 + 8 + 10 + 1
    model = tiny.llama().double().eval()
    batch = {name: torch.stack([row[name] for row in packed]) for name in packed[0]}
    found = model(**batch, use_cache=False).loss * 67
    alone = 0.0
    for row in rows:
        ids, labels = (
            torch.tensor([row.get(n, row["input_ids"])]) for n in ("input_ids", "labels")
        )
        count = (labels[:, 1:] != -100).sum()
        alone += model(ids, labels=labels).loss * count if count else 0.0
    assert (found - alone).abs() < 1e-6 * alone
    args = TrainingArguments("unused", max_steps=1, report_to=[], save_strategy="no", use_cpu=True)
    assert Trainer(model=model.float(), args=args, train_dataset=packed).train().training_loss > 0
    with pytest.raises(ValueError, match="a length must be tokens"):
        hfpatch.pack(rows, "many")
