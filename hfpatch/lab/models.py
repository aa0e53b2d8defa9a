"""Resolves `--model`: a preset, a config.json, a folder, a config or model object, a hub id."""

import difflib
import json
import os
from copy import deepcopy
from pathlib import Path

from hfpatch.lab.presets import MODELS, PRESETS, find_preset, preset_config

# Language towers without a causal model in transformers -> the family that has the same layers.
_TOWERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}

LANGUAGE_TOWER = " (language tower)"  # after a model's name if only this tower is planned


def text_config_of(model) -> tuple[str, dict]:
    """config_of() of the model, or of its language tower if it has several. ValueError as there.

    Values that make no config stay as they are: simulate.implementations.build refuses them.
    """
    from transformers import AutoConfig

    name, values = config_of(model)
    try:
        made = AutoConfig.for_model(**deepcopy(values))  # its class writes into nested values
        text = made.get_text_config(decoder=True)
    except Exception:  # each family raises its own class for junk
        return name, values
    if text is made:
        return name, values
    told = text.to_dict()
    inner = told["model_type"]
    if inner in _TOWERS:
        told["model_type"] = _TOWERS[inner]
        for rope in (told.get("rope_parameters"), told.get("rope_scaling")):
            if isinstance(rope, dict):
                rope.pop("mrope_section", None)  # text rotates all columns by one position
    return name + LANGUAGE_TOWER, told


def with_images(values: dict):
    """The model of a config.json, without memory. None for one that takes no images."""
    import torch
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForImageTextToText,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if values.get("model_type") not in CONFIG_MAPPING:
        return None
    config = AutoConfig.for_model(**values)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def config_of(model) -> tuple[str, dict]:
    """(name, config.json as a dict). A folder or file wins over a preset, a preset over the hub.
    ValueError without a config.
    """
    # [Step 1] A dict, a config or a model has the values itself.
    if isinstance(model, dict):
        return model.get("_name_or_path") or model.get("model_type", "model"), model
    if not isinstance(model, (str, os.PathLike)):
        config = getattr(model, "config", model)
        if not hasattr(config, "to_dict"):
            raise ValueError(
                "hfpatch: the model must be a name, a config or a model, got "
                f"{type(model).__name__}. Pass what `hfpatch plan` takes."
            )
        return getattr(config, "_name_or_path", "") or "model", config.to_dict()
    # [Step 2] A name is tried as a folder or file, then as a preset, then as a hub id.
    name = os.fspath(model)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        values = read_config(path)
        if not values.get("model_type"):
            raise ValueError(f"hfpatch: {path} lacks model_type. Pass a model's whole config.json.")
        return name, values
    if find_preset(name) is not None:
        values = preset_config(name)
        return values.get("_name_or_path", find_preset(name)), values
    if name.count("/") == 1 and not path.parent.exists() and not name.endswith(".json"):
        return name, hub_config(name)
    # [Step 3] It is none of these: say what it looks like.
    if name and Path(name).is_dir():
        raise ValueError(
            f"hfpatch: a model's folder must hold a config.json, and {name} has none. Pass another."
        )
    if name.endswith(".json") or "/" in name:
        raise ValueError(
            f"hfpatch: there is no model folder or config.json at {name}. Check the path."
        )
    by_short_name = {preset.rsplit("/", 1)[-1].lower(): preset for preset in (*PRESETS, *MODELS)}
    near = difflib.get_close_matches(name.lower(), by_short_name, cutoff=0)
    raise ValueError(
        f"hfpatch: the model {name!r} is unknown. Did you mean "
        f"{', '.join(by_short_name[short] for short in near)}? Any "
        "other is planned from its config: pass the path of a config.json, a model's folder, or a "
        "hub id (owner/name)."
    )


def read_config(path: Path) -> dict:
    """The values of a config.json. ValueError for a file without a JSON object."""
    try:
        values = json.loads(path.read_text(), object_hook=_number)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"hfpatch: {path} must be JSON. Pass the model's folder.") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"hfpatch: {path} must hold one JSON object, got a {type(values).__name__}. Pass the "
            "model's folder."
        )
    return values


def _number(values: dict):
    """The number of transformers' {"__float__": "Infinity"}; others stay as they are."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def hub_config(name: str) -> dict:
    """The config.json of a model in the local cache or on the hub. Otherwise a ValueError says what
    to fetch.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"hfpatch: a model's folder must exist, got {name}. Check the path.")
    try:
        return read_config(Path(hf_hub_download(name, "config.json", local_files_only=True)))
    except (OSError, ValueError):
        pass  # not in the cache
    try:
        # This fails at once, a download would retry.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
        return read_config(Path(hf_hub_download(name, "config.json")))
    except Exception as error:  # no network, a gated or unknown model: classes differ by version
        raise ValueError(
            f"hfpatch: {name!r} is no preset, and its config.json could not be fetched "
            f"({type(error).__name__}). Check the network, and `hf auth login` for a gated model; or "
            "download it and pass its folder (to a plan its config.json)."
        ) from None
