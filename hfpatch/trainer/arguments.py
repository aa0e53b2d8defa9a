"""Reads the flags of `hfpatch train`, and turns some into TrainingArguments."""

import math
import os
import traceback
import typing
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

from transformers import HfArgumentParser

from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.planner.limits import flag, plainly
from hfpatch.trainer import config_file, configs, placement
from hfpatch.trainer.flags import (
    CLASSES,
    COMPANIONS,
    DEFAULTS,
    LENGTHS,
    DataArguments,
    ModelArguments,
    TrainArguments,
)


def parse(argv) -> tuple[ModelArguments, DataArguments, TrainArguments]:
    """Reads `[config.yaml|config.json] [--flag value ...]`; a flag wins over the file.

    Raises ValueError for an unknown flag or key, a file that cannot be read, or values that
    contradict each other.
    """
    argv = list(argv)
    parser = HfArgumentParser(
        CLASSES,
        prog=config_file.typed(),
        allow_abbrev=False,
        description="Train a causal language model.",
    )
    parser.set_defaults(**DEFAULTS)
    actions = _actions(parser)
    namespace, explicit = None, set()
    _take_lengths(parser)
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
        from_file = config_file.flags(name, actions, _mappings())
        parser.error = partial(_refuse, where=f"{name}: ")
        namespace = parser.parse_args([word for words in from_file.values() for word in words])
        explicit = {*from_file}
    parser.error = _refuse
    named = [arg[2:].split("=")[0].replace("-", "_") for arg in argv if arg.startswith("--")]
    if namespace and "checkpointing" in named:
        namespace.checkpointing = []  # argparse would add to the file's words
    namespace, rest = parser.parse_known_args(argv, namespace)
    if rest:
        raise ValueError(
            f"hfpatch: unknown flag {rest[0]!r}{config_file.nearest(rest[0].lstrip('-'), actions)}"
        )
    explicit |= {actions[name].dest for name in named if name in actions}
    values = {name: _expanded(value) for name, value in vars(namespace).items()}
    for name, wanted in COMPANIONS.items():
        if values[name] != actions[name].default and not values[wanted]:
            raise ValueError(
                f"hfpatch: --{name} works with --{wanted} only. Add --{wanted}, or leave --{name} "
                "out."
            )
    model, data = (_make(cls, values) for cls in (ModelArguments, DataArguments))
    flags = {name: values[name] for name in explicit if name in values}
    model, config = _place(model, values, flags)
    if model.sp_size > 1:
        data = _share_rows(model, data, values, config)
    with refusals((ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        return model, data, _make(TrainArguments, values)


@contextmanager
def refusals(kinds=(ImportError, LookupError, TypeError, ValueError)):
    """Turns an error that transformers raises for a flag into a ValueError with one sentence."""
    try:
        yield
    except kinds as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
        if (
            isinstance(error, ModuleNotFoundError)
            or text.startswith("hfpatch: ")
            or _passed_through_us(error)
        ):
            raise
        kind = (
            ""
            if isinstance(error, ValueError)
            else f"transformers does not take these flags, {type(error).__name__}: "
        )
        raise ValueError(f"hfpatch: {kind}{' '.join(text.split())}") from error


def _passed_through_us(error: BaseException) -> bool:
    """Whether the error came through hfpatch's own code, which the callback runs inside Trainer.

    Then it is a bug, not a flag that transformers refuses.
    """
    names = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return any(
        name.startswith("hfpatch.") and not name.startswith("hfpatch.trainer.") for name in names
    )


def _actions(parser) -> dict:
    """argparse's action of each flag, by every spelling with underscores; --x before --no_x."""
    main = {action.dest: action for action in reversed(parser._actions)}
    spelled = (
        (option[2:].replace("-", "_"), action)
        for action in main.values()
        for option in action.option_strings
    )
    return main | dict(spelled)


def _take_lengths(parser) -> None:
    for action in parser._actions:
        if action.dest in LENGTHS:
            action.type = flag(LENGTHS[action.dest])


def _make(cls, values: dict):
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.init and f.name in values})


def _place(model: ModelArguments, values: dict, flags: dict):
    """Replaces --placement (or --deepspeed FILE) by the TrainingArguments it stands for.

    flags: those that the user set. Returns the model's arguments with the placement that "auto"
    chose, and the engine's config, None without an engine. Raises ValueError.
    """
    name = model.placement
    if isinstance(values["deepspeed"], str):
        if name:
            raise ValueError(
                "hfpatch: --placement and --deepspeed cannot be combined. Keep --placement."
            )
        name, values["deepspeed"] = flags.pop("deepspeed"), None
    if name == "auto":
        # Gradients and moments of adapters are small; the base decides, and no placement moves it.
        name = "gpu8bit" if model.lora_r else _fitting(model, values, flags)
    config = name and placement.engine_of(name, nvme_path=values["nvme_path"])
    if values["nvme_path"] and not config:
        raise ValueError(
            "hfpatch: --nvme_path works with --placement zero3_nvme_offload only. Add it."
        )
    if config:
        if name == "zero3-offload":
            values["bf16"] = True
        values.update(configs.training_arguments(config, flags=flags))
        placement.single_process_environment()
    elif name:
        values.update(placement.training_arguments(name, flags=flags))
    bf16 = placement.is_bf16_alone(name) and model.dtype == "auto"
    return replace(model, placement=name, dtype="bfloat16" if bf16 else model.dtype), config


def _fitting(model: ModelArguments, values: dict, flags: dict) -> str:
    from hfpatch.budget.free import gpu_free, host_free
    from hfpatch.trainer.loading import load_config

    gpu = gpu_free()
    if gpu is None:
        raise ValueError(
            "hfpatch: --placement auto needs a GPU, and there is none. Name a placement."
        )
    # A fused step in backward has neither accumulation nor a global norm, so a flag for one of
    # them excludes it.
    fused = not ({"max_grad_norm", "gradient_accumulation_steps"} & flags.keys())
    return placement.fitting(
        load_config(model), gpu_free=gpu, host_free=host_free(), fused=fused,
        seq_len=values["seq_len"], batch=values["per_device_train_batch_size"],
        gpus=placement.launched_processes(), sp_size=model.sp_size,
        gradient_accumulation_steps=values.get("gradient_accumulation_steps", 1),
        checkpointing=checkpointing_of(model),
    )  # fmt: skip


def _share_rows(model: ModelArguments, data: DataArguments, values: dict, config) -> DataArguments:
    """Replaces --sp_size by a parallelism_config; rows are padded to go evenly over the ranks.

    Raises ValueError.
    """
    from hfpatch.trainer.sequence import parallelism

    # transformers drops the flag under Ulysses; under context parallelism it would shift labels
    # within a part.
    if values.get("label_smoothing_factor"):
        raise ValueError(
            f"hfpatch: --label_smoothing_factor and --sp_size {model.sp_size} cannot be combined: "
            "it needs whole sequences. Leave one out."
        )
    engine, engine_values = (config.engine, config.values) if config else (None, {})
    values["parallelism_config"] = parallelism(
        engine, engine_values, size=model.sp_size, attention=model.attn_implementation
    )
    # Each rank of FSDP2's context parallelism takes two chunks.
    chunks = model.sp_size if engine == "deepspeed" else 2 * model.sp_size
    return replace(data, pad_multiple=math.lcm(data.pad_multiple, chunks))


def checkpointing_of(model: ModelArguments) -> Checkpointing:
    """The settings of --checkpointing. Raises ValueError."""
    return parse_checkpointing(model.checkpointing)


def apply_options(model: ModelArguments) -> bool | dict:
    """The value of `hfpatch.Callback(apply=...)`: False unless --impl hfpatch."""
    return model.impl == "hfpatch" and {"checkpointing": checkpointing_of(model)}


def _refuse(message, where=""):
    raise ValueError(f"hfpatch: {where}{plainly(message)} See {config_file.typed()} --help.")


def _mappings() -> set[str]:
    """The flags that take a mapping: JSON on the command line, keys and values in a file."""
    hints = (typing.get_type_hints(cls) for cls in CLASSES)
    kinds = (
        (name, [typing.get_origin(one) or one for one in typing.get_args(of)])
        for h in hints
        for name, of in h.items()
    )
    return {name for name, of in kinds if dict in of}


def _expanded(value):
    """Expands ~ in paths, which no shell expands in a file or behind a `=`."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value
