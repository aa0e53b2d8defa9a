"""From flags to the tokenizer and the datasets that Trainer takes."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hfpatch.budget.shape import ModelShape
from hfpatch.trainer import chat, data_files, dataset, packing, sources, tokenizer
from hfpatch.trainer.loading import loads
from hfpatch.trainer.stream import StreamDataset
from hfpatch.trainer.tokens import fingerprint_of, samples_of, tokenize


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again, and the digest of their content.

    samples: of files whose names alone make the fingerprint, a digest each (tokens.samples_of).
    """

    rows: object  # () -> iterator of sources.Row and sources.Malformed
    fingerprint: str
    samples: dict[str, str] = field(default_factory=dict)


def source(paths, data, *, split: str | None = None, digest: bool = True, say=print) -> Source:
    """The rows of `paths`: local files and folders, or one hub data set.

    Args:
        paths: of --data or --eval_data.
        data: the DataArguments.
        split: in place of --data_split.
        digest: read the files for their fingerprint. Without it (streaming) their names make the
            fingerprint, and Source.samples has a digest of samples of each file.
        say: as in data_files.find().

    Raises:
        ValueError: nothing can be read there, or a flag does not go with it.
    """
    hub = len(paths) == 1 and not Path(paths[0]).exists() and _hub_like(paths[0])
    chooses = paths == data.data and (data.data_glob or data.data_exclude)
    if chooses and (hub or all(Path(path).is_file() for path in paths)):
        flag = "--data_glob" if data.data_glob else "--data_exclude"
        raise ValueError(
            f"hfpatch: {flag} chooses in a folder, {paths[0]} is none; name the folder, or drop "
            "the flag."
        )
    if hub:
        return _hub(paths[0], data, split or data.data_split)
    form = data.data_format
    try:
        files = data_files.find(
            paths, pattern=data.data_glob, exclude=data.data_exclude, form=form, say=say
        )
        print_of = fingerprint_of(files) if digest else repr([str(f) for f in files])
        samples = {} if digest else samples_of(files)
    except OSError as error:
        raise ValueError(
            f"hfpatch: cannot read {error.filename} ({error.strerror}); check --data."
        ) from error
    asked = {"--eval_split": split}
    if paths == data.data:
        asked |= {"--data_config": data.data_config, "--data_split": data.data_split != "train"}
    flag = next((flag for flag, value in asked.items() if value), None)
    if flag and not any(file.is_dir() for file in files):
        raise ValueError(
            f"hfpatch: {flag} chooses in a hub data set, files came ({files[0]}); name the files "
            "you mean."
        )
    split = split or data.data_split

    def rows():
        return sources.rows(
            files, text_field=data.text_field, text_unit=data.text_unit, form=form, split=split
        )

    return Source(rows, f"{print_of}-{data.text_unit}-{form}-{split}", samples)


def _hub_like(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and not Path(name).suffix


def _hub(name: str, data, split: str) -> Source:
    import datasets

    try:
        table = datasets.load_dataset(name, data.data_config, split=split, streaming=data.streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"hfpatch: {name!r} is no file or folder here, and as a hub data set it does not load "
            f"({reason}); check --data."
        ) from error

    return Source(
        lambda: sources.table_rows(table, name),
        getattr(table, "_fingerprint", None) or f"{name}-{data.data_config}-{split}",
    )


def load_tokenizer(model, data, train: Source):
    """The tokenizer of the run, with its chat template. Raises ValueError."""
    if model.train_tokenizer:
        made = tokenizer.train(_texts(data, train), model.train_tokenizer)
    else:
        name = model.tokenizer or model.model
        with loads("no tokenizer loads", name, "; check it"):
            made = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    if data.chat_template:
        made.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    return made


def _texts(data, train: Source):
    for row in train.rows():
        if isinstance(row, sources.Row):
            try:
                yield from chat.strings(row.value, kind=data.kind, text_field=data.text_field)
            except chat.BadRow:  # reported when the row is tokenized
                continue


def chat_template(tokenizer, data, train: Source) -> chat.Template:
    """The template to train chat rows with; the first row decides whether the data are a chat.

    Raises ValueError if they are and there is no template: each row would be malformed.
    """
    rows = (row.value for row in train.rows() if isinstance(row, sources.Row))
    if not chat.is_chat(next(rows, {}), data.kind):
        return chat.OWN
    if not tokenizer.chat_template:
        raise ValueError(
            "hfpatch: the data are chat messages and the tokenizer has no template; give "
            "--chat_template FILE."
        )
    return chat.training_template(tokenizer)


def fit_vocabulary(config, tokenizer, *, fresh: bool) -> None:
    """A fresh model takes the size of its tokenizer; any other must hold the tokenizer's tokens.

    Special tokens may lie beyond the model's vocabulary, as image tokens of some text models do;
    rows that hold one are malformed (tokens.encoded). Raises ValueError.
    """
    vocabulary = tokenizer.get_vocab()
    if fresh:
        # len(tokenizer) would be too small if its numbers have gaps.
        config.vocab_size = max(vocabulary.values()) + 1
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    size = config.get_text_config().vocab_size
    beyond = [
        (number, token)
        for token, number in vocabulary.items()
        if number >= size and number not in special
    ]
    if beyond:
        number, token = min(beyond)
        raise ValueError(
            f"hfpatch: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size} "
            f"({token!r} is number {number}, counted from 0); use its own tokenizer, or resize "
            "the embeddings first."
        )


def pad_id(config, tokenizer) -> int:
    """The token of padding: any of the model's, as none attends to it and no label is it."""
    size = config.get_text_config().vocab_size
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in ids if number is not None and number < size)


@dataclass(frozen=True)
class Datasets:
    """The datasets of Trainer, and facts for the log."""

    train: torch.utils.data.Dataset
    evaluation: dataset.RowDataset | None
    summaries: tuple[str, ...]
    bytes_per_token: float
    attention_share: float
    fingerprint: str
    samples: dict[str, str]


def _windows(config) -> dict[int, int]:
    """How many layers of the model see how many tokens (0: all), as far as a closed form knows."""
    try:
        return ModelShape.from_config(config.get_text_config()).window_counts()
    except ValueError:
        return packing.FULL


def load_data(model, data, args, config, *, say) -> tuple:
    """The tokenizer and the datasets of the run. One process of a machine tokenizes, others wait.

    The config's vocabulary takes the size of a tokenizer that is trained here. Raises ValueError.
    """
    train = source(data.data, data, digest=not data.streaming, say=say)
    with args.main_process_first(desc="tokenizing"):
        made = load_tokenizer(model, data, train)
        fit_vocabulary(config, made, fresh=bool(model.train_tokenizer))
        seed = args.seed if args.data_seed is None else args.data_seed
        found = load_datasets(data, train, made, config, seed=seed, say=say)
    for line in found.summaries:
        say(f"hfpatch: {line}")
    return made, found


def load_datasets(data, train: Source, tokenizer, config, *, seed: int, say) -> Datasets:
    """Tokenizes (or finds in the cache), splits, cuts and packs the data. Raises ValueError."""
    template = chat_template(tokenizer, data, train)
    cut = {"seq_len": data.seq_len, "packed": data.packing, "long_rows": data.long_rows}
    cut["pad_id"] = pad_id(config, tokenizer)
    read = {"kind": data.kind, "text_field": data.text_field, "template": template}
    read |= {"vocab_size": config.get_text_config().vocab_size, "strict": data.strict, "say": say}

    def tokens_of(one: Source):
        cache = Path(data.cache_dir).expanduser()
        return tokenize(one.rows(), tokenizer, fingerprint=one.fingerprint, cache_dir=cache, **read)

    summaries, held, chosen = [], None, None
    if template.text is not None:
        summaries.append("chat: TRL's training template, whose markers show the assistant's turns")
    if data.eval_data:
        held = tokens_of(_eval_source(data, train, say))
        chosen = range(len(held))
    if data.streaming:
        made = StreamDataset(
            train.rows, tokenizer, shuffle=data.shuffle_buffer, seed=seed, **cut, **read
        )
        share, digest = made.check(_windows(config)), train.fingerprint
        summaries.append("train: rows are read while training; what is left out is said at the end")
    else:
        tokens = tokens_of(train)
        kept = range(len(tokens))
        if data.validation_split:
            held = tokens
            kept, chosen = _split(tokens, data.validation_split, seed)
        prepared = dataset.prepare(tokens, kept, windows=_windows(config), **cut)
        summaries.append(prepared.summary)
        made, share, digest = prepared.dataset, prepared.attention_share, tokens.fingerprint
    evaluation, bytes_per_token = None, 0.0
    if held is not None:
        prepared = dataset.prepare(held, chosen, name="validation", **cut)
        summaries.append(prepared.summary)
        evaluation, bytes_per_token = prepared.dataset, prepared.bytes_per_token
    return Datasets(
        made, evaluation, tuple(summaries), bytes_per_token, share, digest, train.samples
    )


def _eval_source(data, train: Source, say) -> Source:
    found = source(data.eval_data, data, split=data.eval_split, say=say)
    if found.fingerprint == train.fingerprint:
        raise ValueError(
            "hfpatch: --eval_data are the training data; name others, or a split with --eval_split."
        )
    return found


def _split(tokens, share: float, seed: int):
    if len(tokens) < 2:
        raise ValueError(
            "hfpatch: --validation_split needs two documents or more, one came; give --eval_data."
        )
    return dataset.split(len(tokens), share, seed)
