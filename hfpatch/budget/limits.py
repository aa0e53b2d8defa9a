"""Parsers of flags, and one table of their ranges for all commands and scripts. Standard library
only.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping

# flag: (least, most); None is no limit. A limit in brackets is excluded.
SEED = (0, 2**32 - 1)
# rows of a batch, batches of a step: larger ones would be gathered for hours before any compute
COUNT = (1, 2**20)
RANGES = {
    "batch": COUNT, "per_device_train_batch_size": COUNT, "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT, "gpus": (1, None), "layers": (1, None),
    "steps": (1, None),
    "warmup": (0, None), "tokens": (1, None), "seconds": (0, None), "seed": SEED, "data_seed": SEED,
    "seeds": (1, None), "time_limit": (0, None), "learning_rate": (0, None),
    "weight_decay": (0, None),
    "adam_beta1": (0, [1]), "adam_beta2": (0, [1]), "adam_epsilon": (0, None),
    "max_grad_norm": (0, None),
    "num_train_epochs": ([0], None), "max_steps": (-1, None), "warmup_steps": (0, None),
    "logging_steps": ([0], None),
    "save_steps": ([0], None), "eval_steps": ([0], None), "save_total_limit": (1, None),
    "dataloader_num_workers": (0, None), "early_stopping_patience": (0, None),
    "early_stopping_delta": (0, None),
    "nan_steps": (0, None), "eval_positions": (0, None), "max_position_embeddings": (1, None),
    "lora_r": (0, None), "lora_alpha": (0, None),
    "lora_dropout": (0, [1]), "train_tokenizer": (1, None), "seq_len": (2, None),
    "pad_multiple": (1, None),
    "validation_split": (0, [1]), "shuffle_buffer": (1, None), "show_batch": (0, None),
    "every": (1, None), "sp_size": (1, None), "label_smoothing_factor": (0, 1),
    "neftune_noise_alpha": (0, None),
    "ddp_timeout": (1, None), "ddp_bucket_cap_mb": (1, None), "eval_accumulation_steps": (1, None),
    "eval_delay": (0, None),
    "torch_empty_cache_steps": (1, None), "dataloader_prefetch_factor": (1, None),
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
            if endless or _beyond(number, least, 1) or _beyond(number, most, -1):
                flag = name.replace("_", between)
                raise ValueError(
                    f"hfpatch: expected {_words(least, most)} for --{flag}, {number} came; change "
                    "it."
                )


def environment_number(name: str, default: int, least: int = 0, most: int | None = None) -> int:
    """A whole number from the environment, or the default if it is not set. ValueError for anything
    else.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
    if number is None or number < least or most is not None and number > most:
        raise ValueError(
            f"hfpatch: expected {_words(least, most)} in the environment's {name}, {text!r} came; "
            "correct or unset it."
        )
    return number


def expandable_segments() -> None:
    """Makes torch's allocator grow its segments, unless the user set it otherwise: fixed segments
    fragment at long sequences.

    Call it before the first CUDA allocation.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch's older name of the variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim",
         "vocab_size")  # fmt: skip


# The ranges of a config's numbers, if the config has them.
_NUMBERS = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop",
                     "embd_pdrop"), (0, [1])),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
                    (0, None)),
    "rope_theta": ([0], None), "factor": ([0], None), "sliding_window": (0, None),
}  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")  # one dict, or a dict for each kind of layer


def check_sizes(read) -> None:
    """Raises ValueError for a size of a config that is no whole number above 0, for query heads
    that do not divide evenly over KV heads, and for numbers of a norm, a dropout, a window or RoPE
    out of range.

    read: name -> value, None for a missing one.
    """
    for name in SIZES:
        value = read(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(
                f"hfpatch: {name} must be a whole number of at least 1, {value!r} came; check the "
                "config."
            )
        # a plan of such a model would add up for hours
        if value is not None and value >= (1 << 16 if name == "num_hidden_layers" else 1 << 31):
            raise ValueError(f"hfpatch: {name} is {value}, which no model has; check the config.")
    heads, kv_heads = read("num_attention_heads"), read("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"hfpatch: num_attention_heads must be a multiple of num_key_value_heads, {heads} and "
            f"{kv_heads} came; check the "
            "config."
        )
    _check_numbers(read)


def _check_numbers(read) -> None:
    for name, (least, most) in _NUMBERS.items():
        value = read(name)
        if value is None:
            continue
        number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        if not number or _beyond(value, least, 1) or _beyond(value, most, -1):
            raise ValueError(
                f"hfpatch: {name} must be {_words(least, most)}, {value!r} came; check the config."
            )
    for rope in filter(lambda x: isinstance(x, Mapping), map(read, _ROPE)):
        for values in (rope, *(v for v in rope.values() if isinstance(v, Mapping))):
            _check_numbers(values.get)


def _beyond(number, end, sign: int) -> bool:
    if isinstance(end, list):
        return (number - end[0]) * sign <= 0
    return end is not None and (number - end) * sign < 0


def _words(least, most) -> str:
    words = []
    if least is not None:
        words.append(f"more than {least[0]}" if isinstance(least, list) else f"{least} or more")
    if most is not None:
        words.append(f"less than {most[0]}" if isinstance(most, list) else f"{most} or less")
    return "a number of " + " and ".join(words) if words else "a finite number"


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
    unit = stripped[len(digits) :].strip().upper()
    try:
        value = float(digits) * _UNITS[unit]
    except (KeyError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"hfpatch: a size is written like 256GiB, {text!r} came; use B, KB to TB or KiB to TiB."
        )
    if value < 0:
        raise ValueError(f"hfpatch: a size is positive, {text!r} came; pass the bytes there are.")
    return int(value)


def parse_length(text) -> int:
    """Tokens from "8192", "128k" (131,072) or "1M" (1,048,576). ValueError for anything else."""
    number = str(text).strip().lower().replace("_", "")
    factor = {"k": 1 << 10, "m": 1 << 20}.get(number[-1:], 1)
    digits = number[:-1] if factor > 1 else number
    if not re.fullmatch("[0-9]{1,13}", digits) or not 0 < int(digits) * factor < 1 << 40:
        raise ValueError(
            f"hfpatch: a length is tokens such as 8192, 128k or 1M, {text!r} came; write such a "
            "number."
        )
    return int(digits) * factor


def parse_lengths(text) -> list[int]:
    """Several lengths, with commas: "8k,32768" -> [8192, 32768]. ValueError for anything else."""
    return [parse_length(part) for part in str(text).split(",")]


def parse_word(text: str):
    """auto, another word, true, false, or a number such as 4096 or 4k."""
    # 0 is no length: the field checks whether it allows it
    words = {"true": True, "false": False, "0": 0}
    return (
        words[text.lower()]
        if text.lower() in words
        else parse_length(text)
        if text[:1].isdigit()
        else text
    )


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
