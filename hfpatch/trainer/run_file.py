"""Run files: YAML with the names of `hfpatch train`, which `plan` and `profile` read too."""

import json
import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from hfpatch.budget.limits import did_you_mean
from hfpatch.planner.placements import placement_of_engine

READY = Path(__file__).resolve().parents[1] / "examples"  # files that come with the package
MACHINE = ("gpu", "gpus", "host_ram")  # keys for the plan alone
EXTENDS = ("rope_scaling", "max_position_embeddings")  # keys that extend the model's positions
EXTENDED = "--extended"  # plan's flag for them
BITS = {"load_in_4bit": "4bit", "load_in_8bit": "8bit"}
# Flags of `hfpatch train` -> their other spellings, which are TRL's.
SPELLINGS = {
    "seq_len": ["seq_length", "max_length"],
    "text_field": ["dataset_text_field"],
    "chat_template": ["chat_template_path"],
    "pad_multiple": ["pad_to_multiple_of"],
    "placement": ["engine"],
}
# Key of a file, and another spelling on the command line -> the flag of plan and profile.
FLAGS = {
    "model": "--model", "seq_len": "--seq-len", "placement": "--placement",
    "per_device_train_batch_size": "--batch", "sp_size": "--sp-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "checkpointing": "--checkpointing", "fp8": "--fp8", "lora_r": "--lora-r",
    "lora_target_modules": "--lora-target", "load_in_4bit": "--base", "load_in_8bit": "--base",
    "gpu": "--gpu", "gpus": "--gpus", "host_ram": "--host-ram",
    **dict.fromkeys(SPELLINGS["seq_len"], "--seq-len"),
    **dict.fromkeys(SPELLINGS["placement"], "--placement"),
}  # fmt: skip

# What every run names.
NEEDED = {
    "model": "--model is missing. Name a folder, a hub id or a preset.",
    "data": "--data is missing. Name files, folders, or one hub data set.",
}


def is_one(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml")


def find(name: str) -> Path:
    """The file of that name: a path, else one that comes with the package. Raises ValueError."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ValueError(
            "hfpatch: the first argument must be a flag or a config file (.yaml, .json), got "
            f"{name!r}. Write -- before a flag."
        )
    if path.exists():
        return path
    ready = sorted(file.name for file in READY.glob("*.yaml"))
    if name in ready:
        return READY / name
    if is_one(name) and path.name == name:
        raise ValueError(
            f"hfpatch: there is no run file {name}.{did_you_mean(name, ready)} Ready: "
            f"{', '.join(ready)}."
        )
    return path


def _loader():
    """YAML's safe loader, which takes 1e-5 for a number: YAML 1.1 takes it for a string, as inside
    `lr_scheduler_kwargs: {min_lr: 1e-5}`."""
    import yaml  # transformers brings it; a plan without a file needs none

    class Typed(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Typed.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Typed


def keys() -> set[str]:
    """Every key that a file may hold. Read from sources: transformers' own loads for seconds."""
    theirs = Path(find_spec("transformers").origin).with_name("training_args.py")
    found = {*FLAGS, *chain(*SPELLINGS.values())}
    for source in (theirs, Path(__file__).with_name("flags.py")):
        found.update(re.findall(r"^    (\w+): ", source.read_text(encoding="utf-8"), re.MULTILINE))
    return found


def read(path: Path) -> dict[str, tuple]:
    """Each key's value, as it is written and as YAML takes it. ValueError for a file that holds
    none, and for an unknown key."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        written = yaml.load(text, yaml.BaseLoader)
        typed = yaml.load(text, _loader())
    except OSError as error:
        raise ValueError(
            f"hfpatch: the file {path} cannot be read ({error.strerror}). Check the path."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"hfpatch: {path} must be YAML or JSON, got {reason}. Correct the file."
        ) from error
    if not isinstance(written, dict):
        raise ValueError(f"hfpatch: {path} must hold keys and values. Correct the file.")
    valid = keys()
    found = {}
    for key, value in written.items():
        name = key.replace("-", "_")
        if name not in valid:
            raise ValueError(
                f"hfpatch: {path} has an unknown key {key!r}."
                f"{did_you_mean(key, sorted(valid)) or ' See hfpatch train --help.'}"
            )
        found[name] = (value, typed[key])
    return found


def words(name: str, flags) -> list[str]:
    """The file as words of a command line.

    Args:
        name: a path, or the name of a file that comes with the package.
        flags: the command's flags; what belongs to training alone is left out.

    Raises:
        ValueError: the file cannot be read, or a key is unknown.
    """
    found = []
    for key, (value, _) in read(find(name)).items():
        flag = FLAGS.get(key)
        if key in EXTENDS and EXTENDED in flags:
            found.append(EXTENDED)
        if flag not in flags:
            continue
        given = value if isinstance(value, list) else [value]
        if key in BITS:
            given = [BITS[key]] if value.lower() in ("true", "yes") else []
        elif flag == "--placement":
            given = [placement_of_engine(value)]
        elif flag == "--lora-target":
            given = [",".join(given)]
        for word in given:
            found += [flag, word]
    return found


def flags(name: str, actions: dict) -> list[str]:
    """The file as words of `hfpatch train`. Each value, as it is written there, becomes a word, so
    choices, types and ranges are the flags' own.

    Args:
        name: path of the file.
        actions: name of a flag, in each spelling -> argparse's action.

    Raises:
        ValueError: the file cannot be read, or a key is unknown.
    """
    words: list[str] = []
    for key, (value, meant) in read(find(name)).items():
        if key in MACHINE:
            continue
        action = actions[key]
        if meant in (None, ""):
            raise ValueError(f"hfpatch: {name}: {key!r} has no value. Write one.")
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
            continue
        if isinstance(value, dict):
            value = json.dumps(meant)
        # YAML's own words, such as yes and off.
        choices = action.choices or str(action.metavar).split("|")
        if isinstance(meant, bool) and value not in choices:
            value = str(meant).lower()
        words.append(f"--{key}={value}")
    return words
