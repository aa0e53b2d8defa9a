"""The config and the model that the flags ask for, with LoRA and quantisation."""

import copy
import errno
import inspect
import json
import os
import warnings
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN

from hfpatch.budget.limits import did_you_mean
from hfpatch.lab.models import hub_config
from hfpatch.lab.presets import preset_config
from hfpatch.lab.simulate.implementations import check_sizes
from hfpatch.trainer import context, placement

# Fields of a config that would fail late: name, whether a value fits, what it must be.
_FIELDS = (
    ("max_position_embeddings", lambda n: isinstance(n, int) and n > 0, "1 or more"),
    ("dtype", lambda kind: isinstance(kind, torch.dtype), "one such as bfloat16"),
    ("hidden_act", lambda name: name in ACT2FN, "one of transformers'"),
)


def load_config(model):
    """The config of a preset with its overrides, or of a model, lengthened. Raises ValueError."""
    with loads("no model loads", model.model):
        if model.preset:
            values = preset_config(model.preset) | _overrides(model)
            check_sizes(values.get)  # LlamaConfig divides by some of them
            config = LlamaConfig(**values)
        else:
            if not os.path.exists(model.model):
                hub_config(model.model)  # says at once what transformers would try for a minute
            config = AutoConfig.from_pretrained(
                model.model, trust_remote_code=model.trust_remote_code
            )
        text = config.get_text_config()
        # Lists have one value a layer.
        sizes = {name: value for name, value in vars(text).items() if not isinstance(value, list)}
        check_sizes(sizes.get)
        for name, fits, what in _FIELDS:
            value = getattr(text, name, None)
            if value is not None and not fits(value):
                raise ValueError(f"{name} must be {what}, got {value!r}")
    return context.lengthened(config, model.max_position_embeddings, model.rope_scaling)


@contextmanager
def loads(what: str, name: str, hint: str = ""):
    """Turns any error of a folder's or the hub's content into a ValueError with the cause."""
    try:
        yield
    except Exception as error:
        # transformers' classes raise errors of many classes for broken content.
        if isinstance(error, (RuntimeError, MemoryError)) and "mismatched" not in str(error):
            raise
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.ENOMEM):
            raise
        why = " ".join(str(error).split())[:300].removeprefix("hfpatch: ").rstrip(".")
        if not (why and (isinstance(error, (OSError, ValueError)) or error.__cause__)):
            why = f"{type(error).__name__} {why}".rstrip()
        raise ValueError(f"hfpatch: {what} from {name!r}: {why}{hint}.") from error


def _overrides(model) -> dict:
    values = {}
    for item in filter(None, (model.config_overrides or "").split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(
                f"hfpatch: --config_overrides must be name=value, got {item!r}. Correct it."
            )
        try:
            values[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            values[name.strip()] = value
    # A LlamaConfig's own fields, without those that the tokenizer decides.
    decided = {"pad_token_id", "bos_token_id", "eos_token_id"}
    if model.train_tokenizer:
        decided.add("vocab_size")
    settable = {*inspect.signature(LlamaConfig).parameters} - decided
    settable -= {*inspect.signature(PretrainedConfig).parameters}
    for name in values:
        if name not in settable:
            who = "the tokenizer decides it" if name in decided else "LlamaConfig has no such size"
            raise ValueError(
                f"hfpatch: --config_overrides cannot set {name!r}: {who}. Leave it out."
                f"{did_you_mean(name, settable)}"
            )
    return values


def load_model(model, config, seed: int):
    """The model on the CPU, in --dtype, with LoRA where asked for. Raises ValueError."""
    torch.manual_seed(seed)  # new weights, of adapters too, are the same in each run and rank
    options = {"attn_implementation": model.attn_implementation}
    if model.preset:
        dtype = getattr(torch, model.dtype, torch.float32)
        with loads("no model is made", model.model):
            made = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    else:
        hint = (
            ""
            if model.allow_pickle
            else " (weights load from safetensors alone unless --allow_pickle)"
        )
        options |= {
            "dtype": getattr(torch, model.dtype, "auto"),
            "use_safetensors": None if model.allow_pickle else True,
            "trust_remote_code": model.trust_remote_code,
        }
        with loads("no weights load", model.model, hint):
            options |= _quantisation(model, config)
            made = AutoModelForCausalLM.from_pretrained(model.model, config=config, **options)
    # A cache would join packed documents, and nothing reads it in training.
    made.config.use_cache = False
    if model.fp8:
        from hfpatch.trainer.float8 import convert

        return convert(made, model.fp8)
    return with_lora(made, model) if model.lora_r else made


def expect_saves(model, say) -> None:
    """Tries what save_pretrained does before it writes: it would fail only after training.

    Sampling settings without do_sample get do_sample=True, which says so. ValueError for the rest.
    """
    if hasattr(model, "peft_config"):  # adapters alone are saved
        return
    settings = getattr(model, "generation_config", None)
    if settings is not None and settings.do_sample is not True and _flaw(settings, strict=True):
        sampling = copy.deepcopy(settings)
        sampling.do_sample = True
        if not _flaw(sampling, strict=True):
            settings.do_sample = True
            say("hfpatch: generation_config.json has sampling settings; do_sample=True is set.")
    flaws = {"config.json": _flaw(model.config)} if hasattr(model.config, "validate") else {}
    if settings is not None:
        flaws["generation_config.json"] = _flaw(settings, strict=True)
    for name, why in flaws.items():
        if why:
            raise ValueError(
                f"hfpatch: the trained model could not be saved: {name}: {why}. Correct that file."
            )


def _flaw(settings, **options) -> str:
    """Why settings do not validate, in one sentence; "" if they do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings.validate(**options)
    except Exception as error:  # of huggingface_hub's own classes
        return " ".join(str(error.__cause__ or error).split()).rstrip(".")
    return ""


def _quantisation(model, config) -> dict:
    """from_pretrained's argument for --load_in_4bit and --load_in_8bit."""
    if not (model.load_in_4bit or model.load_in_8bit):
        return {}
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, model.dtype, config.dtype)
    settings = BitsAndBytesConfig(
        load_in_4bit=model.load_in_4bit,
        load_in_8bit=model.load_in_8bit,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=dtype or torch.bfloat16,
    )
    return {"quantization_config": settings}


def with_lora(made, model):
    """The model with adapters on --lora_target_modules and its own weights frozen.

    Adapters are float32, as PEFT makes them, or bfloat16 for a placement whose optimizer rounds at
    random.
    """
    import peft

    names = model.lora_target_modules
    settings = peft.LoraConfig(
        r=model.lora_r,
        lora_alpha=model.lora_alpha or 2 * model.lora_r,
        lora_dropout=model.lora_dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    hint = "; --lora_target_modules takes names of layers with spaces between"
    with loads("no adapters are made", ", ".join(names), hint):
        made = peft.get_peft_model(made, settings)
    if placement.is_bf16_alone(model.placement):
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return made
