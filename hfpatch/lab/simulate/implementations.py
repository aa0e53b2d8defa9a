"""The implementations that a simulation runs: transformers as it is, with its own checkpointing,
and hfpatch. (profiles/plan/rivals.py adds Liger's and TRL's.)
"""

import torch

from hfpatch.lab.simulate.adapters import adapted

IMPLEMENTATIONS = ("hf", "hf-ckpt", "hfpatch", "hfpatch-off")


def config_class(kind):
    """transformers' config class of a model type. ValueError where it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"hfpatch: model_type must be one of transformers', got {kind!r}. Code from elsewhere "
            "is not run here: load the model and print(hfpatch.apply(model))."
        )
    return CONFIG_MAPPING[kind]


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim",
         "vocab_size")  # fmt: skip


def check_sizes(read) -> None:
    """Raises ValueError for a size of a config that is no whole number above 0, and for query heads
    that do not divide evenly over KV heads.

    read: name -> value, None for a missing one.
    """
    sizes = {name: read(name) for name in SIZES if read(name) is not None}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"hfpatch: {name} must be a whole number of at least 1, got {value!r}. Check the "
                "config."
            )
        # a plan of such a model would add up for hours
        if value >= (1 << 16 if name == "num_hidden_layers" else 1 << 31):
            raise ValueError(f"hfpatch: {name} is {value}, which no model has. Check the config.")
    heads = read("num_attention_heads")
    kv_heads = read("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"hfpatch: num_attention_heads must be a multiple of num_key_value_heads, got {heads} "
            f"and {kv_heads}. Check the config."
        )


def build(config: dict, dtype=torch.bfloat16, adapters=None):
    """A causal language model, or one of images and text, on the meta device: shapes, no memory.

    Args:
        config: the values of a config.json.
        adapters: a lab.adapters.Adapters, for LoRA over the model.

    Raises ValueError for values that make no such model.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    values = dict(config)
    kind = values.pop("model_type", None)
    made = config_class(kind)
    if not any(
        made in m for m in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    ):
        raise ValueError(
            f"hfpatch: the model must write text one token after another, got {kind!r}. Pass the "
            "config.json of such a model."
        )
    # A list has one value per layer.
    check_sizes(lambda name: None if isinstance(values.get(name), list) else values.get(name))
    try:
        made = AutoConfig.for_model(kind, **values)
        auto = (
            AutoModelForCausalLM
            if type(made) in MODEL_FOR_CAUSAL_LM_MAPPING
            else AutoModelForImageTextToText
        )
        with torch.device("meta"):
            try:
                model = auto.from_config(made, dtype=dtype, attn_implementation="sdpa")
            except ValueError:  # sdpa cannot compute the family's attention (sinks)
                model = auto.from_config(made, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # each family raises its own class for junk
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise ValueError(
            f"hfpatch: a {kind} config.json must hold its values, and does not ({reason}). Check "
            "the file."
        ) from error
    return adapted(model, adapters) if adapters else model


def prepare(model, implementation: str):
    """Turns the stock model into one of IMPLEMENTATIONS, in place."""
    if implementation in ("hfpatch", "hfpatch-off"):
        import hfpatch

        hfpatch.apply(model, checkpointing="off" if implementation == "hfpatch-off" else "auto")
    elif implementation == "hf-ckpt":
        enable_checkpointing(model)
    return model


def enable_checkpointing(model) -> None:
    """Turns on transformers' own checkpointing, not reentrant. Version 5.23 renamed the method."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
