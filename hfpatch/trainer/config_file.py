"""Flags from a YAML or JSON file: each value becomes a word of a command line for argparse.

So choices, types and ranges are the flags' own. YAML reads on, yes, off and no as true and false;
if one of them is a choice of the flag ("--checkpointing off"), the flag gets that word.
"""

import difflib
import json
import re
import sys
from pathlib import Path


def flags(name: str, actions: dict, dicts: set[str]) -> dict[str, list[str]]:
    """Reads the file: flag -> its words on a command line.

    Args:
        name: path of the file.
        actions: name of a flag, in each spelling -> argparse's action.
        dicts: flags that take a mapping, as JSON.

    Raises:
        ValueError: the file cannot be read, a key is unknown or comes twice, or a value is null,
            or a list or mapping where the flag takes one value.
    """
    file = Path(name).expanduser()
    if file.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ValueError(
            f"hfpatch: expected flags or a config file (.yaml, .json) first, {name!r} came; begin "
            "flags with --."
        )
    words = {}
    for key, value, written in _read(file):
        key = str(key).replace("-", "_")
        if key not in actions:
            raise ValueError(f"hfpatch: {file}: unknown key {key!r}{nearest(key, actions)}.")
        flag = actions[key].dest  # one of its spellings came
        if flag in words:
            raise ValueError(f"hfpatch: {file}: the key {key!r} stands twice; keep one.")
        words[flag] = _words(file, key, value, written, actions[key], flag in dicts)
    return words


def typed() -> str:
    """The name of the command as the user typed it."""
    return "train.py" if sys.argv[0].endswith("train.py") else "hfpatch train"


def nearest(name: str, known) -> str:
    """The end of an error about an unknown name: the known name that is most like it."""
    near = difflib.get_close_matches(name.split("=")[0].replace("-", "_"), known, n=1)
    return f"; did you mean --{near[0]}" if near else f"; see {typed()} --help"


def _words(file: Path, key: str, value, written, action, takes_dict: bool) -> list[str]:
    if isinstance(value, dict) and takes_dict:
        return [f"--{key}={json.dumps(value)}"]
    many = action.nargs == "+" and isinstance(value, list)
    for item in value if many else [value]:
        if item is None or isinstance(item, (dict, list)):
            came = {dict: "keys and values", list: "a list"}.get(type(item), "null")
            raise ValueError(
                f"hfpatch: {file}: expected a value for {key!r}, {came} came; write one or leave "
                "it out."
            )
    if many:
        return [f"--{key}", *written] if value else []
    if isinstance(value, bool) and written not in (
        action.choices or (action.metavar or "").split("|")
    ):
        written = "true" if value else "false"
    return [f"--{key}={written}"]


def _read(file: Path) -> list[tuple]:
    """(key, value, source text) of each entry, in order; of a list the source text of each item."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        entries = _json(file, text) if file.suffix.lower() == ".json" else _yaml(file, text)
    except OSError as error:
        raise ValueError(
            f"hfpatch: cannot read the config file {file} ({error.strerror}); check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"hfpatch: {file} is not UTF-8 at byte {error.start}; mend the file."
        ) from error
    except RecursionError as error:
        raise ValueError(f"hfpatch: {file} is nested too deeply; mend the file.") from error
    if entries is None:
        raise ValueError(
            f"hfpatch: expected keys and values in {file}, something else came; mend the file."
        )
    return entries


def _json(file: Path, text: str) -> list | None:
    pairs = []  # of each object; the outermost is the last

    def keep(items):
        pairs.append(items)
        return dict(items)

    try:
        value = json.loads(text, object_pairs_hook=keep)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"hfpatch: {file}:{error.lineno}: not JSON: {error.msg}; mend the file."
        ) from error
    except ValueError as error:
        raise ValueError(f"hfpatch: {file}: a number of too many digits; mend the file.") from error
    if not isinstance(value, dict):
        return None
    return [
        (k, v, [str(item) for item in v] if isinstance(v, list) else str(v)) for k, v in pairs[-1]
    ]


def _yaml(file: Path, text: str) -> list | None:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes 1e-5 for a string, as inside `lr_scheduler_kwargs: {min_lr: 1e-5}`."""

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        node = yaml.compose(text, Loader=Loader)
        if not isinstance(node, yaml.MappingNode):
            return None
        entries, made = [], Loader("")
        for key, value in node.value:
            written = (
                [i.value for i in value.value]
                if isinstance(value, yaml.SequenceNode)
                else value.value
            )
            entries.append((key.value, made.construct_object(value, deep=True), written))
        return entries
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ValueError(
            f"hfpatch: {file} is not YAML: {' '.join(str(error).split())}; mend the file."
        ) from error
