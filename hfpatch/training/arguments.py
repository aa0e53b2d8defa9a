"""The flags of `hfpatch train`, on top of transformers' TrainingArguments, and how they are read."""

import importlib.util
import math
import os
import traceback
import typing
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
from transformers import HfArgumentParser, TrainingArguments

from hfpatch.memory.limits import flag, parse_length, parse_word
from hfpatch.memory.policy import Checkpointing
from hfpatch.memory.presets import PRESETS
from hfpatch.training import config_file, configs
from hfpatch.training.placement import single_process_environment
from hfpatch.training.sources import FORMATS


def _flag(default, help, **more):
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class ModelArguments:
    """Which model, from where, and what is done to it."""

    model: str | None = _flag(None, "A folder with config.json and safetensors, or a hub id.")
    preset: str | None = _flag(None, "Instead of --model: a Llama by name with random weights.", choices=list(PRESETS))
    config_overrides: str | None = _flag(
        None, "With --preset: changes to its config, as hidden_size=128,vocab_size=512."
    )
    max_position_embeddings: int | None = _flag(None, "Positions of the model, where more than its config says.")
    rope_scaling: dict | str | None = _flag(
        None, 'Rotary scaling as JSON, {"rope_type": "yarn", "factor": 4.0}; saved in config.json (not by adapters).'
    )
    rope_float64: bool = _flag(False, "Rotary angles in float64, worth it above 128k tokens.")
    tokenizer: str | None = _flag(None, "Folder or hub id of the tokenizer; --model's own by default.")
    train_tokenizer: int | None = _flag(None, "Train a byte-level BPE of this size on the training text and use it.")
    impl: str = _flag("hfpatch", "Whose layers compute the model.", choices=["hf", "liger", "hfpatch"])
    checkpointing: str = _flag("auto", "hfpatch's tiled, offloaded checkpointing.", choices=["auto", "off"])
    offload: str = _flag("auto", "Where layer inputs wait for backward: auto, gpu, host, or a folder on a fast disk.")
    checkpoint_every: str = _flag("auto", "Keep the input of every k-th layer: auto or k.")
    tile: str = _flag("auto", "Tokens a tile: auto or a number.")
    placement: str | None = _flag(
        None, "Full fine-tuning on one GPU without host optimizer states: auto, gpu8bit, gpu8bit-fused, zero3-offload."
    )
    engine: str | None = _flag(None, "A file or a name from ds_configs/ or fsdp_configs/, such as zero3_cpu_offload.")
    sp_size: int = _flag(1, "With --engine zero3 or fsdp2: GPUs that share each sequence.")
    nvme_path: str | None = _flag(None, "With --engine zero3_nvme_offload: a folder on a local disk.")
    dtype: str = _flag("auto", "Type of the weights; auto is the checkpoint's, float32 for --preset.",
                       choices=["auto", "float32", "bfloat16"])  # fmt: skip
    attn_implementation: str = _flag(
        "sdpa", "Attention of transformers.", choices=["sdpa", "eager", "flash_attention_2"]
    )
    lora_r: int = _flag(0, "Rank of LoRA adapters over a frozen base; 0 trains all weights.")
    lora_alpha: float = _flag(0.0, "LoRA's alpha; 0 takes twice the rank.")
    lora_dropout: float = _flag(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the layers that get adapters; all-linear is every linear layer but the head."},
    )
    load_in_4bit: bool = _flag(False, "With --lora_r: the base's linear layers in 4 bits (bitsandbytes).")
    load_in_8bit: bool = _flag(False, "With --lora_r: the base's linear layers in 8 bits (bitsandbytes).")
    bnb_4bit_quant_type: str = _flag("nf4", "Type of the 4 bits.", choices=["nf4", "fp4"])
    use_bnb_nested_quant: bool = _flag(True, "Quantise the scales of the 4 bits too.")
    trust_remote_code: bool = _flag(False, "Run code that comes with the model.")
    allow_pickle: bool = _flag(False, "Load .bin weights, which can run code, where there is no safetensors file.")


@dataclass(frozen=True)
class DataArguments:
    """Which data, and how it becomes rows of tokens."""

    data: list[str] = field(default_factory=list, metadata={"help": "Files, folders, or one hub data set."})
    eval_data: list[str] = field(default_factory=list, metadata={"help": "The same, held out for evaluation."})
    validation_split: float = _flag(0.0, "Share of the documents of --data held out for evaluation.")
    data_glob: str | None = _flag(None, 'Files taken from a folder, such as "**/*.py".')
    data_format: str = _flag("auto", "What the files of --data are; auto goes by their names.", choices=list(FORMATS))
    data_exclude: list[str] = field(default_factory=list, metadata={"help": "Names of folders inside it to leave out."})
    data_config: str | None = _flag(None, "Configuration of the hub data set.")
    data_split: str = _flag("train", "Split of the hub data set, or of a folder that save_to_disk wrote.")
    eval_split: str | None = _flag(None, "The split of --eval_data; --data_split by default.")
    kind: str = _flag("auto", "What a row holds; auto asks its columns.", choices=["auto", "text", "prompt", "chat"])
    text_field: str = _flag("text", "Column of plain text.")
    text_unit: str = _flag("file", "A document of a text file.", choices=["file", "line", "paragraph"])
    chat_template: str | None = _flag(None, "File with a jinja template, for a tokenizer that has none.")
    seq_length: int = _flag(1024, "Tokens a row.")
    packing: bool = _flag(False, "Fill rows with several documents; none attends to another.")
    long_rows: str = _flag("truncate", "Documents longer than a row.", choices=["truncate", "split", "drop"])
    truncation_side: str = _flag("right", "The side that truncation drops.", choices=["right", "left"])
    pad_multiple: int = _flag(1, "Without --packing: pad batches to a multiple of this.")
    streaming: bool = _flag(False, "Read rows while training, for data larger than the disk; needs --max_steps.")
    shuffle_buffer: int = _flag(10_000, "With --streaming: rows among which the next is drawn.")
    cache_dir: str = _flag("~/.cache/hfpatch/tokens", "Where tokenized data is kept, named by its content.")
    strict: bool = _flag(False, "Stop at the first malformed row instead of counting it.")
    show_batch: int = _flag(0, "Print this many rows of the first batch, coloured by label, and stop.")


@dataclass
class TrainArguments(TrainingArguments):
    """transformers' TrainingArguments and what they lack: a floor and restarts, early stopping, a time limit."""

    output_dir: str = _flag("runs/train", "Where checkpoints and the model go.")
    logging_steps: float = _flag(10, "Steps between log lines.")
    lr_scheduler_type: str = _flag("cosine", "transformers' schedules; cosine takes --lr_floor and --lr_restarts.")
    lr_floor: float = _flag(0.0, "The cosine ends at this share of --learning_rate.")
    lr_restarts: int = _flag(0, "How many times the cosine starts again.")
    early_stopping_patience: int = _flag(0, "Stop after this many evaluations without improvement; 0 never stops.")
    early_stopping_delta: float = _flag(0.0, "What counts as improvement of --metric_for_best_model.")
    time_limit: float = _flag(0.0, "Stop after this many minutes of training; 0 never stops.")
    eval_positions: int = _flag(
        1024, "Evaluation reports the loss by position, in buckets of this many tokens that double; 0 does not."
    )
    nan_steps: int = _flag(3, "Stop after this many steps in a row whose loss is not finite; 0 never stops.")
    logging_nan_inf_filter: bool = _flag(False, "Leave losses that are not finite out of what is logged.")
    report_to: str = _flag(
        "tensorboard" if importlib.util.find_spec("tensorboard") else "none", "tensorboard, wandb, none, ..."
    )

    def __post_init__(self):
        if self.early_stopping_patience:
            self.metric_for_best_model = self.metric_for_best_model or "loss"
            # Without this the patience would start anew at each resume.
            self.restore_callback_states_from_checkpoint = True
        # torch warns where there is nothing to pin memory for.
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available() and not self.use_cpu
        super().__post_init__()

    def __getstate__(self):
        return vars(self) | {"hub_token": None}  # torch.save writes these beside each model: a token is a secret


# Flags that take tokens, as 8192 or 128k.
LENGTHS = {
    "seq_length": parse_length, "pad_multiple": parse_length, "max_position_embeddings": parse_length,
    "tile": lambda text: str(parse_word(text)),
}  # fmt: skip
CLASSES = (ModelArguments, DataArguments, TrainArguments)
# Flags that say more of what another one asks for, and that one.
COMPANIONS = {
    "lora_alpha": "lora_r", "lora_dropout": "lora_r", "lora_target_modules": "lora_r",
    "bnb_4bit_quant_type": "load_in_4bit", "use_bnb_nested_quant": "load_in_4bit",
    "shuffle_buffer": "streaming", "eval_split": "eval_data", "early_stopping_delta": "early_stopping_patience",
}  # fmt: skip


def parse(argv) -> tuple[ModelArguments, DataArguments, TrainArguments]:
    """Reads `[config.yaml|config.json] [--flag value ...]`; a flag wins over the file.

    Raises ValueError for an unknown flag or key, a file that cannot be read, or values that contradict each other.
    """
    argv = list(argv)
    parser = HfArgumentParser(
        CLASSES, prog=config_file.typed(), allow_abbrev=False, description="Train a causal language model."
    )
    actions = {action.dest: action for action in reversed(parser._actions)}  # --x rather than --no_x
    namespace, explicit = None, set()
    _take_lengths(parser)
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
        from_file = config_file.flags(name, actions, _mappings())
        parser.error = partial(_refuse, where=f"{name}: ")
        namespace, explicit = parser.parse_args([word for words in from_file.values() for word in words]), {*from_file}
    parser.error = _refuse
    namespace, rest = parser.parse_known_args(argv, namespace)
    if rest:
        raise ValueError(f"hfpatch: unknown flag {rest[0]!r}{config_file.nearest(rest[0].lstrip('-'), actions)}.")
    explicit |= {arg[2:].split("=")[0].replace("-", "_") for arg in argv if arg.startswith("--")}
    values = {name: _expanded(value) for name, value in vars(namespace).items()}
    for name, wanted in COMPANIONS.items():
        if values[name] != actions[name].default and not values[wanted]:
            raise ValueError(
                f"hfpatch: --{name} goes with --{wanted}, which did not come; add it, or leave --{name} out."
            )
    model, data = (_make(cls, values) for cls in (ModelArguments, DataArguments))
    model = _place(model, values, explicit)
    config = _use_engine(values, explicit)
    if model.sp_size > 1:
        data = _share_rows(model, data, values, config)
    with refusals((ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        return model, data, _make(TrainArguments, values)


@contextmanager
def refusals(kinds=(ImportError, LookupError, TypeError, ValueError)):
    """Within, what transformers raises of flags that it does not take is a ValueError with a sentence."""
    try:
        yield
    except kinds as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
        if isinstance(error, ModuleNotFoundError) or text.startswith("hfpatch: ") or _passed_through_us(error):
            raise
        kind = (
            "" if isinstance(error, ValueError) else f"transformers does not take these flags, {type(error).__name__}: "
        )
        raise ValueError(f"hfpatch: {kind}{(text.splitlines() or [''])[0]}") from error


def _passed_through_us(error: BaseException) -> bool:
    """Whether hfpatch's own code called what raised, as where Trainer's callback applies it: no flag is to blame for a bug."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("hfpatch.") and not name.startswith("hfpatch.training.") for name in names)


def _take_lengths(parser) -> None:
    for action in parser._actions:
        if action.dest in LENGTHS:
            action.type = flag(LENGTHS[action.dest])


def _make(cls, values: dict):
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.init and f.name in values})


def _place(model: ModelArguments, values: dict, explicit: set[str]) -> ModelArguments:
    """--placement becomes what TrainingArguments take, "auto" the one that fits. Raises ValueError."""
    if not model.placement:
        return model
    if model.engine:
        raise ValueError("hfpatch: expected one of --placement and --engine, both came; keep one.")
    from hfpatch.training import placement

    name = model.placement
    if name == "auto":  # of adapters, gradients and moments are small: the base decides, which nothing here moves
        name = "gpu8bit" if model.lora_r else _fitting(model, values, explicit)
    values.update(placement.training_arguments(name, flags={key: values[key] for key in explicit if key in values}))
    bf16 = placement.get(name).bf16_weights and model.dtype == "auto"
    return replace(model, placement=name, dtype="bfloat16" if bf16 else model.dtype)


def _fitting(model: ModelArguments, values: dict, explicit: set[str]) -> str:
    from hfpatch.memory.free import gpu_free, host_free
    from hfpatch.training import placement
    from hfpatch.training.prepare import load_config

    gpu = gpu_free()
    if gpu is None:
        raise ValueError("hfpatch: --placement auto looks at a GPU's memory, no GPU came; name a placement.")
    # Fused steps in backward know neither accumulation nor a global norm; who asked for one of them does without.
    fused = not ({"max_grad_norm", "gradient_accumulation_steps"} & explicit)
    sizes = {"seq_len": values["seq_length"], "batch": values["per_device_train_batch_size"]}
    return placement.fitting(load_config(model), gpu_free=gpu, host_free=host_free(), fused=fused, **sizes)


def _share_rows(model: ModelArguments, data: DataArguments, values: dict, config) -> DataArguments:
    """--sp_size becomes what TrainingArguments take; rows are padded to go evenly over the ranks. Raises ValueError."""
    from hfpatch.training.sequence import parallelism

    # transformers leaves it out under Ulysses, and under context parallelism shifts labels within a part.
    if values.get("label_smoothing_factor"):
        raise ValueError(
            f"hfpatch: --label_smoothing_factor needs whole rows, --sp_size {model.sp_size} came too; leave one of them out."
        )
    engine, engine_values = (config.engine, config.values) if config else (None, {})
    values["parallelism_config"] = parallelism(
        engine, engine_values, size=model.sp_size, attention=model.attn_implementation
    )
    values["eval_positions"] = 0  # a rank sees a part of each row
    chunks = model.sp_size if engine == "deepspeed" else 2 * model.sp_size  # FSDP2's ranks have two chunks each
    return replace(data, pad_multiple=math.lcm(data.pad_multiple, chunks))


def _use_engine(values: dict, explicit: set[str]):
    """--engine (or --deepspeed FILE) becomes what TrainingArguments take, checked against the flags; ValueError.

    Returns the engine's config (configs.EngineConfig), None where none is asked for.
    """
    name = values["engine"]
    if isinstance(values["fsdp_config"], str) and values["fsdp_config"].endswith(".json"):
        configs.load(values["fsdp_config"])
    if isinstance(values["deepspeed"], str):
        if name:
            raise ValueError("hfpatch: expected one of --engine and --deepspeed, both came; keep --engine.")
        name, values["deepspeed"] = values["deepspeed"], None
    if not name:
        if values["nvme_path"]:
            raise ValueError("hfpatch: --nvme_path belongs to --engine zero3_nvme_offload, no engine came; add it.")
        return None
    config = configs.load(name, nvme_path=values["nvme_path"])
    values.update(configs.training_arguments(config, flags={key: values[key] for key in explicit if key in values}))
    single_process_environment()
    return config


def checkpointing_of(model: ModelArguments) -> Checkpointing | str:
    """What `hfpatch.apply(checkpointing=...)` takes."""
    if model.checkpointing == "off":
        return "off"
    every, tile = (value if value == "auto" else int(value) for value in (model.checkpoint_every, model.tile))
    return Checkpointing(offload=model.offload, every=every, tile=tile)


def apply_options(model: ModelArguments) -> bool | dict:
    """What `hfpatch.Callback(apply=...)` takes: False unless --impl hfpatch."""
    rope = "float64" if model.rope_float64 else True
    return model.impl == "hfpatch" and {"checkpointing": checkpointing_of(model), "rope": rope}


def _refuse(message, where=""):
    raise ValueError(f"hfpatch: {where}{message}; see {config_file.typed()} --help.")


def _mappings() -> set[str]:
    """The flags that take a mapping: JSON on the command line, keys and values in a file."""
    hints = (typing.get_type_hints(cls) for cls in CLASSES)
    kinds = (
        (name, [typing.get_origin(one) or one for one in typing.get_args(of)]) for h in hints for name, of in h.items()
    )
    return {name for name, of in kinds if dict in of}


def _expanded(value):
    """Paths with the user's folder in place of ~, which no shell expands in a file or behind a `=`."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value
