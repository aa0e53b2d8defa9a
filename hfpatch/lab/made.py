"""Models with random weights, created on the device that runs them."""

import torch
from torch import nn

from hfpatch.lab.presets import preset_config


def config_of(preset: str, changes: dict, tokens: int = 0):
    """The preset's configuration with `changes`, for rows of at least `tokens`."""
    from transformers import AutoConfig

    values = preset_config(preset) | changes
    values["max_position_embeddings"] = max(values["max_position_embeddings"], tokens)
    # Ids of special tokens may lie beyond a smaller vocabulary, or mean something else there.
    values |= {"use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def made(preset: str, changes: dict, device, dtype: torch.dtype, tokens: int = 0) -> nn.Module:
    """The model in training mode, created on the device: 8B weights take minutes on a host."""
    return model_of(config_of(preset, changes, tokens), device, dtype)


def model_of(config, device, dtype: torch.dtype) -> nn.Module:
    """The same from a configuration of transformers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()
