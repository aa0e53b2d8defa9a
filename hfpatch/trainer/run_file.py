"""Run files: YAML with the names of `hfpatch train`, which `plan` and `profile` read too."""

import re
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from hfpatch.budget.limits import did_you_mean
from hfpatch.planner.placements import placement_of_engine

READY = Path(__file__).resolve().parents[1] / "examples"  # files that come with the package
MACHINE = ("gpu", "gpus", "host_ram")  # keys for the plan alone
# Key of a file -> the flag of plan and profile.
FLAGS = {
    "model": "--model", "seq_len": "--seq-len", "seq_length": "--seq-len",
    "max_length": "--seq-len", "per_device_train_batch_size": "--batch", "sp_size": "--sp-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "placement": "--placement", "engine": "--placement",
    "checkpointing": "--checkpointing", "fp8": "--fp8", "lora_r": "--lora-r",
    "lora_target_modules": "--lora-target", "load_in_4bit": "--base", "load_in_8bit": "--base",
    "gpu": "--gpu", "gpus": "--gpus", "host_ram": "--host-ram",
}  # fmt: skip
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
    ready = {p.name: p for p in sorted(READY.glob("*.yaml"))}
    if is_one(name) and path.name == name and not path.exists() and name not in ready:
        raise ValueError(
            f"hfpatch: there is no run file {name}.{did_you_mean(name, ready)} Ready: "
            f"{', '.join(ready)}."
        )
    return path if path.exists() else ready.get(name, path)


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


def read(path: Path) -> tuple[dict, dict]:
    """The file's values, as they are written and as YAML takes them. ValueError for a file that
    holds none, and for an unknown key."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        written, typed = yaml.load(text, yaml.BaseLoader), yaml.load(text, _loader())
    except OSError as error:
        raise ValueError(
            f"hfpatch: the file {path} cannot be read ({error.strerror}). Check the path."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"hfpatch: {path} must be YAML or JSON: {reason}. Correct the file."
        ) from error
    if not isinstance(written, dict):
        raise ValueError(f"hfpatch: {path} must hold keys and values. Correct the file.")
    known = keys()
    for key in written:
        if key.replace("-", "_") not in known:
            raise ValueError(
                f"hfpatch: {path} has an unknown key {key!r}."
                f"{did_you_mean(key, sorted(known)) or ' See hfpatch train --help.'}"
            )
    return written, typed


def words(name: str, known) -> list[str]:
    """The file as words of a command line.

    Args:
        name: a path, or the name of a file that comes with the package.
        known: the command's flags; what belongs to training alone is left out.

    Raises:
        ValueError: the file cannot be read, or a key is unknown.
    """
    values, _ = read(find(name))
    found = []
    for key, value in values.items():
        key = key.replace("-", "_")
        if key in EXTENDS and EXTENDED in known:
            found.append(EXTENDED)
        if FLAGS.get(key) not in known or key in BITS and value.lower() not in ("true", "yes"):
            continue
        if FLAGS[key] == "--placement":
            value = placement_of_engine(value)
        given = value if isinstance(value, list) else [BITS.get(key, value)]
        joined = [",".join(given)] if key == "lora_target_modules" else given
        found += [word for one in joined for word in (FLAGS[key], one)]
    return found
