"""The implementations that a simulation can compare: transformers as it is, Liger and the ALST recipe, hfpatch."""

import torch

IMPLEMENTATIONS = ("hf", "hf-ckpt", "hf-ckpt-chunked", "liger", "liger-tiled-offload", "hfpatch", "hfpatch-off")


def build(config: dict, dtype=torch.bfloat16):
    """A causal language model of a config.json's values on the meta device: shapes without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")


def prepare(model, implementation: str):
    """Turns the stock model into one of IMPLEMENTATIONS, in place."""
    if implementation in ("hfpatch", "hfpatch-off"):
        import hfpatch

        hfpatch.apply(model, checkpointing="off" if implementation == "hfpatch-off" else "auto")
    elif implementation.startswith("liger"):
        from hfpatch.simulate import liger

        liger.apply(model, tiled=implementation == "liger-tiled-offload")
    if implementation in ("hf-ckpt", "hf-ckpt-chunked", "liger"):
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if implementation == "hf-ckpt-chunked":
        from hfpatch.simulate import liger

        liger.apply(model, loss_only=True)
    return model
