"""Numbers from the environment and from configs, and lengths as text. Standard library only."""

import difflib
import math
import os
import re
from collections.abc import Mapping


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
            f"hfpatch: {name} in the environment must be {range_words(least, most)}, got {text!r}. "
            "Correct or unset it."
        )
    return number


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
                f"hfpatch: {name} must be a whole number of at least 1, got {value!r}. Check the "
                "config."
            )
        # a plan of such a model would add up for hours
        if value is not None and value >= (1 << 16 if name == "num_hidden_layers" else 1 << 31):
            raise ValueError(f"hfpatch: {name} is {value}, which no model has. Check the config.")
    heads, kv_heads = read("num_attention_heads"), read("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"hfpatch: num_attention_heads must be a multiple of num_key_value_heads, got {heads} "
            f"and {kv_heads}. Check the config."
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
        if not number or beyond(value, least, 1) or beyond(value, most, -1):
            raise ValueError(
                f"hfpatch: {name} must be {range_words(least, most)}, got {value!r}. Check the "
                "config."
            )
    for rope in filter(lambda x: isinstance(x, Mapping), map(read, _ROPE)):
        for values in (rope, *(v for v in rope.values() if isinstance(v, Mapping))):
            _check_numbers(values.get)


def beyond(number, end, sign: int) -> bool:
    if isinstance(end, list):
        return (number - end[0]) * sign <= 0
    return end is not None and (number - end) * sign < 0


def range_words(least, most) -> str:
    words = []
    if least is not None:
        words.append(f"more than {least[0]}" if isinstance(least, list) else f"{least} or more")
    if most is not None:
        words.append(f"less than {most[0]}" if isinstance(most, list) else f"{most} or less")
    return " and ".join(words) if words else "a finite number"


def parse_length(text) -> int:
    """Tokens from "8192", "131,072", "128k" (131,072) or "1M" (1,048,576). ValueError for anything else."""
    number = str(text).strip().lower().replace("_", "")
    number = number.replace(",", "") if re.fullmatch("[0-9]{1,3}(,[0-9]{3})+", number) else number
    factor = {"k": 1 << 10, "m": 1 << 20}.get(number[-1:], 1)
    digits = number[:-1] if factor > 1 else number
    if not re.fullmatch("[0-9]{1,13}", digits) or not 0 < int(digits) * factor < 1 << 40:
        raise ValueError(
            f"hfpatch: a length must be tokens such as 8192, 128k or 1M, got {text!r}. Write such "
            "a number."
        )
    return int(digits) * factor


def beyond_positions(tokens: int, positions: int | None) -> str:
    """What to do about a sequence longer than the model's positions; "" for another."""
    if positions is None or tokens <= positions:
        return ""
    scaling = f'{{"rope_type": "yarn", "factor": {math.ceil(tokens / positions)}.0, ...}}'
    return (
        f"the model has {positions:,} positions and the sequence {tokens:,} tokens. Load it with "
        f"rope_parameters={scaling} (guide: A longer context), or shorten the sequence."
    )


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


def did_you_mean(name: str, known, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name: the known name that is most like it."""
    near = difflib.get_close_matches(name, known, 1, cutoff)
    return f" Did you mean {near[0]}?" if near else ""
