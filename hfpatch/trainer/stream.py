"""Rows that are made while they are read, for data larger than the disk or memory."""

from itertools import islice
from operator import attrgetter

import numpy as np
import torch

from hfpatch.trainer import chat, packing, sources
from hfpatch.trainer.count import Count
from hfpatch.trainer.dataset import make_row
from hfpatch.trainer.tokens import encoded

SHARE_OF = 1000  # documents, at most, from which check() estimates the share of attention


class StreamDataset(torch.utils.data.IterableDataset):
    """Rows in the same order in every run, shuffled within a buffer.

    make_rows: a callable that starts reading again. shuffle: size of the shuffling buffer in
    pieces. The others are those of tokens.encoded() and dataset.prepare(). When reading ends, also
    if it is broken off, each reading process says what was left out.
    """

    def __init__(
        self,
        make_rows,
        tokenizer,
        *,
        seq_len: int,
        packed: bool,
        kind: str,
        text_field: str,
        long_rows: str,
        pad_id: int,
        shuffle: int,
        seed: int,
        strict: bool,
        template: chat.Template = chat.OWN,
        vocab_size: int | None = None,
        say=print,
    ):
        self.make_rows, self.tokenizer, self.say, self.strict = make_rows, tokenizer, say, strict
        self.seq_len, self.packed, self.pad_id, self.long_rows = seq_len, packed, pad_id, long_rows
        self.encode = {
            "kind": kind,
            "text_field": text_field,
            "template": template,
            "vocab_size": vocab_size,
        }
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer: each epoch shuffles in its own order."""
        self.epoch = epoch

    def check(self, windows: dict = packing.FULL) -> float:
        """Refuses data without a row to learn from, for which Trainer would end after 0 steps.

        Returns packing.attention_share() of the first documents of packed rows, 1.0 for others.
        Raises ValueError.
        """
        count = Count()
        pieces = self._pieces(self.make_rows(), count, say=lambda line: None)
        wanted = max(1, min(self.shuffle, SHARE_OF)) if self.packed else 1
        lengths = [len(ids) for ids, _ in islice(pieces, wanted)]
        if not lengths:
            raise ValueError(
                f"hfpatch: expected rows to train on, none is left: {self._summary(count)}."
            )
        if not self.packed:
            return 1.0
        rows = list(self._rows(packing.Piece(i, 0, n) for i, n in enumerate(lengths)))
        # The last row may not be full.
        return packing.attention_share(rows[:-1] or rows, self.seq_len, windows)

    def __iter__(self):
        rows, worker = self.make_rows(), torch.utils.data.get_worker_info()
        if worker is not None:  # each worker reads all rows and keeps its share
            rows = (row for i, row in enumerate(rows) if i % worker.num_workers == worker.id)
        count = Count()
        try:
            yield from self._made(self._shuffled(self._pieces(rows, count, self.say)))
        finally:
            reader = f"worker {worker.id}" if worker is not None else "the stream"
            self.say(f"hfpatch: train: {reader} read {self._summary(count)}")

    def _pieces(self, rows, count: Count, say):
        """(ids, learned) of each piece that holds a label; the rest is counted."""
        for item in encoded(rows, self.tokenizer, **self.encode):
            if isinstance(item, sources.Malformed):
                if self.strict:
                    sources.refuse(item)
                count.malformed += 1
                say(f"hfpatch: malformed row left out ({count.malformed} so far): {item}")
                continue
            ids, learned, _ = item
            cut = packing.cut([len(ids)], self.seq_len, long_rows=self.long_rows)
            count.documents += 1
            count.tokens += len(ids)
            count.long_documents += cut.documents
            count.long_tokens += cut.tokens
            for piece in cut.pieces:
                end = piece.start + piece.length
                if any(learned[piece.start + 1 : end]):
                    yield ids[piece.start : end], learned[piece.start : end]
                else:
                    count.unlabelled_parts += 1
                    count.unlabelled_tokens += piece.length

    def _summary(self, count: Count) -> str:
        return f"{count.read()}; {count.left_out(self.long_rows)}"

    def _shuffled(self, pieces):
        random = np.random.default_rng((self.seed, self.epoch))
        held = []
        for piece in pieces:
            if len(held) < self.shuffle:
                held.append(piece)
            else:
                at = int(random.integers(len(held)))
                yield held[at]
                held[at] = piece
        for at in random.permutation(len(held)):
            yield held[at]

    def _made(self, pieces):
        if not self.packed:
            for piece in pieces:
                yield make_row([piece], pad_to=None, pad_id=self.pad_id)
            return
        for row in self._rows(pieces, lambda piece: len(piece[0])):
            yield make_row(row, pad_to=self.seq_len, pad_id=self.pad_id)

    def _rows(self, pieces, length=attrgetter("length")):
        """Lists of pieces, in order, as many in each as a row holds."""
        held, used = [], 0
        for piece in pieces:
            if used + length(piece) > self.seq_len:
                yield held
                held, used = [], 0
            held.append(piece)
            used += length(piece)
        if held:
            yield held
