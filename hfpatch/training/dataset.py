"""Batches from tokenized documents: rows of pieces, their labels and positions, the collator, and a look at a batch.

Documents that share a row stay apart by position_ids that restart at 0: the attention of a model (stock transformers
and hfpatch alike) then sees only its own document, as long as no attention_mask is passed. None is: padding stands on
the right, where causal attention never reaches it from a real token, and its labels are ignored.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np
import torch

from hfpatch.training import packing, sources
from hfpatch.training.tokens import Tokens, encoded

IGNORE = -100
CUT_WORDS = {"truncate": "truncated", "drop": "dropped as too long", "split": "truncated"}


class RowDataset(torch.utils.data.Dataset):
    """Rows of pieces: item i is {"input_ids", "labels"} of [T] int64, and "position_ids" where rows are packed."""

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
            documents.append((self.tokens.ids[at : at + length], self.tokens.learned[at : at + length]))
        return make_row(documents, pad_to=self.pad_to, pad_id=self.pad_id)


def make_row(documents, *, pad_to: int | None, pad_id: int) -> dict:
    """One row from (ids, learned) pairs. The first token of a document is no target: nothing of it stands before.

    pad_to: the length of the row, of several documents (position_ids restart at each); None: the one document as it is.
    """
    ids_T = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in documents])
    labels_T = np.concatenate([_labels(ids, learned) for ids, learned in documents])
    if pad_to is None:
        return {"input_ids": torch.from_numpy(ids_T), "labels": torch.from_numpy(labels_T)}
    rest = pad_to - len(ids_T)
    positions = [np.arange(len(ids)) for ids, _ in documents] + [np.arange(rest)]  # padding is a document of its own
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
    """Stacks rows, the shorter ones padded on the right; a dict of [B, T] int64 tensors without attention_mask.

    positions: position_ids too where the rows bring none.
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
            padded = [torch.nn.functional.pad(row[name], (0, T - len(row[name])), value=fill[name]) for row in rows]
            batch[name] = torch.stack(padded)
        if self.positions and "position_ids" not in batch:
            batch["position_ids"] = torch.arange(T).repeat(len(rows), 1)
        return batch


def _continue(position_ids_T: torch.Tensor, T: int) -> torch.Tensor:
    # A new document rather than zeros: each zero would start one, and attention runs per document.
    return torch.cat([position_ids_T, torch.arange(T - len(position_ids_T))])


@dataclass(frozen=True)
class Prepared:
    """A dataset and what its log line says. bytes_per_token: UTF-8 bytes a token of plain text, 0.0 for other kinds."""

    dataset: RowDataset
    summary: str
    bytes_per_token: float
    attention_share: float


def prepare(
    tokens: Tokens,
    documents,
    *,
    seq_length: int,
    packed: bool,
    long_rows: str = "truncate",
    side: str = "right",
    pad_id: int = 0,
    name: str = "train",
    windows: dict = packing.FULL,
) -> Prepared:
    """Rows of at most seq_length tokens from the chosen documents. windows: as packing.attention_share takes them.
    Raises ValueError where no label is left."""
    documents = np.asarray(documents, dtype=np.int64)
    lengths = tokens.offsets[documents + 1] - tokens.offsets[documents]
    done = packing.cut(lengths, seq_length, long_rows=long_rows, side=side)
    before_N = np.concatenate([[0], np.cumsum(tokens.learned[: tokens.offsets[-1]], dtype=np.int64)])
    kept, labels, total = [], 0, 0
    for piece in done.pieces:
        at = int(tokens.offsets[documents[piece.document]]) + piece.start
        learned = int(before_N[at + piece.length] - before_N[min(at + 1, at + piece.length)])
        if learned:
            kept.append(packing.Piece(int(documents[piece.document]), piece.start, piece.length))
            labels += learned
            total += piece.length
    if not kept:
        raise ValueError(
            f"hfpatch: expected tokens to learn in the {name} data, none of {len(documents)} documents has a label "
            f"left after masking and cutting to {seq_length}; check the roles, --truncation_side and --seq_length."
        )
    rows = packing.pack(kept, seq_length) if packed else [[piece] for piece in kept]
    dataset = RowDataset(tokens, rows, pad_to=seq_length if packed else None, pad_id=pad_id)
    fill = f", packing fill {total / (len(rows) * seq_length):.1%}" if packed else ""
    summary = (
        f"{name}: {len(documents):,} documents, {total:,} tokens, {labels / total:.1%} of them labels; {len(rows):,} "
        f"rows of up to {seq_length:,} tokens{fill}; {done.truncated:,} {CUT_WORDS[long_rows]}, "
        f"{len(done.pieces) - len(kept):,} without a label, {tokens.malformed:,} malformed"
    )
    per_token = tokens.text_bytes / max(1, int(tokens.offsets[-1]))
    share = packing.attention_share(rows, seq_length, windows) if packed else 1.0
    return Prepared(dataset, summary, per_token, share)


def split(documents: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation) document indices: `share` of them, at least one, chosen by the seed and sorted."""
    order = np.random.default_rng(seed).permutation(documents)
    held = min(documents - 1, max(1, round(documents * share)))
    return np.sort(order[held:]), np.sort(order[:held])


SHARE_OF = 1000  # documents of a stream, at most, from which the share of attention is taken


class StreamDataset(torch.utils.data.IterableDataset):
    """Rows made while they are read, for data larger than the disk or memory; the same order in every run.

    make_rows: a callable that starts reading again; shuffle: rows that wait in the shuffling buffer. What was truncated,
    dropped or malformed is said when the reading ends, also where it is broken off, by each process that reads.
    """

    def __init__(self, make_rows, tokenizer, *, seq_length, packed, kind, text_field, long_rows, side, pad_id, shuffle,
                 seed, strict, vocab_size=None, say=print):  # fmt: skip
        self.make_rows, self.tokenizer, self.say, self.strict = make_rows, tokenizer, say, strict
        self.seq_length, self.packed, self.pad_id = seq_length, packed, pad_id
        self.encode = {"kind": kind, "text_field": text_field, "vocab_size": vocab_size}
        self.long_rows, self.side = long_rows, side
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer: each epoch shuffles in its own order."""
        self.epoch = epoch

    def check(self, windows: dict = packing.FULL) -> float:
        """Reads up to the first row to learn from; where rows are packed as many documents as say what attention costs in them, as
        packing.attention_share gives it (1.0 elsewhere). Raises ValueError where no row is: Trainer would end after 0 steps."""
        counts = Counter()
        pieces = self._pieces(self.make_rows(), counts, say=lambda line: None)
        lengths = [len(ids) for ids, _ in islice(pieces, max(1, min(self.shuffle, SHARE_OF)) if self.packed else 1)]
        if not lengths:
            raise ValueError(f"hfpatch: expected rows to train on, none is left: {self._summary(counts)}.")
        if not self.packed:
            return 1.0
        rows = list(self._rows(packing.Piece(i, 0, n) for i, n in enumerate(lengths)))
        return packing.attention_share(rows[:-1] or rows, self.seq_length, windows)  # the last may not be full

    def __iter__(self):
        rows, worker = self.make_rows(), torch.utils.data.get_worker_info()
        if worker is not None:  # every worker reads all rows and keeps its share
            rows = (row for i, row in enumerate(rows) if i % worker.num_workers == worker.id)
        counts = Counter()
        try:
            yield from self._packed(self._shuffled(self._pieces(rows, counts, self.say)))
        finally:
            reader = f"worker {worker.id}" if worker is not None else "the stream"
            self.say(f"hfpatch: train: {reader} read {self._summary(counts)}")

    def _packed(self, documents):
        if not self.packed:
            for document in documents:
                yield make_row([document], pad_to=None, pad_id=self.pad_id)
            return
        for row in self._rows(documents, lambda document: len(document[0])):
            yield make_row(row, pad_to=self.seq_length, pad_id=self.pad_id)

    def _rows(self, documents, length=attrgetter("length")):
        """Lists of documents, in order, as many in each as a row holds."""
        held, used = [], 0
        for document in documents:
            if used + length(document) > self.seq_length:
                yield held
                held, used = [], 0
            held.append(document)
            used += length(document)
        if held:
            yield held

    def _pieces(self, rows, counts: Counter, say):
        for item in encoded(rows, self.tokenizer, **self.encode):
            if isinstance(item, sources.Malformed):
                if self.strict:
                    sources.refuse(item)
                counts["malformed"] += 1
                say(f"hfpatch: malformed row left out ({counts['malformed']} so far): {item}")
                continue
            ids, learned, _ = item
            counts["documents"] += 1
            cut = packing.cut([len(ids)], self.seq_length, long_rows=self.long_rows, side=self.side)
            counts["long"] += cut.truncated
            for piece in cut.pieces:
                end = piece.start + piece.length
                if any(learned[piece.start + 1 : end]):
                    yield ids[piece.start : end], learned[piece.start : end]
                else:
                    counts["unlearned"] += 1

    def _summary(self, counts: Counter) -> str:
        return (
            f"{counts['documents']:,} documents; {counts['long']:,} {CUT_WORDS[self.long_rows]}, "
            f"{counts['unlearned']:,} without a label, {counts['malformed']:,} malformed"
        )

    def _shuffled(self, documents):
        random = np.random.default_rng((self.seed, self.epoch))
        held = []
        for document in documents:
            if len(held) < self.shuffle:
                held.append(document)
            else:
                at = int(random.integers(len(held)))
                yield held[at]
                held[at] = document
        for at in random.permutation(len(held)):
            yield held[at]


def show(rows: list[dict], tokenizer) -> str:
    """The tokens of the rows for a terminal: learned ones green, ignored ones grey, `|` where a document begins."""
    lines = []
    for number, row in enumerate(rows):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        positions = row["position_ids"].tolist() if "position_ids" in row else range(len(ids))
        learned = sum(label != IGNORE for label in labels)
        lines.append(f"row {number}: {len(ids)} tokens, {learned} learned (green), {len(ids) - learned} ignored (grey)")
        text = ""
        for token, label, position in zip(ids, labels, positions):
            text += "\n|" if position == 0 else ""
            text += f"\x1b[{'32' if label != IGNORE else '90'}m{tokenizer.decode([token])}\x1b[0m"
        lines.append(text.strip("\n"))
    return "\n".join(lines)
