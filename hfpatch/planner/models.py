"""What `--model` may be: a preset, a config.json, a folder with one, a config or model object, or (online) a hub id."""

import json
import os
from pathlib import Path

from hfpatch.memory.presets import PRESETS, preset_config
from hfpatch.memory.shape import ModelShape


def resolve(model) -> tuple[str, ModelShape, dict]:
    """(name, shape, config.json as a dict) of a model. ValueError where it is unknown or of another kind."""
    if isinstance(model, ModelShape):
        return "model", model, {}
    if isinstance(model, dict):
        return model.get("_name_or_path") or model.get("model_type", "model"), ModelShape.from_config(model), model
    if not isinstance(model, (str, os.PathLike)):
        config = getattr(model, "config", model)
        values = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
        return getattr(config, "_name_or_path", "") or "model", ModelShape.from_config(config), values
    name = os.fspath(model)
    if name in PRESETS:
        return name, ModelShape.from_config(preset_config(name)), preset_config(name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            values = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(
                f"hfpatch: a config.json was expected, {path} is no JSON; pass the model's folder."
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"hfpatch: {path} should hold one JSON object, a {type(values).__name__} came.")
        return name, ModelShape.from_config(values), values
    if name.count("/") == 1 and not path.parent.exists():
        values = hub_config(name)
        return name, ModelShape.from_config(values), values
    raise ValueError(
        f"hfpatch: the known models are {', '.join(PRESETS)}, {name!r} came; pass one of them, a config.json, "
        "a model's folder, or a hub id like owner/name."
    )


def hub_config(name: str) -> dict:
    """The config.json of a model on the hub (or in the local cache). ValueError where it cannot be had."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"hfpatch: no config of {name!r} could be had ({reason}); pass a preset or a config.json."
        ) from None
