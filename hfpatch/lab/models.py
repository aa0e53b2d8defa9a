"""Resolves `--model`: a preset, a config.json, a folder, a config or model object, a hub id."""

import difflib
import json
import os
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
# Published sizes of models beside the presets, or of their text and image towers.
_PUBLISHED = {
    "Qwen/Qwen3.5-9B": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 262144,
    },
    "Qwen/Qwen3-VL-8B": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16,
            "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}  # fmt: skip


def text_config_of(model) -> tuple[str, dict]:
    """config_of() of the model, or of its language tower if it has several. ValueError as there."""
    name, values = config_of(model)
    kind = values.get("model_type")
    return _language_tower(name, values) if isinstance(kind, str) else (name, values)


def _language_tower(name: str, values: dict) -> tuple[str, dict]:
    """The name and config of the language tower of a model with several towers.

    Other models keep theirs. ValueError for values that make no config.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values, kind = dict(values), values["model_type"]
    if kind not in CONFIG_MAPPING or not CONFIG_MAPPING[kind].sub_configs:
        return name, values
    try:
        made = AutoConfig.for_model(**values)
        text = made.get_text_config(decoder=True)
        told = made.to_dict() if text is made else text.to_dict()
    except Exception as error:  # each family raises its own class for junk
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise ValueError(
            f"hfpatch: a {kind} config.json must hold its values, and does not ({reason}). Check "
            "the file."
        ) from error
    if text is made:
        return name, values
    inner = told["model_type"]
    for rope in (told.get("rope_parameters"), told.get("rope_scaling")):
        if inner in _TOWERS and isinstance(rope, dict):
            rope.pop("mrope_section", None)  # text rotates all columns by one position
    return name + LANGUAGE_TOWER, told | {"model_type": _TOWERS.get(inner, inner)}


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
    if isinstance(model, dict):
        return model.get("_name_or_path") or model.get("model_type", "model"), model
    if not isinstance(model, (str, os.PathLike)):
        config = getattr(model, "config", model)
        if not hasattr(config, "to_dict") and not hasattr(config, "__dict__"):
            raise ValueError(
                "hfpatch: the model must be a name, a config or a model, got "
                f"{type(model).__name__}. Pass what `hfpatch plan` takes."
            )
        values = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
        return getattr(config, "_name_or_path", "") or "model", values
    name = os.fspath(model)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        values = read_config(path)
        if not values.get("model_type"):
            raise ValueError(f"hfpatch: {path} lacks model_type. Pass a model's whole config.json.")
        return name, values
    known = name.removesuffix("-Instruct").removesuffix("-Thinking")
    if known in _PUBLISHED:
        return known, _PUBLISHED[known]
    if find_preset(name) is not None:
        values = preset_config(name)
        return values.get("_name_or_path", find_preset(name)), values
    if name.count("/") == 1 and not path.parent.exists() and not name.endswith(".json"):
        return name, hub_config(name)
    if name and Path(name).is_dir():
        raise ValueError(
            f"hfpatch: a model's folder must hold a config.json, and {name} has none. Pass another."
        )
    if name.endswith(".json") or "/" in name:
        raise ValueError(
            f"hfpatch: there is no model folder or config.json at {name}. Check the path."
        )
    raise ValueError(
        f"hfpatch: the model {name!r} is unknown. Did you mean {', '.join(nearest(name))}? Any "
        "other is planned from its config: pass the path of a config.json, a model's folder, or a "
        "hub id (owner/name)."
    )


def nearest(name: str, count: int = 3) -> list[str]:
    """The presets with the most similar names, the nearest first."""
    known = {preset.rsplit("/", 1)[-1].lower(): preset for preset in (*PRESETS, *MODELS)}
    near = difflib.get_close_matches(name.lower(), known, n=count, cutoff=0)
    return [known[short] for short in near]


def read_config(path: Path) -> dict:
    """The values of a config.json. ValueError for a file without a JSON object."""
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"hfpatch: {path} must be JSON. Pass the model's folder.") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"hfpatch: {path} must hold one JSON object, got a {type(values).__name__}. Pass the "
            "model's folder."
        )
    return _numbers(values)


def _numbers(value):
    """The value, with each {"__float__": "Infinity"} of transformers replaced by its number."""
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _numbers(one) for name, one in value.items()}


def hub_config(name: str) -> dict:
    """The config.json of a model in the local cache or on the hub. Otherwise a ValueError says what
    to fetch.
    """
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    except ImportError:
        raise ValueError(
            f"hfpatch: {name!r} is no preset, and huggingface_hub is missing. Pass a config.json."
        ) from None
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
            f"({type(error).__name__}). Download its config.json and pass the file."
        ) from None
