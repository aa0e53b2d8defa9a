"""A longer context than the model's: its config with another limit and other rotary frequencies.

The config goes into the model before its weights load, and with the model into config.json.
"""

import json

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ORIGINAL = "original_max_position_embeddings"
_FROM_ORIGINAL = ("yarn", "llama3", "longrope")  # types that reckon from the length before


def lengthened(config, limit: int | None, scaling: str | None):
    """The config with another limit of positions and other rope parameters, each if given.

    Args:
        config: of a model with one rotary table.
        limit: max_position_embeddings; by default `factor` times the length before.
        scaling: rope parameters as a JSON object. What it leaves out stays as it was (rope_theta);
            original_max_position_embeddings is the model's limit before.

    Raises:
        ValueError: the model's family or transformers does not take them.
    """
    if limit is None and scaling is None:
        return config
    # [Step 1] Refuse a model without a rotary table, or with several.
    before = _rope(config)
    values = config.to_dict()
    # [Step 2] Put the new rope parameters over the model's. Some types start from the length
    # before.
    if scaling is not None:
        asked = _asked(scaling)
        scaled = before.get("rope_type", "default")
        original = asked.get(_ORIGINAL, config.max_position_embeddings)
        if asked["rope_type"] in _FROM_ORIGINAL:
            if _ORIGINAL not in asked and scaled != "default":
                raise ValueError(
                    f"hfpatch: the model's positions are scaled already ({scaled}). Add "
                    f'"{_ORIGINAL}" to --rope_scaling, the length it starts from.'
                )
            asked[_ORIGINAL] = original
        if limit is None and isinstance(asked.get("factor"), (int, float)):
            limit = int(original * asked["factor"])
        kept = {k: before[k] for k in ("rope_theta", "partial_rotary_factor") if k in before}
        values["rope_parameters"] = kept | asked
    if limit is not None:
        values["max_position_embeddings"] = limit
    # [Step 3] Make the config, and compute its frequencies once, to refuse what does not work.
    try:
        made = type(config).from_dict(values)
        kind = _rope(made).get("rope_type", "default")
        if kind != "default":
            ROPE_INIT_FUNCTIONS[kind](made, "cpu")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"hfpatch: --rope_scaling {scaling} does not work with this model ({error}). Check it."
        ) from error
    made._name_or_path = config._name_or_path
    return made


def _rope(config) -> dict:
    """The rope parameters of a config with one rotary table. Raises ValueError."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope or not hasattr(config, "max_position_embeddings"):
        raise ValueError(
            "hfpatch: --max_position_embeddings and --rope_scaling need one rotary table, and a "
            f"{config.model_type} has none or several. Change its config.json instead."
        )
    return rope


def _asked(scaling: str) -> dict:
    try:
        asked = {**json.loads(scaling)}  # TypeError for all but an object
    except (TypeError, ValueError) as error:
        raise ValueError(
            "hfpatch: --rope_scaling must be a JSON object such as "
            '{"rope_type": "yarn", "factor": 4.0}, '
            f"got {scaling!r}. Correct it."
        ) from error
    named = {"type", "rope_type"} & asked.keys()
    if not named and not asked.keys() <= {"rope_theta", "partial_rotary_factor"}:
        raise ValueError(
            f"hfpatch: --rope_scaling needs a rope_type, got {scaling!r}: transformers would not "
            "scale. Add it."
        )
    asked["rope_type"] = asked.pop("type", asked.get("rope_type", "default"))
    if asked["rope_type"] == "dynamic":
        raise ValueError(
            "hfpatch: dynamic scaling changes with each batch and cannot train beyond "
            "max_position_embeddings. Use yarn or linear."
        )
    return asked
