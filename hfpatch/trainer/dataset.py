"""Rows of pieces of tokenized documents, their labels and positions, and batches of rows.

Documents that share a row are isolated by position_ids that restart at 0: attention, stock or
hfpatch's, then sees its own document only, as long as no attention_mask is passed. None is needed:
padding is on the right, where causal attention never reaches it, and its labels are ignored.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hfpatch.budget.limits import parse_length
from hfpatch.budget.policy import refuse_unknown
from hfpatch.trainer import packing

IGNORE = -100


class RowDataset(torch.utils.data.Dataset):
    """Rows of pieces: item i is {"input_ids", "labels"} of [T] int64.

    Packed rows have "position_ids" too. table: of tokens (data.TOKENS), in memory maps.
    """

    def __init__(self, table, rows, *, pad_to: int | None = None, pad_id: int = 0):
        self.table = table
        self.pad_to = pad_to
        self.pad_id = pad_id
        pieces = [(p.document, p.start, p.length) for row in rows for p in row]
        # Arrays, not millions of objects: the workers of a data loader copy these for free.
        self.pieces = np.asarray(pieces, dtype=np.int64).reshape(-1, 3)
        self.bounds = np.cumsum([0, *map(len, rows)])

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict:
        pieces = self.pieces[self.bounds[index] : self.bounds[index + 1]]
        documents = [self._tokens(*piece) for piece in pieces.tolist()]
        return make_row(documents, pad_to=self.pad_to, pad_id=self.pad_id)

    def _tokens(self, document: int, start: int, length: int) -> tuple:
        """(ids, learned) of a piece."""
        columns = (self.table.data.column(name)[document].values for name in ("ids", "learned"))
        return tuple(c.slice(start, length).to_numpy(zero_copy_only=False) for c in columns)


class Packed(RowDataset):
    """Packed rows of any dataset with token ids, and labels where it has some."""

    def _tokens(self, document: int, start: int, length: int) -> tuple:
        row = self.table[document]
        ids = np.asarray(row["input_ids"])[start : start + length]
        labels = np.asarray(row.get("labels", row["input_ids"]))[start : start + length]
        return ids, labels != IGNORE


def pack(dataset, seq_len: int, *, pad_id: int = 0, long_rows: str = "split") -> Packed:
    """A dataset of sequences filled with several documents, for any Trainer.

    Documents are packed best fit over the whole dataset, which fills some 99.7% of a sequence.
    `position_ids` that restart keep them apart, in stock attention too, as long as no
    attention_mask is passed. All sequences have one length, so any collator stacks them.

    Args:
        dataset: rows with "input_ids" and, where not every token is learned, "labels".
        seq_len: tokens of a sequence, also as "64k".
        pad_id: the token that fills the rest; its labels are ignored.
        long_rows: "split", "truncate" or "drop" documents longer than a sequence.

    Returns:
        A torch Dataset of {"input_ids", "labels", "position_ids"}.

    Raises:
        ValueError: seq_len is no length, the dataset has none (it is streamed), a row has no
            input_ids, or long_rows is another word.

    Examples:
        >>> Trainer(model=model, args=args, train_dataset=hfpatch.pack(tokenized, 65536)).train()
    """
    limit = parse_length(seq_len)
    refuse_unknown([long_rows], ("split", "truncate", "drop"), "long_rows")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"hfpatch: a dataset to pack must have a length, got {type(dataset).__name__}. Load it "
            "without streaming."
        )
    if len(dataset) and "input_ids" not in dataset[0]:
        raise ValueError(
            f"hfpatch: a row must have input_ids, got {', '.join(map(str, dataset[0]))}. Tokenize "
            "the data first."
        )
    lengths = [len(row["input_ids"]) for row in dataset]
    pieces = packing.cut(lengths, limit, long_rows=long_rows)
    return Packed(dataset, packing.pack(pieces, limit), pad_to=limit, pad_id=pad_id)


def make_row(documents, *, pad_to: int | None, pad_id: int) -> dict:
    """One row from (ids, learned) pairs. A document's first token is no label: none precedes it.

    pad_to: the length of a row of several documents; None leaves a single document as it is.
    """
    ids = [np.asarray(tokens, dtype=np.int64) for tokens, _ in documents]
    labels = [np.where(learned, tokens, IGNORE) for tokens, (_, learned) in zip(ids, documents)]
    for labels_T in labels:
        labels_T[:1] = IGNORE
    row = {"input_ids": ids, "labels": labels}
    if pad_to is not None:
        rest = pad_to - sum(map(len, ids))
        ids.append(np.full(rest, pad_id))
        labels.append(np.full(rest, IGNORE))
        # Padding is a document of its own.
        row["position_ids"] = [np.arange(len(tokens_T)) for tokens_T in ids]
    return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in row.items()}


@dataclass(frozen=True)
class Collator:
    """Stacks rows into a dict of [B, T] int64 tensors, padded on the right.

    pad_id: the token of the padding. multiple: of which T is a multiple. positions: adds
    position_ids to rows that have none, for ranks that share rows. Other rows without position_ids
    get an attention_mask where some are padded, by which they run without their padding.
    """

    pad_id: int = 0
    multiple: int = 1
    positions: bool = False

    def __call__(self, rows: list[dict]) -> dict:
        lengths = [len(row["input_ids"]) for row in rows]
        T = -(-max(lengths) // self.multiple) * self.multiple
        fill = {"input_ids": self.pad_id, "labels": IGNORE}
        batch = {}
        for name in rows[0]:
            # Positions go on as a new document rather than as zeros: each zero would start one, and
            # attention runs per document.
            rest = torch.arange(T)
            if name in fill:
                rest = torch.full_like(rest, fill[name])
            padded = [torch.cat([row[name], rest[: T - n]]) for row, n in zip(rows, lengths)]
            batch[name] = torch.stack(padded)
        if "position_ids" not in batch and self.positions:
            batch["position_ids"] = torch.arange(T).repeat(len(rows), 1)
        elif "position_ids" not in batch and min(lengths) < T:
            batch["attention_mask"] = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
        return batch


def show(rows: list[dict], tokenizer) -> str:
    """The rows' tokens for a terminal: labels green, others grey, `|` before each document."""
    lines = []
    for number, row in enumerate(rows):
        ids = row["input_ids"]
        labels = row["labels"]
        positions = row.get("position_ids", range(len(ids)))
        learned = int((labels != IGNORE).sum())
        lines.append(
            f"row {number}: {len(ids)} tokens, {learned} learned (green), {len(ids) - learned} "
            "ignored (grey)"
        )
        text = ""
        for token, label, position in zip(ids, labels, positions):
            colour = 90 if label == IGNORE else 32
            text += "\n|" if position == 0 else ""
            text += f"\x1b[{colour}m{tokenizer.decode([token])}\x1b[0m"
        lines.append(text.strip("\n"))
    return "\n".join(lines)
