"""Models by name, as the values of their config.json, for `--model NAME`. Standard library only.

presets.json holds them. Its keys are ids on the hub, without the owner for Llamas. Source: the
config.json published there. llama-tiny and llama-160m are our own small shapes for laptops and tests;
160m has the sizes of JackFram/llama-160m. "(text)" in a name: only the language tower.
"""

import json
from pathlib import Path

_TEXT = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
_NAMES = tuple(json.loads(_TEXT))
PRESETS = tuple(name for name in _NAMES if "/" not in name)
MODELS = tuple(name for name in _NAMES if "/" in name)
# Endings of a name that change the weights but no size.
_SAME_SIZES = (
    "-2507",
    "-0324",
    "-bnb-4bit",
    "-unsloth",
    "-instruct",
    "-thinking",
    "-it",
    "-pt",
    "-base",
)


def _short_name(name: str) -> str:
    """A name without its owner and without words that change no size:
    meta-llama/Llama-3.1-8B-Instruct, llama-3.1-8b.
    """
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for word in _SAME_SIZES:
        short = short.removesuffix(word).replace(f"{word}-", "-")
    return short


_BY_SHORT_NAME = {_short_name(name): name for name in _NAMES}
_BY_SHORT_NAME |= {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.1": "deepseek-ai/DeepSeek-V3",
}
# Allowed owners of a name on the hub: another owner's model of the same name may have other sizes.
_OWNERS = {"meta-llama", "unsloth", "cohereforai", "thudm"}
_OWNERS |= {name.split("/")[0].lower() for name in MODELS}


def find_preset(name: str) -> str | None:
    """The preset of a name: the name itself, a hub id of the same sizes, or one without its owner.
    None for no preset.
    """
    owner, slash, _ = name.lower().rpartition("/")
    if slash and owner not in _OWNERS:
        return None
    return _BY_SHORT_NAME.get(_short_name(name))


def preset_config(name: str) -> dict:
    """The config.json of a preset as a dict, for `AutoConfig.for_model(**preset_config(name))` or
    the planner.

    Raises:
        ValueError: the name is no preset.
    """
    preset = find_preset(name)
    if preset is None:
        names = ", ".join(_NAMES)
        raise ValueError(
            f"hfpatch: a preset must be one of {names}, got {name!r}. Pass one of them, or a "
            "config.json."
        )
    return json.loads(_TEXT)[preset]  # a new dict each time: config classes write into it
