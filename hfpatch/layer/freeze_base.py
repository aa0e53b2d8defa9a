"""LoRA's base: freezes it and nothing else, and undoes other preparations."""

import torch
from torch import nn

from hfpatch.compat import asks_inputs_for_gradients
from hfpatch.context.classes import expect_module
from hfpatch.parts.quantised import is_quantised

NARROW = (torch.bfloat16, torch.float16)


def _computed_in(model: nn.Module) -> torch.dtype | None:
    """The 16-bit dtype in the model's config, else None."""
    named = getattr(getattr(model, "config", None), "dtype", None)
    named = getattr(torch, named, None) if isinstance(named, str) else named
    return named if named in NARROW else None


def widened(model: nn.Module) -> list[str]:
    """Names of frozen float32 parameters in a 16-bit model whose Linear layers are quantised."""
    if _computed_in(model) is None or not any(is_quantised(m) for m in model.modules()):
        return []
    return [
        n for n, p in model.named_parameters() if p.dtype == torch.float32 and not p.requires_grad
    ]


def freeze_base(model: nn.Module) -> nn.Module:
    """Freezes the model for LoRA, before or after PEFT wraps it, and changes nothing else. Returns
    it.

    Use it in place of `peft.prepare_model_for_kbit_training`, which also makes norms, embeddings
    and head float32: the residual stream and its checkpoints then take twice the memory. If that
    was called, this restores the dtype of the config, without loss. Adapters stay trained, as they
    are. `enable_input_require_grads()` is undone: a tiled layer needs no gradient of the
    embeddings. Raises ValueError if `model` is no module.
    """
    expect_module(model)
    dtype, quantised = _computed_in(model), any(is_quantised(m) for m in model.modules())
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        parameter.requires_grad_(False)
        if quantised and dtype is not None and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if asks_inputs_for_gradients(module):
            module.disable_input_require_grads()
    return model
