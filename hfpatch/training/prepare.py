"""From flags to the tokenizer, the model and the datasets that Trainer takes."""

import errno
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.activations import ACT2FN

from hfpatch.memory.limits import check_sizes
from hfpatch.memory.presets import preset_config
from hfpatch.memory.shape import ModelShape
from hfpatch.training import chat, context, dataset, packing, placement, sources, tokenizer
from hfpatch.training.tokens import fingerprint_of, tokenize


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again, and the digest of their content."""

    rows: object  # () -> iterator of sources.Row and sources.Malformed
    fingerprint: str


def source(paths, data, *, split: str | None = None, digest: bool = True, say=print) -> Source:
    """Where the rows of `paths` come from: local files and folders, or one hub data set. Raises ValueError.

    split: in place of --data_split. digest: read the files for their fingerprint; without it the names alone make it
    (streaming). say: as in find().
    """
    hub = len(paths) == 1 and not Path(paths[0]).exists() and _hub_like(paths[0])
    chooses = paths == data.data and (data.data_glob or data.data_exclude)
    if chooses and (hub or all(Path(path).is_file() for path in paths)):
        flag = "--data_glob" if data.data_glob else "--data_exclude"
        raise ValueError(f"hfpatch: {flag} chooses in a folder, {paths[0]} is none; name the folder, or drop the flag.")
    if hub:
        return _hub(paths[0], data, split or data.data_split)
    form = data.data_format
    try:
        files = sources.find(paths, pattern=data.data_glob, exclude=data.data_exclude, form=form, say=say)
        print_of = fingerprint_of(files) if digest else repr([str(f) for f in files])
    except OSError as error:
        raise ValueError(f"hfpatch: cannot read {error.filename} ({error.strerror}); check --data.") from error
    asked = {"--eval_split": split}
    if paths == data.data:
        asked |= {"--data_config": data.data_config, "--data_split": data.data_split != "train"}
    flag = next((flag for flag, value in asked.items() if value), None)
    if flag and not any(file.is_dir() for file in files):
        raise ValueError(
            f"hfpatch: {flag} chooses in a hub data set, files came ({files[0]}); name the files you mean."
        )
    split = split or data.data_split

    def rows():
        return sources.rows(files, text_field=data.text_field, text_unit=data.text_unit, form=form, split=split)

    return Source(rows, f"{print_of}-{data.text_unit}-{form}-{split}")


def _hub_like(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and not Path(name).suffix


def _hub(name: str, data, split: str) -> Source:
    import datasets

    try:
        table = datasets.load_dataset(name, data.data_config, split=split, streaming=data.streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"hfpatch: {name!r} is no file or folder here, and as a hub data set it does not load ({reason}); "
            "check --data."
        ) from error

    return Source(
        lambda: sources.table_rows(table, name),
        getattr(table, "_fingerprint", None) or f"{name}-{data.data_config}-{split}",
    )


def load_config(model):
    """The model's config: of a preset with its overrides, or of --model; lengthened as asked. Raises ValueError."""
    with _loading("no model loads", model.preset or model.model):
        if model.preset:
            config = LlamaConfig(**preset_config(model.preset) | _overrides(model.config_overrides))
        else:
            config = AutoConfig.from_pretrained(model.model, trust_remote_code=model.trust_remote_code)
        text = config.get_text_config()
        sizes = {
            name: value for name, value in vars(text).items() if not isinstance(value, list)
        }  # a list: one a layer
        check_sizes(sizes.get)
        positions, dtype = getattr(text, "max_position_embeddings", None), getattr(text, "dtype", None)
        if positions is not None and not (isinstance(positions, int) and positions > 0):
            raise ValueError(f"max_position_embeddings of 1 or more was expected, {positions!r} came")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"a dtype such as bfloat16 was expected, {dtype!r} came")
        activation = getattr(text, "hidden_act", None)
        if activation is not None and activation not in ACT2FN:
            raise ValueError(f"hidden_act of transformers was expected, {activation!r} came")
    return context.lengthened(config, model.max_position_embeddings, model.rope_scaling)


@contextmanager
def _loading(what: str, name: str, hint: str = ""):
    """ValueError with the cause, whatever its class, where what a folder or the hub holds does not load."""
    try:
        yield
    except Exception as error:  # what transformers' classes make of junk has a class of its own each
        of_the_machine = (
            isinstance(error, RuntimeError) and "mismatched" not in str(error) or isinstance(error, MemoryError)
        )
        if of_the_machine or getattr(error, "errno", None) in (errno.ENOSPC, errno.ENOMEM):
            raise
        why = str(error).strip() and _first(error).removeprefix("hfpatch: ")
        why = why if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} {why}".strip()
        raise ValueError(f"hfpatch: {what} from {name!r}: {why or type(error).__name__}{hint}.") from error


def _overrides(text: str | None) -> dict:
    values = {}
    for item in filter(None, (text or "").split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"hfpatch: expected name=value in --config_overrides, {item!r} came.")
        try:
            values[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            values[name.strip()] = value
    unknown = [name for name in values if not hasattr(LlamaConfig(), name)]
    if unknown:
        raise ValueError(f"hfpatch: LlamaConfig has no {unknown[0]!r} for --config_overrides to set; check its name.")
    return values


def load_tokenizer(model, data, train: Source):
    """The tokenizer of the run, with its chat template. Raises ValueError."""
    if model.train_tokenizer:
        made = tokenizer.train(_texts(data, train), model.train_tokenizer)
    else:
        name = model.tokenizer or model.model
        with _loading("no tokenizer loads", name, "; check it"):
            made = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    if data.chat_template:
        made.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    return made


def _texts(data, train: Source):
    for row in train.rows():
        if isinstance(row, sources.Row):
            try:
                yield from chat.strings(row.value, kind=data.kind, text_field=data.text_field)
            except chat.BadRow:  # named when the row is tokenized
                continue


def check_template(tokenizer, data, train: Source) -> None:
    """Chat data needs a template. Raises ValueError before all rows turn out malformed one by one."""
    first = next((row for row in train.rows() if isinstance(row, sources.Row)), None)
    is_chat = data.kind == "chat" or (
        data.kind == "auto" and first is not None and any(name in first.value for name in chat.CHAT_FIELDS)
    )
    if is_chat and not tokenizer.chat_template:
        raise ValueError(
            "hfpatch: the data are chat messages and the tokenizer has no template; give --chat_template FILE."
        )


def fit_vocabulary(config, tokenizer, *, fresh: bool) -> None:
    """A fresh model takes the size of a tokenizer trained for it; any other must hold it. Raises ValueError.

    Special tokens may stand beyond the model's vocabulary, as some text models' image tokens do: the rows that hold
    one are malformed (tokens.encoded).
    """
    vocabulary = tokenizer.get_vocab()
    if fresh:
        config.vocab_size = max(vocabulary.values()) + 1  # more than len(tokenizer) where its numbers have gaps
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    size = config.get_text_config().vocab_size
    beyond = [(number, token) for token, number in vocabulary.items() if number >= size and number not in special]
    if beyond:
        number, token = min(beyond)
        raise ValueError(
            f"hfpatch: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size} ({token!r} is number "
            f"{number}, counted from 0); use its own tokenizer, or resize the embeddings first."
        )


def pad_id(config, tokenizer) -> int:
    """The token that fills rows up: nothing attends to it and no label is it, so any that the model has will do."""
    size = config.get_text_config().vocab_size
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in ids if number is not None and number < size)


def load_model(model, config, seed: int):
    """The model on the CPU, in --dtype, with LoRA where asked for. Raises ValueError."""
    dtype = getattr(torch, model.dtype, "auto")
    options = {"attn_implementation": model.attn_implementation, "dtype": dtype}
    if model.preset:
        options["dtype"] = torch.float32 if dtype == "auto" else dtype
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, **options)
    else:
        hint = "" if model.allow_pickle else " (weights load from safetensors alone unless --allow_pickle)"
        with _loading("no weights load", model.model, hint):
            made = AutoModelForCausalLM.from_pretrained(
                model.model,
                config=config,
                use_safetensors=None if model.allow_pickle else True,
                trust_remote_code=model.trust_remote_code,
                **options,
                **_quantisation(model, config),
            )
    made.config.use_cache = False  # a cache would join packed documents, and nothing reads it in training
    return with_lora(made, model) if model.lora_r else made


def _quantisation(model, config) -> dict:
    """from_pretrained's argument for --load_in_4bit and --load_in_8bit."""
    if not (model.load_in_4bit or model.load_in_8bit):
        return {}
    from transformers import BitsAndBytesConfig

    named = getattr(torch, model.dtype, getattr(config, "dtype", None))
    settings = BitsAndBytesConfig(
        load_in_4bit=model.load_in_4bit,
        load_in_8bit=model.load_in_8bit,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=named or torch.bfloat16,
    )
    return {"quantization_config": settings}


def with_lora(made, model):
    """The model with adapters on --lora_target_modules, its own weights frozen. Adapters are float32, as PEFT makes them; of
    a placement whose optimizer rounds at random, bfloat16."""
    import peft

    from hfpatch.models.lora import prepare_for_lora

    names = list(model.lora_target_modules)
    settings = peft.LoraConfig(
        r=model.lora_r,
        lora_alpha=model.lora_alpha or 2 * model.lora_r,
        lora_dropout=model.lora_dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    try:
        made = prepare_for_lora(peft.get_peft_model(made, settings))
    except ValueError as error:  # no layer of such a name
        raise ValueError(
            f"hfpatch: no adapters on {', '.join(names)}: {_first(error)}; give --lora_target_modules names of "
            "layers with spaces between."
        ) from error
    for parameter in made.parameters():
        if parameter.requires_grad and model.placement and placement.get(model.placement).bf16_weights:
            parameter.data = parameter.data.to(torch.bfloat16)
    return made


def _first(error) -> str:
    """What an error says first; a line that ends in a colon with the one that it announces."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].rstrip(".").endswith(":") and lines[1:]:
        lines[0] += f" {lines[1].strip()}"
    return lines[0].rstrip(".")


@dataclass(frozen=True)
class Datasets:
    """What Trainer gets, and what the log says of it."""

    train: torch.utils.data.Dataset
    evaluation: dataset.RowDataset | None
    summaries: tuple[str, ...]
    bytes_per_token: float
    attention_share: float
    fingerprint: str


def _windows(config) -> dict[int, int]:
    """How many layers of the model see how many tokens (0: all), as far as a closed form knows."""
    try:
        return ModelShape.from_config(config.get_text_config()).window_counts()
    except ValueError:
        return packing.FULL


def load_datasets(data, train: Source, tokenizer, config, *, seed: int, say) -> Datasets:
    """Tokenizes (or finds in the cache), splits, cuts and packs, for the model of this config. Raises ValueError."""
    pad, size = pad_id(config, tokenizer), config.get_text_config().vocab_size
    cut = {"packed": data.packing, "long_rows": data.long_rows, "side": data.truncation_side, "pad_id": pad}
    read = {"kind": data.kind, "text_field": data.text_field, "strict": data.strict, "vocab_size": size, "say": say}
    cache = Path(data.cache_dir).expanduser()
    summaries, evaluation, held = [], None, None
    check_template(tokenizer, data, train)
    if data.eval_data:
        apart = source(data.eval_data, data, split=data.eval_split, say=say)
        if apart.fingerprint == train.fingerprint:
            raise ValueError("hfpatch: --eval_data are the training data; name others, or a split with --eval_split.")
        held = tokenize(apart.rows(), tokenizer, fingerprint=apart.fingerprint, cache_dir=cache, **read)
        chosen = range(len(held))
    if data.streaming:
        stream = dataset.StreamDataset(
            train.rows, tokenizer, seq_length=data.seq_length, shuffle=data.shuffle_buffer, seed=seed, **cut, **read
        )
        share = stream.check(_windows(config))
        summaries.append("train: rows are read while training; what is truncated or left out is counted at the end")
        made, digest = stream, train.fingerprint
    else:
        tokens = tokenize(train.rows(), tokenizer, fingerprint=train.fingerprint, cache_dir=cache, **read)
        kept = range(len(tokens))
        if data.validation_split:
            if len(tokens) < 2:
                raise ValueError("hfpatch: --validation_split needs two documents or more, one came; give --eval_data.")
            kept, chosen = dataset.split(len(tokens), data.validation_split, seed)
            held = tokens
        prepared = dataset.prepare(tokens, kept, seq_length=data.seq_length, windows=_windows(config), **cut)
        summaries.append(prepared.summary)
        made, share, digest = prepared.dataset, prepared.attention_share, tokens.fingerprint
    bytes_per_token = 0.0
    if held is not None:
        prepared = dataset.prepare(held, chosen, seq_length=data.seq_length, name="validation", **cut)
        summaries.append(prepared.summary)
        evaluation, bytes_per_token = prepared.dataset, prepared.bytes_per_token
    return Datasets(made, evaluation, tuple(summaries), bytes_per_token, share, digest)
