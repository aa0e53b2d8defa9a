"""From flags to the tokenizer and the datasets that Trainer takes.

Rows are tokenized and masked, then cut and packed; what was left out is printed. `datasets` keeps
the tokens, shuffles and streams.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import torch

from hfpatch.trainer import chat, packing, tokenizer
from hfpatch.trainer.dataset import RowDataset, make_row
from hfpatch.trainer.loading import loads
from hfpatch.trainer.model_flops import windows_of
from hfpatch.trainer.rows import Rows, rows_of

MOST_MALFORMED = 0.1  # of the rows; more stop the run unless --allow_malformed
NO_TEMPLATE = (
    "hfpatch: chat messages need a chat template, and the tokenizer has none. Give "
    "--chat_template FILE"
)
TOKENS = datasets.Features(
    {
        "ids": datasets.List(datasets.Value("int32")),
        "learned": datasets.List(datasets.Value("bool")),
        "bytes": datasets.Value("int32"),
        "bad": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Datasets:
    """The datasets of Trainer, and facts for the log and for a resume."""

    train: torch.utils.data.Dataset
    evaluation: RowDataset | None
    bytes_per_token: float
    attention_share: float
    fingerprint: str


def encoded(rows, tokenizer, data, template, vocab_size: int) -> Iterator[dict]:
    """Each row as TOKENS: ids, a learned flag each, or why it is bad."""
    held = []  # plain texts wait for one call of the tokenizer, which works on them in parallel

    def flush():
        texts = [row for _, row in held if isinstance(row, str)]
        made = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        for place, row in held:
            nbytes, bad = 0, ""
            if isinstance(row, str):
                ids = chat.with_end(next(made), tokenizer)
                nbytes, row = len(row.encode()), (ids, [True] * len(ids))
            if isinstance(row, tuple) and max(row[0], default=0) >= vocab_size:
                token = tokenizer.convert_ids_to_tokens(max(row[0]))
                row = chat.BadRow(f"the token {token!r} is beyond the model's {vocab_size}")
            if isinstance(row, chat.BadRow):
                nbytes, bad, row = 0, f"{place}: {row}", ((), ())
            yield {"ids": row[0], "learned": row[1], "bytes": nbytes, "bad": bad}
        held.clear()

    for place, row in rows.read():
        try:
            if isinstance(row, dict):
                kind = chat.kind_of(row, data.text_field) if data.kind == "auto" else data.kind
                if kind == "text":
                    row = chat.text_of(row, data.text_field)
                else:
                    if chat.is_chat(row, kind) and not tokenizer.chat_template:
                        raise ValueError(f"{NO_TEMPLATE} (the first at {place}).")
                    row = chat.encode(row, tokenizer, kind=kind, template=template)
        except chat.BadRow as error:
            row = error
        held.append((place, row))
        if len(held) >= 256:
            yield from flush()
    yield from flush()


@dataclass
class Malformed:
    """Rows left out, by reason: how many, and the place of the first."""

    rows: int = 0
    bad: int = 0
    reasons: dict[str, list] = field(default_factory=dict)

    def see(self, place_and_reason: str, data) -> None:
        """Counts one row; an empty text is a good one. ValueError under --strict."""
        self.rows += 1
        if not place_and_reason:
            return
        if data.strict:
            raise ValueError(
                f"hfpatch: --strict allows no malformed row, got {place_and_reason}. Correct it, "
                "or leave --strict out."
            )
        place, _, reason = place_and_reason.partition(": ")
        self.bad += 1
        self.reasons.setdefault(reason, [0, place])[0] += 1

    def report(self, data, say) -> None:
        """Says each reason once, with its count. ValueError for too many bad rows."""
        for reason, (count, place) in self.reasons.items():
            rows = "row" if count == 1 else "rows"
            say(f"hfpatch: {count} malformed {rows} left out: {reason} (the first at {place})")
        self.expect_few(data)

    def expect_few(self, data, least: int = 0) -> None:
        """ValueError for too many bad rows. least: rows of which the share is taken at least."""
        if self.bad > MOST_MALFORMED * max(self.rows, least) and not data.allow_malformed:
            raise ValueError(
                f"hfpatch: {self.bad} of {self.rows} rows are malformed, more than "
                f"{MOST_MALFORMED:.0%}. Correct the data, or pass --allow_malformed True."
            )


def prepared(table, documents, name: str, data, pad_id: int, windows, say) -> tuple:
    """(RowDataset, bytes a token, share of attention) of these documents of a tokenized table."""
    lengths = pyarrow.compute.list_value_length(table.data.column("ids")).to_numpy()
    chosen = lengths[documents]
    pieces = packing.cut(chosen, data.seq_len, long_rows=data.long_rows)
    learned, kept, labels = table.data.column("learned"), [], 0
    for piece in pieces:
        document = int(documents[piece.document])
        flags = learned[document].values[piece.start + 1 : piece.start + piece.length]
        count = flags.true_count if piece.length > 1 else 0
        if count:
            kept.append(packing.Piece(document, piece.start, piece.length))
            labels += count
    if not kept:
        raise ValueError(
            f"hfpatch: the {name} data have no token to learn: none of {len(documents)} documents "
            f"has a label left after masking and cutting to {data.seq_len}. Check the roles, "
            "--long_rows and --seq-len."
        )
    rows = packing.pack(kept, data.seq_len) if data.packing else [[piece] for piece in kept]
    tokens, read_ = sum(p.length for p in kept), int(chosen.sum())
    fill = f" (packing fill {tokens / (len(rows) * data.seq_len):.1%})" if data.packing else ""
    say(
        f"hfpatch: {name}: {len(documents):,} document{'s' * (len(documents) != 1)} of {read_:,} "
        f"tokens; {tokens:,} tokens, {labels / tokens:.1%} of them labels, in {len(rows):,} rows of "
        f"up to {data.seq_len:,}{fill}; left out: {read_ - tokens:,} tokens ({1 - tokens / read_:.1%})"
    )
    made = RowDataset(table, rows, pad_to=data.seq_len if data.packing else None, pad_id=pad_id)
    per_token = int(sum(table.data.column("bytes").to_numpy())) / max(1, int(lengths.sum()))
    share = packing.attention_share(rows, data.seq_len, windows) if data.packing else 1.0
    return made, per_token, share


class Stream(torch.utils.data.IterableDataset):
    """Rows that are made while they are read, shuffled within a buffer, in each epoch anew."""

    def __init__(self, encode, data, pad_id: int, seed: int, say):
        self.table = datasets.IterableDataset.from_generator(encode, features=TOKENS)
        self.table = self.table.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
        self.data, self.pad_id, self.say = data, pad_id, say

    def set_epoch(self, epoch: int) -> None:
        self.table.set_epoch(epoch)

    def _pieces(self):
        malformed, said = Malformed(), set()
        for row in self.table:
            ids, learned = row["ids"], row["learned"]
            malformed.see(row["bad"], self.data)
            new = malformed.reasons.keys() - said
            said |= new
            for reason in new:
                self.say(
                    f"hfpatch: rows left out: {reason} (the first at {malformed.reasons[reason][1]})"
                )
            malformed.expect_few(self.data, least=100)
            pieces = packing.cut([len(ids)], self.data.seq_len, long_rows=self.data.long_rows)
            for p in pieces:
                if any(learned[p.start + 1 : p.start + p.length]):
                    yield ids[p.start : p.start + p.length], learned[p.start : p.start + p.length]
        malformed.report(self.data, self.say)

    def __iter__(self):
        held, used, limit = [], 0, self.data.seq_len if self.data.packing else 0
        for piece in itertools.chain(self._pieces(), [None]):
            if held and (piece is None or used + len(piece[0]) > limit):
                yield make_row(held, pad_to=limit or None, pad_id=self.pad_id)
                held, used = [], 0
            if piece is not None:
                held.append(piece)
                used += len(piece[0])


def load_tokenizer(model, data, rows):
    """The tokenizer of the run, with its chat template. Raises ValueError."""
    if model.train_tokenizer:
        columns = (data.text_field, "prompt", "completion", *chat.CHAT_FIELDS)
        found = ([row.get(name) for name in columns] for row in rows.good())
        texts = itertools.chain.from_iterable(map(chat.strings, found))
        made = tokenizer.train(texts, model.train_tokenizer)
    else:
        from transformers import AutoTokenizer

        name = model.tokenizer or model.model
        with loads("no tokenizer loads", name, "; check it"):
            made = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    if data.chat_template:
        made.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    return made


def template_of(tokenizer, data, rows) -> chat.Template:
    """The template to train chat rows with; the first row decides whether the data are a chat."""
    if not chat.is_chat(next(rows.good(), {}), data.kind):
        return chat.OWN
    if not tokenizer.chat_template:
        raise ValueError(f"{NO_TEMPLATE}.")
    return chat.training_template(tokenizer)


def fit_vocabulary(config, tokenizer, *, fresh: bool) -> None:
    """A fresh model takes the size of its tokenizer; any other must hold the tokenizer's tokens.
    Special tokens may lie beyond it: rows that hold one are malformed.
    """
    vocabulary = tokenizer.get_vocab()
    if fresh:
        config.vocab_size = max(vocabulary.values()) + 1
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    size = config.get_text_config().vocab_size
    beyond = [(n, t) for t, n in vocabulary.items() if n >= size and n not in special]
    if beyond:
        number, token = min(beyond)
        raise ValueError(
            f"hfpatch: the tokenizer must have at most {size} tokens, the model's vocabulary, got "
            f"{len(tokenizer)} ({token!r} is number {number}, counted from 0). Use its own "
            "tokenizer, or resize the embeddings first."
        )


def pad_id(config, tokenizer) -> int:
    """The token of padding: any of the model's, as none attends to it and no label is it."""
    size = config.get_text_config().vocab_size
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in ids if number is not None and number < size)


def load_data(model, data, args, config, *, say) -> tuple:
    """The tokenizer and the datasets of the run. One process of a machine tokenizes, others wait."""
    with args.main_process_first(desc="tokenizing"):
        rows = rows_of(data.data, data, data.data_split)
        made = load_tokenizer(model, data, rows)
        fit_vocabulary(config, made, fresh=bool(model.train_tokenizer))
        seed = args.seed if args.data_seed is None else args.data_seed
        return made, load_datasets(data, rows, made, config, seed=seed, say=say)


def _kept(rows: Rows, encode, settings, data) -> datasets.Dataset:
    """TOKENS of the rows, from the cache if they were made before."""
    name = datasets.fingerprint.Hasher.hash((2, rows.digest, *settings))
    cache = os.path.expanduser(data.cache_dir)
    try:
        return datasets.Dataset.from_generator(
            encode, features=TOKENS, cache_dir=cache, fingerprint=name
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None  # our own sentence, or the system's
        raise


def load_datasets(data, rows: Rows, tokenizer, config, *, seed: int, say) -> Datasets:
    """Tokenizes (or finds in the cache), splits, cuts and packs the data. Raises ValueError."""
    template, padding = template_of(tokenizer, data, rows), pad_id(config, tokenizer)
    size = config.get_text_config().vocab_size
    settings = (_tokenizer_digest(tokenizer), template, size, data.kind, data.text_field,
                data.text_unit)  # fmt: skip
    if template.text is not None:
        say("hfpatch: chat: TRL's training template, whose markers show the assistant's turns")

    def encode(rows):
        return partial(encoded, rows, tokenizer, data, template, size)

    def tokens_of(rows):
        made = _kept(rows, encode(rows), settings, data)
        bad = made.data.column("bad").to_pylist()
        good = np.flatnonzero([not reason for reason in bad])
        if not len(good):
            raise ValueError(
                f"hfpatch: all {len(bad)} rows are malformed ({next(iter(bad), 'no row')}). "
                "Correct the data or name its columns."
            )
        malformed = Malformed()
        for reason in bad:
            malformed.see(reason, data)
        malformed.report(data, say)
        return made, good

    held = None
    if data.eval_data:
        found = rows_of(data.eval_data, data, data.eval_split or data.data_split)
        if found.digest == rows.digest:
            raise ValueError(
                "hfpatch: --eval_data must differ from the training data. Name others, or a split "
                "with --eval_split."
            )
        held = tokens_of(found)
    share = 1.0
    if data.streaming:
        made = Stream(encode(rows), data, padding, seed, say)
        if next(iter(made), None) is None:
            raise ValueError("hfpatch: no row is left to train on. Check the data.")
    else:
        tokens, good = tokens_of(rows)
        if data.validation_split:
            if len(good) < 2:
                raise ValueError(
                    "hfpatch: --validation_split needs two documents or more, got one. Give "
                    "--eval_data."
                )
            order = np.random.default_rng(seed).permutation(good)
            most = min(len(good) - 1, max(1, round(len(good) * data.validation_split)))
            held, good = (tokens, np.sort(order[:most])), np.sort(order[most:])
        made, _, share = prepared(
            tokens, good, "train", data, padding, windows_of(config) or packing.FULL, say
        )
    evaluation, per_token = None, 0.0
    if held is not None:
        evaluation, per_token, _ = prepared(*held, "validation", data, padding, packing.FULL, say)
    return Datasets(made, evaluation, per_token, share, rows.digest)


def _tokenizer_digest(tokenizer) -> str:
    """Hex digest of a tokenizer: vocabulary, merges, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    parts = body, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)
    return datasets.fingerprint.Hasher.hash(parts)
