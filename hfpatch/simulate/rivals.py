"""The implementations that a simulation can compare: transformers as it is, TRL's and Liger's recipes, ALST's, hfpatch.

TRL and Liger change transformers process-wide: one of them a process.
"""

import torch

from hfpatch.simulate import trl
from hfpatch.simulate.adapters import adapted

IMPLEMENTATIONS = ("hf", "hf-ckpt", "hf-ckpt-chunked", "liger", "liger-tiled-offload", *trl.IMPLEMENTATIONS, "hfpatch",
                   "hfpatch-off")  # fmt: skip


def build(config: dict, dtype=torch.bfloat16, adapters=None):
    """A causal language model of a config.json's values on the meta device: shapes without memory. adapters: a
    memory.adapters.Adapters, LoRA over it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
        except ValueError:  # families whose attention sdpa cannot do (sinks): their own
            model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="eager")
    return adapted(model, adapters) if adapters else model


def prepare(model, implementation: str):
    """Turns the stock model into one of IMPLEMENTATIONS, in place."""
    if implementation in ("hfpatch", "hfpatch-off"):
        import hfpatch

        hfpatch.apply(model, checkpointing="off" if implementation == "hfpatch-off" else "auto")
    elif implementation in trl.IMPLEMENTATIONS:
        trl.apply(model, implementation)
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
