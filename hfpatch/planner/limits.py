"""Flags of all commands and scripts: parsers, and one table of ranges. Standard library only."""

import argparse
import math
import re
from collections.abc import Mapping

from hfpatch.budget.limits import beyond, did_you_mean, parse_length, range_words

# flag: (least, most); None is no limit. A limit in brackets is excluded.
SEED = (0, 2**32 - 1)
# rows of a batch, batches of a step: larger ones would be gathered for hours before any compute
COUNT = (1, 2**20)
RANGES = {
    "batch": COUNT, "per_device_train_batch_size": COUNT, "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT, "gpus": (1, 2**16),
    "steps": (1, None),
    "warmup": (0, None), "seconds": (0, None), "seed": SEED, "data_seed": SEED,
    "seeds": (1, None), "time_limit": (0, None), "learning_rate": ([0], None),
    "weight_decay": (0, None),
    "adam_beta1": (0, [1]), "adam_beta2": (0, [1]), "adam_epsilon": (0, None),
    "max_grad_norm": (0, None),
    "num_train_epochs": ([0], None), "max_steps": (-1, None), "warmup_steps": (0, None),
    "logging_steps": ([0], None),
    "save_steps": ([0], None), "eval_steps": ([0], None), "save_total_limit": (1, None),
    "dataloader_num_workers": (0, None), "early_stopping_patience": (0, None),
    "early_stopping_delta": (0, None),
    "nan_steps": (0, None), "max_position_embeddings": (1, None),
    "lora_r": (0, None), "lora_alpha": (0, None),
    "lora_dropout": (0, [1]), "train_tokenizer": (1, None), "seq_len": (2, 1 << 24),
    "pad_multiple": COUNT,
    "validation_split": (0, [1]), "shuffle_buffer": (1, None), "show_batch": (0, None),
    "sp_size": (1, 2**16), "label_smoothing_factor": (0, 1),
    "neftune_noise_alpha": (0, None),
    "ddp_timeout": (1, None), "ddp_bucket_cap_mb": (1, None), "eval_accumulation_steps": (1, None),
    "eval_delay": (0, None),
    "torch_empty_cache_steps": (1, None), "dataloader_prefetch_factor": (1, 1024),
}  # fmt: skip


def check_ranges(values: Mapping, between: str = "-") -> None:
    """Raises ValueError for the first number that its flag does not allow, or that is not finite.

    values: flag -> value. between: the separator in a flag of several words: "-", or "_" in the
    names of training and of transformers.
    """
    for name, value in values.items():
        least, most = RANGES.get(name, (None, None))
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            endless = not math.isfinite(number) or isinstance(number, int) and number >= 1 << 63
            if endless or beyond(number, least, 1) or beyond(number, most, -1):
                raise ValueError(
                    f"hfpatch: --{name.replace('_', between)} must be {range_words(least, most)}, "
                    f"got {number}. Change it."
                )


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


def parse_bytes(text) -> int:
    """Bytes from "256GiB" or "64 GB"; a number that is no text is bytes. ValueError for anything
    else.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool) and 0 <= text < math.inf:
        return int(text)
    stripped = str(text).strip()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    try:
        value = float(digits) * _UNITS[stripped[len(digits) :].strip().upper()]
    except (KeyError, ValueError):
        value = math.nan
    if value < 0:
        raise ValueError(
            f"hfpatch: a size must be more than 0, got {text!r}. Pass the bytes there are."
        )
    if not value < math.inf:
        raise ValueError(
            f"hfpatch: a size must be written like 256GiB, got {text!r}. Use B, KB to TB or KiB to "
            "TiB."
        )
    return int(value)


# argparse's messages -> ours, one after the other.
_FORMS = (
    (r"^argument ([^:/ ]+)(/[^:/ ]+)*: ", r"\1: "),  # a flag's first spelling
    (r"^(\S+): invalid choice: (.*) \(choose from (.*)\)$", r"\1 must be one of \3, got \2"),
    (r"^(\S+): invalid (\w+) value: ", r"\1 must be of type \2, got "),
    (r"^(\S+): expected (.*) argument", r"\1 must have \2 value"),
    (r"^the following arguments are required: (.*)", r"\1 is missing"),
)


def plainly(message: str) -> str:
    """argparse's message in the form of the others, with the choice that is most like the value."""
    for theirs, ours in _FORMS:
        message = re.sub(theirs, ours, message.rstrip("."))
    found = re.search(r"must be one of (.*), got '(.*)'$", message)
    near = did_you_mean(found[2], re.findall(r"[\w.-]+", found[1])) if found else ""
    return f"{message}.{near}"


def parse_lengths(text) -> list[int]:
    """Several lengths, with commas: "8k,32768" -> [8192, 32768]. ValueError for anything else."""
    return [parse_length(part) for part in str(text).split(",")]


def flag(parse):
    """A parser of a flag's text for add_argument(type=...). It keeps the message of a ValueError,
    which argparse would drop.
    """

    def read(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("hfpatch: ")) from error

    return read
