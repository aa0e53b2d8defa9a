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
        self.table, self.pad_to, self.pad_id = table, pad_to, pad_id
        pieces = [(p.document, p.start, p.length) for row in rows for p in row]
        # Arrays, not millions of objects: the workers of a data loader copy these for free.
        self.pieces = np.asarray(pieces, dtype=np.int64).reshape(-1, 3)
        self.bounds = np.cumsum([0, *map(len, rows)])

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict:
        columns, documents = [self.table.data.column(name) for name in ("ids", "learned")], []
        for document, start, length in self.pieces[self.bounds[index] : self.bounds[index + 1]]:
            parts = (column[int(document)].values.slice(start, length) for column in columns)
            documents.append([part.to_numpy(zero_copy_only=False) for part in parts])
        return make_row(documents, pad_to=self.pad_to, pad_id=self.pad_id)


class Packed(RowDataset):
    """Packed rows of any dataset with token ids, and labels where it has some."""

    def __getitem__(self, index: int) -> dict:
        documents = []
        for document, start, length in self.pieces[self.bounds[index] : self.bounds[index + 1]]:
            row = self.table[int(document)]
            ids = np.asarray(row["input_ids"])[start : start + length]
            labels = np.asarray(row.get("labels", row["input_ids"]))[start : start + length]
            documents.append((ids, labels != IGNORE))
        return make_row(documents, pad_to=self.pad_to, pad_id=self.pad_id)


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
        ValueError: seq_len is no length, a row has no input_ids, or long_rows is another word.

    Examples:
        >>> Trainer(model=model, args=args, train_dataset=hfpatch.pack(tokenized, 65536)).train()
    """
    limit = parse_length(seq_len)
    refuse_unknown([long_rows], ("split", "truncate", "drop"), "long_rows")
    if len(dataset) and "input_ids" not in dataset[0]:
        raise ValueError(
            f"hfpatch: a row must have input_ids, got {', '.join(dataset[0])}. Tokenize the data first."
        )
    lengths = [len(row["input_ids"]) for row in dataset]
    pieces = packing.cut(lengths, limit, long_rows=long_rows)
    return Packed(dataset, packing.pack(pieces, limit), pad_to=limit, pad_id=pad_id)


def make_row(documents, *, pad_to: int | None, pad_id: int) -> dict:
    """One row from (ids, learned) pairs. A document's first token is no label: none precedes it.

    pad_to: the length of a row of several documents; None leaves a single document as it is.
    """
    ids_T = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in documents])
    labels_T = np.concatenate([_labels(ids, learned) for ids, learned in documents])
    if pad_to is None:
        return {"input_ids": torch.from_numpy(ids_T), "labels": torch.from_numpy(labels_T)}
    rest = pad_to - len(ids_T)
    # The last: padding is a document of its own.
    positions = [np.arange(len(ids)) for ids, _ in documents] + [np.arange(rest)]
    return {
        "input_ids": torch.from_numpy(np.pad(ids_T, (0, rest), constant_values=pad_id)),
        "labels": torch.from_numpy(np.pad(labels_T, (0, rest), constant_values=IGNORE)),
        "position_ids": torch.from_numpy(np.concatenate(positions)),
    }


def _labels(ids, learned) -> np.ndarray:
    labels_T = np.where(np.asarray(learned, dtype=bool), np.asarray(ids, dtype=np.int64), IGNORE)
    labels_T[:1] = IGNORE
    return labels_T


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
            more = [torch.arange(T - n) if name not in fill else torch.full((T - n,), fill[name])
                    for n in lengths]  # fmt: skip
            batch[name] = torch.stack([torch.cat([row[name], x]) for row, x in zip(rows, more)])
        if "position_ids" not in batch and self.positions:
            batch["position_ids"] = torch.arange(T).repeat(len(rows), 1)
        elif "position_ids" not in batch and min(lengths) < T:
            batch["attention_mask"] = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
        return batch


def show(rows: list[dict], tokenizer) -> str:
    """The rows' tokens for a terminal: labels green, others grey, `|` before each document."""
    lines = []
    for number, row in enumerate(rows):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        positions = row["position_ids"].tolist() if "position_ids" in row else range(len(ids))
        learned = sum(label != IGNORE for label in labels)
        lines.append(
            f"row {number}: {len(ids)} tokens, {learned} learned (green), {len(ids) - learned} "
            "ignored (grey)"
        )
        text = ""
        for token, label, position in zip(ids, labels, positions):
            text += "\n|" if position == 0 else ""
            text += f"\x1b[{'32' if label != IGNORE else '90'}m{tokenizer.decode([token])}\x1b[0m"
        lines.append(text.strip("\n"))
    return "\n".join(lines)
