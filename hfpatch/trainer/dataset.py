"""Rows of pieces of tokenized documents, their labels and positions, and batches of rows.

Documents that share a row are isolated by position_ids that restart at 0: attention, stock or
hfpatch's, then sees its own document only, as long as no attention_mask is passed. None is needed:
padding is on the right, where causal attention never reaches it, and its labels are ignored.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hfpatch.trainer import packing
from hfpatch.trainer.count import Count
from hfpatch.trainer.tokens import Tokens

IGNORE = -100


class RowDataset(torch.utils.data.Dataset):
    """Rows of pieces: item i is {"input_ids", "labels"} of [T] int64.

    Packed rows have "position_ids" too.
    """

    def __init__(self, tokens: Tokens, rows, *, pad_to: int | None = None, pad_id: int = 0):
        self.tokens, self.pad_to, self.pad_id = tokens, pad_to, pad_id
        pieces = [(p.document, p.start, p.length) for row in rows for p in row]
        # Arrays, not millions of objects: the workers of a data loader copy these for free.
        self.pieces = np.asarray(pieces, dtype=np.int64).reshape(-1, 3)
        self.bounds = np.cumsum([0, *map(len, rows)])

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict:
        documents = []
        for document, start, length in self.pieces[self.bounds[index] : self.bounds[index + 1]]:
            at = self.tokens.offsets[document] + start
            documents.append(
                (self.tokens.ids[at : at + length], self.tokens.learned[at : at + length])
            )
        return make_row(documents, pad_to=self.pad_to, pad_id=self.pad_id)


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
        longest = max(len(row["input_ids"]) for row in rows)
        T = -(-longest // self.multiple) * self.multiple
        fill = {"input_ids": self.pad_id, "labels": IGNORE}
        batch = {}
        for name in rows[0]:
            if name == "position_ids":
                batch[name] = torch.stack([_continue(row[name], T) for row in rows])
                continue
            padded = [
                torch.nn.functional.pad(row[name], (0, T - len(row[name])), value=fill[name])
                for row in rows
            ]
            batch[name] = torch.stack(padded)
        if "position_ids" in batch:
            return batch
        if self.positions:
            batch["position_ids"] = torch.arange(T).repeat(len(rows), 1)
        elif any(len(row["input_ids"]) < T for row in rows):
            lengths_B1 = torch.tensor([[len(row["input_ids"])] for row in rows])
            batch["attention_mask"] = (torch.arange(T) < lengths_B1).long()
        return batch


def _continue(position_ids_T: torch.Tensor, T: int) -> torch.Tensor:
    # A new document rather than zeros: each zero would start one, and attention runs per document.
    return torch.cat([position_ids_T, torch.arange(T - len(position_ids_T))])


@dataclass(frozen=True)
class Prepared:
    """A dataset, its log line, and two numbers of its tokens.

    bytes_per_token: UTF-8 bytes a token of plain text, 0.0 for other kinds.
    attention_share: as packing.attention_share gives it.
    """

    dataset: RowDataset
    summary: str
    bytes_per_token: float
    attention_share: float


def prepare(
    tokens: Tokens,
    documents,
    *,
    seq_len: int,
    packed: bool,
    long_rows: str = "split",
    pad_id: int = 0,
    name: str = "train",
    windows: dict = packing.FULL,
) -> Prepared:
    """Rows of at most seq_len tokens from the chosen documents.

    windows: as packing.attention_share takes them. Raises ValueError if no label is left.
    """
    documents = np.asarray(documents, dtype=np.int64)
    lengths = tokens.offsets[documents + 1] - tokens.offsets[documents]
    done = packing.cut(lengths, seq_len, long_rows=long_rows)
    count = Count(
        documents=len(documents),
        tokens=int(lengths.sum()),
        long_documents=done.documents,
        long_tokens=done.tokens,
        malformed=tokens.malformed,
    )
    kept = _with_labels(tokens, documents, done.pieces, count)
    if not kept:
        raise ValueError(
            f"hfpatch: expected tokens to learn in the {name} data, none of {len(documents)} "
            f"documents has a label left after masking and cutting to {seq_len}; check the roles, "
            "--long_rows and --seq-len."
        )
    rows = packing.pack(kept, seq_len) if packed else [[piece] for piece in kept]
    dataset = RowDataset(tokens, rows, pad_to=seq_len if packed else None, pad_id=pad_id)
    fill = f" (packing fill {count.kept / (len(rows) * seq_len):.1%})" if packed else ""
    summary = (
        f"{name}: {count.read()}; {count.kept:,} tokens, {count.labels / count.kept:.1%} of them "
        f"labels, in {len(rows):,} rows of up to {seq_len:,}{fill}; {count.left_out(long_rows)}"
    )
    per_token = tokens.text_bytes / max(1, int(tokens.offsets[-1]))
    share = packing.attention_share(rows, seq_len, windows) if packed else 1.0
    return Prepared(dataset, summary, per_token, share)


def _with_labels(tokens: Tokens, documents, pieces, count: Count) -> list[packing.Piece]:
    """The pieces that hold a label, with the documents' numbers in `tokens`; counts the others."""
    before_N = np.concatenate(
        [[0], np.cumsum(tokens.learned[: tokens.offsets[-1]], dtype=np.int64)]
    )
    kept = []
    for piece in pieces:
        document = int(documents[piece.document])
        at = int(tokens.offsets[document]) + piece.start
        # A piece's first token is never a label, because no token of its row precedes it.
        labels = int(before_N[at + piece.length] - before_N[at + 1])
        if labels:
            kept.append(packing.Piece(document, piece.start, piece.length))
            count.labels += labels
        else:
            count.unlabelled_parts += 1
            count.unlabelled_tokens += piece.length
    return kept


def split(documents: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted (train, validation) document indices: `share` of them, at least one, by the seed."""
    order = np.random.default_rng(seed).permutation(documents)
    held = min(documents - 1, max(1, round(documents * share)))
    return np.sort(order[held:]), np.sort(order[:held])


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
