"""Numbers from the environment and from configs, lengths and bytes as text. Standard library only."""

import difflib
import os
import re

GiB = 1 << 30


def gib(nbytes: float | None, decimals=1) -> str:
    """Bytes of a machine as text: "12.3 GiB"; "unlimited" for None."""
    return "unlimited" if nbytes is None else f"{nbytes / GiB:.{decimals}f} GiB"


def environment_number(name: str, default, least: int = 0):
    """A whole number from the environment, or the default if it is not set. ValueError for anything
    else.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise ValueError(
            f"hfpatch: {name} in the environment must be a whole number, "
            f"{range_words(least, None)}, got {text!r}. Correct or unset it."
        )
    return int(text)


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
    return " and ".join(words) or "a finite number"


def parse_length(text) -> int:
    """Tokens from "8192", "131,072", "128k" (131,072) or "1M" (1,048,576). ValueError for anything else."""
    number = str(text).strip().lower().replace("_", "")
    if re.fullmatch("[0-9]{1,3}(,[0-9]{3})+", number):
        number = number.replace(",", "")
    factor = {"k": 1 << 10, "m": 1 << 20}.get(number[-1:], 1)
    digits = number[:-1] if factor > 1 else number
    if not re.fullmatch("[0-9]{1,13}", digits) or not 0 < int(digits) * factor < 1 << 40:
        raise ValueError(
            f"hfpatch: a length must be tokens such as 8192, 128k or 1M, got {text!r}. Write such "
            "a number."
        )
    return int(digits) * factor


def parse_word(text: str):
    """auto, another word, true, false, or a number such as 4096 or 4k."""
    # 0 is no length: the field checks whether it allows it
    word = {"true": True, "false": False, "0": 0}.get(text.lower(), text)
    return parse_length(text) if word is text and text[:1].isdigit() else word


def did_you_mean(name: str, names, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name: the one of `names` that is most like it."""
    near = difflib.get_close_matches(name, names, 1, cutoff)
    return f" Did you mean {near[0]}?" if near else ""
