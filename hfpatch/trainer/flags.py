"""The flags of `hfpatch train`, on top of transformers' TrainingArguments."""

import importlib.util
import os
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from hfpatch.budget.policy import CHECKPOINTING
from hfpatch.lab.presets import PRESETS
from hfpatch.planner.placements import PLACEMENTS
from hfpatch.trainer.run_file import SPELLINGS


def _flag(default, help, *, also: str = "", **more):
    """A flag with its help. also: the name under which SPELLINGS has its other spellings."""
    others = SPELLINGS.get(also, ())
    more["aliases"] = [f"--{name.replace('_', sep)}" for name in others for sep in "_-"]
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class ModelArguments:
    """The model, its origin, and changes to it."""

    model: str | None = _flag(
        None,
        "A folder with config.json and safetensors, or a hub id; or, with random weights, a "
        "preset: " + ", ".join(PRESETS),
    )
    config_overrides: str | None = _flag(
        None, "With a preset: changes to its config, such as hidden_size=128,num_hidden_layers=4."
    )
    max_position_embeddings: int | None = _flag(
        None, "Positions of the model, if more than its config says."
    )
    rope_scaling: dict | str | None = _flag(
        None,
        'Rotary scaling as JSON, {"rope_type": "yarn", "factor": 4.0}; saved in config.json (not '
        "by adapters).",
    )
    tokenizer: str | None = _flag(
        None, "Folder or hub id of the tokenizer; --model's own by default."
    )
    train_tokenizer: int | None = _flag(
        None, "Train a byte-level BPE of this size on the training text and use it."
    )
    impl: str = _flag(
        "hfpatch",
        "Whose layers compute the model: stock (hf), Liger's or hfpatch's.",
        choices=["hf", "liger", "hfpatch"],
    )
    checkpointing: list[str] = field(
        default_factory=list,
        metadata={"help": CHECKPOINTING, "action": "extend", "metavar": "auto|least|off|..."},
    )
    placement: str | None = _flag(
        None,
        f"Where weights and optimizer states live: auto, {', '.join(PLACEMENTS)}, or the JSON file "
        "of an engine.",
        also="placement",
    )
    sp_size: int = _flag(1, "With --placement zero3 or fsdp2: GPUs that share each sequence.")
    nvme_path: str | None = _flag(
        None, "With --placement zero3_nvme_offload: a folder on a local disk."
    )
    dtype: str = _flag("auto", "Type of the weights; auto: the checkpoint's, float32 for a preset.",
                       choices=["auto", "float32", "bfloat16"])  # fmt: skip
    fp8: str | None = _flag(
        None,
        "The layers' products in torchao's float8, scaled by rows; emulated where a device has "
        "none.",
        choices=["rowwise", "rowwise_with_gw_hp"],
        nargs="?",
        const="rowwise",
    )
    attn_implementation: str = _flag(
        "sdpa", "Attention of transformers.", choices=["sdpa", "eager", "flash_attention_2"]
    )
    lora_r: int = _flag(0, "Rank of LoRA adapters over a frozen base; 0 trains all weights.")
    lora_alpha: float = _flag(0.0, "LoRA's alpha; 0 takes twice the rank.")
    lora_dropout: float = _flag(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={
            "help": "Layers that get adapters; all-linear is every linear layer but the head."
        },
    )
    load_in_4bit: bool = _flag(
        False, "With --lora_r: the base's linear layers in 4 bits (bitsandbytes)."
    )
    load_in_8bit: bool = _flag(
        False, "With --lora_r: the base's linear layers in 8 bits (bitsandbytes)."
    )
    bnb_4bit_quant_type: str = _flag("nf4", "Type of the 4 bits.", choices=["nf4", "fp4"])
    use_bnb_nested_quant: bool = _flag(True, "Quantise the scales of the 4 bits too.")
    trust_remote_code: bool = _flag(False, "Run code that comes with the model.")
    allow_pickle: bool = _flag(
        False, "Load .bin weights, which can run code, where there is no safetensors file."
    )

    @property
    def preset(self) -> str | None:
        """The preset that --model names, whose weights are random; None of a folder or a hub id."""
        return self.model if self.model in PRESETS and not os.path.isdir(self.model) else None


@dataclass(frozen=True)
class DataArguments:
    """The data, and how they become rows of tokens."""

    data: list[str] = field(
        default_factory=list, metadata={"help": "Files, folders, or one hub data set."}
    )
    eval_data: list[str] = field(
        default_factory=list,
        metadata={"help": ("Files, folders, or one hub data set, held out for evaluation.")},
    )
    validation_split: float = _flag(
        0.0, "Share of the documents of --data held out for evaluation."
    )
    data_glob: str | None = _flag(None, 'Files taken from a folder, such as "**/*.py".')
    data_exclude: list[str] = field(
        default_factory=list, metadata={"help": "Names of folders inside it to leave out."}
    )
    data_config: str | None = _flag(None, "Configuration of the hub data set.")
    data_split: str = _flag(
        "train", "Split of the hub data set, or of a folder that save_to_disk wrote."
    )
    eval_split: str | None = _flag(None, "The split of --eval_data; --data_split by default.")
    kind: str = _flag(
        "auto",
        "What a row of the data holds; auto looks at its columns.",
        choices=["auto", "text", "prompt", "chat"],
    )
    text_field: str = _flag("text", "Column of plain text.", also="text_field")
    text_unit: str = _flag(
        "file", "A document of a text file.", choices=["file", "line", "paragraph"]
    )
    chat_template: str | None = _flag(
        None,
        "File with a jinja template, for a tokenizer that has none.",
        also="chat_template",
    )
    seq_len: int = _flag(1024, "Tokens a row.", also="seq_len")
    packing: bool = _flag(False, "Fill sequences with several documents; none attends to another.")
    long_rows: str = _flag(
        "split", "Documents longer than a sequence.", choices=["split", "truncate", "drop"]
    )
    pad_multiple: int = _flag(
        1,
        "Without --packing: pad batches to a multiple of this.",
        also="pad_multiple",
    )
    streaming: bool = _flag(
        False, "Read rows while training, for data larger than the disk; needs --max_steps."
    )
    shuffle_buffer: int = _flag(10_000, "With --streaming: rows among which the next is drawn.")
    cache_dir: str = _flag(
        "~/.cache/hfpatch/data", "Where read and tokenized data is kept, named by its content."
    )
    strict: bool = _flag(False, "Stop at the first malformed row instead of counting it.")
    allow_malformed: bool = _flag(
        False, "Train also where more than a tenth of the rows are malformed."
    )
    show_batch: int = _flag(
        0, "Print this many rows of the first batch, coloured by label, and stop."
    )


# Defaults of hfpatch train that differ from transformers'.
DEFAULTS = {
    "output_dir": "runs/train",
    "logging_steps": 10.0,
    "lr_scheduler_type": "cosine",
    "logging_nan_inf_filter": False,  # it would log 0 for losses that are not finite
    "report_to": "tensorboard" if importlib.util.find_spec("tensorboard") else "none",
}


@dataclass
class TrainArguments(TrainingArguments):
    """transformers' TrainingArguments, with early stopping, a time limit and a stop at NaN."""

    early_stopping_patience: int = _flag(
        0, "Stop after this many evaluations without improvement; 0 never stops."
    )
    early_stopping_delta: float = _flag(
        0.0, "What counts as improvement of --metric_for_best_model."
    )
    time_limit: float = _flag(0.0, "Stop after this many minutes of training; 0 never stops.")
    nan_steps: int = _flag(
        3, "Stop after this many steps in a row whose loss is not finite; 0 never stops."
    )

    def __post_init__(self):
        if self.early_stopping_patience:
            self.metric_for_best_model = self.metric_for_best_model or "loss"
            # Else each resume would start with full patience.
            self.restore_callback_states_from_checkpoint = True
        # torch warns about pinned memory without a GPU.
        self.dataloader_pin_memory = (
            self.dataloader_pin_memory and torch.cuda.is_available() and not self.use_cpu
        )
        super().__post_init__()

    @property
    def has_engine(self) -> bool:
        """Whether DeepSpeed or FSDP runs, by these flags or by those of `accelerate launch`."""
        launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        return bool(self.deepspeed_plugin or self.fsdp or launched)

    def __getstate__(self):
        # Trainer saves these beside each model, and a token is a secret.
        return vars(self) | {"hub_token": None}


# Flags that take a number of tokens, such as 8192 or 128k.
LENGTHS = ("seq_len", "pad_multiple", "max_position_embeddings")
CLASSES = (ModelArguments, DataArguments, TrainArguments)
# Flags that have a meaning only beside another flag -> that flag.
COMPANIONS = {
    "lora_alpha": "lora_r", "lora_dropout": "lora_r", "lora_target_modules": "lora_r",
    "bnb_4bit_quant_type": "load_in_4bit", "use_bnb_nested_quant": "load_in_4bit",
    "shuffle_buffer": "streaming", "eval_split": "eval_data",
    "early_stopping_delta": "early_stopping_patience",
    "dataloader_persistent_workers": "dataloader_num_workers",
}  # fmt: skip
