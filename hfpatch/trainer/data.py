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
    read = iter(rows.read())
    while held := [*itertools.islice(read, 256)]:
        found = [_text_or_tokens(*row, tokenizer, data, template) for row in held]
        # One call of the tokenizer works on many plain texts in parallel.
        texts = [one for one in found if isinstance(one, str)]
        ids_of_texts = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        for (place, _), one in zip(held, found):
            made = {"ids": [], "learned": [], "bytes": 0, "bad": ""}
            if isinstance(one, chat.BadRow):
                made["bad"] = f"{place}: {one}"
            elif isinstance(one, str):
                made["ids"] = chat.with_end(next(ids_of_texts), tokenizer)
                made["learned"] = [True] * len(made["ids"])
                made["bytes"] = len(one.encode())
            else:
                made["ids"], made["learned"] = one
            largest = max(made["ids"], default=0)
            if largest >= vocab_size:
                token = tokenizer.convert_ids_to_tokens(largest)
                bad = f"{place}: the token {token!r} is beyond the model's {vocab_size}"
                made = {"ids": [], "learned": [], "bytes": 0, "bad": bad}
            yield made


def need_template(tokenizer, place: str) -> None:
    """ValueError if the tokenizer has no template for the chat at this place."""
    if not tokenizer.chat_template:
        raise ValueError(
            "hfpatch: chat messages need a chat template, and the tokenizer has none. Give "
            f"--chat_template FILE (the first at {place})."
        )


def _text_or_tokens(place, row, tokenizer, data, template) -> str | tuple | chat.BadRow:
    """A plain text, the (ids, learned) of another row, or why the row is bad."""
    if isinstance(row, chat.BadRow):
        return row
    try:
        kind = chat.kind_of(row, data.text_field) if data.kind == "auto" else data.kind
        if kind == "text":
            return chat.text_of(row, data.text_field)
        if chat.is_chat(row, kind):
            need_template(tokenizer, place)
        return chat.encode(row, tokenizer, kind=kind, template=template)
    except chat.BadRow as error:
        return error


@dataclass
class Malformed:
    """Rows left out, by reason: how many, and the place of the first."""

    rows: int = 0
    bad: int = 0
    reasons: dict[str, list] = field(default_factory=dict)

    def see(self, place_and_reason: str, data, say=None) -> None:
        """Counts one row, and says a new reason; an empty text is a good row. ValueError under
        --strict."""
        self.rows += 1
        if not place_and_reason:
            return
        if data.strict:
            raise ValueError(
                f"hfpatch: --strict allows no malformed row, got {place_and_reason}. Correct it, "
                "or leave --strict out."
            )
        self.bad += 1
        place, _, reason = place_and_reason.partition(": ")
        if say and reason not in self.reasons:
            say(f"hfpatch: rows left out: {reason} (the first at {place})")
        self.reasons.setdefault(reason, [0, place])[0] += 1

    def report(self, data, say) -> None:
        """Says each reason once, with its count. ValueError for too many bad rows."""
        for reason, (count, place) in self.reasons.items():
            plural = "s" * (count != 1)
            say(f"hfpatch: {count} malformed row{plural} left out: {reason} (the first at {place})")
        self.expect_few(data)

    def expect_few(self, data, least: int = 0) -> None:
        """ValueError for too many bad rows. least: rows of which the share is taken at least."""
        if self.bad > MOST_MALFORMED * max(self.rows, least) and not data.allow_malformed:
            raise ValueError(
                f"hfpatch: {self.bad} of {self.rows} rows are malformed, more than "
                f"{MOST_MALFORMED:.0%}. Correct the data, or pass --allow_malformed True."
            )


def prepared(table, documents, name: str, data, pad_id: int, say) -> RowDataset:
    """The rows that these documents of a tokenized table fill. Says what is left out."""
    lengths = pyarrow.compute.list_value_length(table.data.column("ids")).to_numpy()[documents]
    learned = table.data.column("learned")
    kept = []
    labels = 0
    for piece in packing.cut(lengths, data.seq_len, long_rows=data.long_rows):
        document = int(documents[piece.document])
        # The first token of a piece is no label: none precedes it.
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
    tokens = sum(piece.length for piece in kept)
    before = int(lengths.sum())
    fill = f" (packing fill {tokens / (len(rows) * data.seq_len):.1%})" if data.packing else ""
    say(
        f"hfpatch: {name}: {len(documents):,} document{'s' * (len(documents) != 1)} of {before:,} "
        f"tokens; {tokens:,} tokens, {labels / tokens:.1%} of them labels, in {len(rows):,} rows of "
        f"up to {data.seq_len:,}{fill}; left out: {before - tokens:,} tokens "
        f"({1 - tokens / before:.1%})"
    )
    return RowDataset(table, rows, pad_to=data.seq_len if data.packing else None, pad_id=pad_id)


class Stream(torch.utils.data.IterableDataset):
    """Rows that are made while they are read, shuffled within a buffer, in each epoch anew."""

    def __init__(self, encode, data, pad_id: int, seed: int, say):
        self.table = datasets.IterableDataset.from_generator(encode, features=TOKENS).shuffle(
            seed=seed, buffer_size=data.shuffle_buffer
        )
        self.data = data
        self.pad_id = pad_id
        self.say = say

    def set_epoch(self, epoch: int) -> None:
        self.table.set_epoch(epoch)

    def _pieces(self):
        """(ids, learned) of each piece with a label."""
        malformed = Malformed()
        for row in self.table:
            malformed.see(row["bad"], self.data, self.say)
            malformed.expect_few(self.data, least=100)
            lengths = [len(row["ids"])]
            for piece in packing.cut(lengths, self.data.seq_len, long_rows=self.data.long_rows):
                tokens = slice(piece.start, piece.start + piece.length)
                learned = row["learned"][tokens]
                if any(learned[1:]):
                    yield row["ids"][tokens], learned
        malformed.report(self.data, self.say)

    def __iter__(self):
        limit = self.data.seq_len if self.data.packing else 0
        held = []
        used = 0
        for piece in self._pieces():
            if held and used + len(piece[0]) > limit:
                yield make_row(held, pad_to=limit or None, pad_id=self.pad_id)
                held = []
                used = 0
            held.append(piece)
            used += len(piece[0])
        if held:
            yield make_row(held, pad_to=limit or None, pad_id=self.pad_id)


def load_tokenizer(model, data, rows):
    """The tokenizer of the run, with its chat template. Raises ValueError."""
    if model.train_tokenizer:
        columns = (data.text_field, "prompt", "completion", *chat.CHAT_FIELDS)
        found = ([row.get(name) for name in columns] for _, row in rows.good())
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


def load_datasets(data, rows: Rows, tokenizer, config, *, seed: int, say) -> Datasets:
    """Tokenizes (or finds in the cache), splits, cuts and packs the data. Raises ValueError."""
    # [Step 1] Choose the chat template. The first row decides whether the data are a chat.
    template = chat.OWN
    place, first = next(rows.good(), ("", {}))
    if chat.is_chat(first, data.kind):
        need_template(tokenizer, place)
        template = chat.training_template(tokenizer)
    if template.text is not None:
        say("hfpatch: chat: TRL's training template, whose markers show the assistant's turns")
    # [Step 2] Set up how a row is encoded. `settings` are part of the cache's key.
    size = config.get_text_config().vocab_size
    padding = pad_id(config, tokenizer)
    settings = (_tokenizer_digest(tokenizer), template, size, data.kind, data.text_field,
                data.text_unit)  # fmt: skip
    encode = partial(encoded, tokenizer=tokenizer, data=data, template=template, vocab_size=size)

    # [Step 3] Tokenize the evaluation data, if they are data of their own.
    held = None
    if data.eval_data:
        found = rows_of(data.eval_data, data, data.eval_split or data.data_split)
        if found.digest == rows.digest:
            raise ValueError(
                "hfpatch: --eval_data must differ from the training data. Name others, or a split "
                "with --eval_split."
            )
        held = _tokenized(found, encode, settings, data, say)
    # [Step 4] Tokenize the training data, hold some out for evaluation if asked to, and make rows.
    share = 1.0
    if data.streaming:
        made = Stream(partial(encode, rows), data, padding, seed, say)
        if next(iter(made), None) is None:
            raise ValueError("hfpatch: no row is left to train on. Check the data.")
    else:
        table, good = _tokenized(rows, encode, settings, data, say)
        if data.validation_split:
            if len(good) < 2:
                raise ValueError(
                    "hfpatch: --validation_split needs two documents or more, got one. Give "
                    "--eval_data."
                )
            order = np.random.default_rng(seed).permutation(good)
            most = min(len(good) - 1, max(1, round(len(good) * data.validation_split)))
            held = (table, np.sort(order[:most]))
            good = np.sort(order[most:])
        made = prepared(table, good, "train", data, padding, say)
        if data.packing:
            windows = windows_of(config) or packing.FULL
            lengths = made.pieces[:, 2].tolist()
            share = packing.attention_share(lengths, len(made), data.seq_len, windows)
    # [Step 5] Make the rows of evaluation, and compute their bytes per token.
    evaluation = None
    per_token = 0.0
    if held is not None:
        table, documents = held
        evaluation = prepared(table, documents, "validation", data, padding, say)
        tokens = pyarrow.compute.list_value_length(table.data.column("ids")).to_numpy().sum()
        per_token = float(table.data.column("bytes").to_numpy().sum() / max(1, tokens))
    return Datasets(made, evaluation, per_token, share, rows.digest)


def _tokenized(rows: Rows, encode, settings, data, say) -> tuple:
    """TOKENS of the rows, from the cache if they were made before, and the numbers of good rows.
    Says why others are left out."""
    try:
        table = datasets.Dataset.from_generator(
            partial(encode, rows),
            features=TOKENS,
            cache_dir=os.path.expanduser(data.cache_dir),
            fingerprint=datasets.fingerprint.Hasher.hash((2, rows.digest, *settings)),
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            raise error.__cause__ from None  # our own sentence, or the system's
        raise
    bad = table.data.column("bad").to_pylist()
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
    return table, good


def _tokenizer_digest(tokenizer) -> str:
    """Hex digest of a tokenizer: vocabulary, merges, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    parts = body, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)
    return datasets.fingerprint.Hasher.hash(parts)
