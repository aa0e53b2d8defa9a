"""Flags from a YAML or JSON file: each value, as it is written there, becomes a word for argparse.

So choices, types and ranges are the flags' own.
"""

import json
import sys

from hfpatch.budget.limits import did_you_mean
from hfpatch.trainer import run_file


def flags(name: str, actions: dict, dicts: set[str]) -> dict[str, list[str]]:
    """Reads the file: flag -> its words on a command line.

    Args:
        name: path of the file.
        actions: name of a flag, in each spelling -> argparse's action.
        dicts: flags that take a mapping, as JSON.

    Raises:
        ValueError: the file cannot be read, or a key is unknown.
    """
    if not name.lower().endswith((".yaml", ".yml", ".json")):
        raise ValueError(
            "hfpatch: the first argument must be a flag or a config file (.yaml, .json), got "
            f"{name!r}. Write -- before a flag."
        )
    file = run_file.find(name)
    written, typed = run_file.read(file)
    words = {}
    for name_, value in written.items():
        key = name_.replace("-", "_")
        if key in run_file.MACHINE:
            continue
        flag = actions[key].dest  # one of its spellings came
        if typed[name_] in (None, ""):
            raise ValueError(f"hfpatch: {file}: {key!r} has no value. Write one.")
        if isinstance(value, list):
            words[flag] = [f"--{key}", *map(str, value)] if value else []
        else:
            value = json.dumps(typed[name_]) if flag in dicts and isinstance(value, dict) else value
            # YAML's own words, such as yes and off.
            choices = actions[key].choices or (actions[key].metavar or "").split("|")
            if isinstance(typed[name_], bool) and value not in choices:
                value = str(typed[name_]).lower()
            words[flag] = [f"--{key}={value}"]
    return words


def typed() -> str:
    """The name of the command as the user typed it."""
    return "train.py" if sys.argv[0].endswith("train.py") else "hfpatch train"


def nearest(name: str, known) -> str:
    """The end of an error about an unknown name: the known name that is most like it."""
    said = did_you_mean("--" + name.split("=")[0].replace("-", "_"), [f"--{one}" for one in known])
    return "." + (said or f" See {typed()} --help.")
