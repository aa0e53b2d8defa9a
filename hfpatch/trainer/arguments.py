"""Reads the flags of `hfpatch train`, and turns some into TrainingArguments."""

import math
import os
import traceback
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

from transformers import HfArgumentParser

from hfpatch.budget.limits import did_you_mean, parse_length
from hfpatch.budget.policy import Checkpointing, parse_checkpointing
from hfpatch.planner.limits import check_ranges, flag, plainly
from hfpatch.trainer import configs, placement, run_file
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
    # [Step 1] Make the parser.
    argv = list(argv)
    parser = HfArgumentParser(
        CLASSES,
        prog="hfpatch train",
        allow_abbrev=False,
        description="Train a causal language model.",
    )
    parser.set_defaults(**DEFAULTS)
    actions = _actions(parser)
    for name in LENGTHS:
        actions[name].type = flag(parse_length)
    # [Step 2] Read the file, then the flags, which win.
    namespace = None
    words = []
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
        words = run_file.flags(name, actions)
        parser.error = partial(_refuse, where=f"{name}: ")
        namespace = parser.parse_args(words)
        if any(word.startswith("--checkpointing") for word in argv):
            namespace.checkpointing = []  # argparse would add to the file's words
    parser.error = _refuse
    namespace, rest = parser.parse_known_args(argv, namespace)
    if rest:
        near = did_you_mean(rest[0].partition("=")[0], [f"--{name}" for name in actions])
        near = near or " See hfpatch train --help."
        raise ValueError(f"hfpatch: unknown flag {rest[0]!r}.{near}")
    # [Step 3] Check the values.
    values = {name: _expanded(value) for name, value in vars(namespace).items()}
    check_ranges(values, "_")
    for name, wanted in COMPANIONS.items():
        if values[name] != actions[name].default and not values[wanted]:
            raise ValueError(
                f"hfpatch: --{name} works with --{wanted} only. Add --{wanted}, or leave --{name} "
                "out."
            )
    # [Step 4] Choose the placement. `flags` holds what the user wrote, even where it equals a
    # default.
    named = [w[2:].partition("=")[0].replace("-", "_") for w in words + argv if w.startswith("--")]
    flags = {actions[n].dest: values[actions[n].dest] for n in named if n in actions}
    model = _make(ModelArguments, values)
    data = _make(DataArguments, values)
    model, config = _place(model, values, flags)
    # [Step 5] Share sequences between ranks, and make the TrainingArguments.
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
        # str() of a KeyError quotes its text.
        quoted = isinstance(error, KeyError) and error.args
        text = " ".join(str(error.args[0] if quoted else error).split())
        if isinstance(error, ModuleNotFoundError) or text.startswith("hfpatch: "):
            raise
        if _passed_through_us(error):
            raise
        if not isinstance(error, ValueError):
            text = f"transformers does not take these flags, {type(error).__name__}: {text}"
        raise ValueError(f"hfpatch: {text}") from error


def _passed_through_us(error: BaseException) -> bool:
    """Whether the error came through hfpatch's own code, which the callback runs inside Trainer.

    Then it is a bug, not a flag that transformers refuses.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    ours = [name for name in names if name.startswith("hfpatch.")]
    return any(not name.startswith("hfpatch.trainer.") for name in ours)


def _actions(parser) -> dict:
    """argparse's action of each flag, by every spelling with underscores; --x before --no_x."""
    found = {action.dest: action for action in reversed(parser._actions)}
    for action in [*found.values()]:
        for option in action.option_strings:
            found[option[2:].replace("-", "_")] = action
    return found


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
        name = flags.pop("deepspeed")
        values["deepspeed"] = None
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
    values["parallelism_config"] = parallelism(
        config, size=model.sp_size, attention=model.attn_implementation
    )
    # Each rank of FSDP2's context parallelism takes two chunks.
    chunks = model.sp_size if config.engine == "deepspeed" else 2 * model.sp_size
    return replace(data, pad_multiple=math.lcm(data.pad_multiple, chunks))


def checkpointing_of(model: ModelArguments) -> Checkpointing:
    """The settings of --checkpointing. Raises ValueError."""
    return parse_checkpointing(model.checkpointing)


def apply_options(model: ModelArguments) -> bool | dict:
    """The value of `hfpatch.Callback(apply=...)`: False unless --impl hfpatch."""
    return model.impl == "hfpatch" and {"checkpointing": checkpointing_of(model)}


def _refuse(message, where=""):
    raise ValueError(f"hfpatch: {where}{plainly(message)} See hfpatch train --help.")


def _expanded(value):
    """Expands ~ in paths, which no shell expands in a file or behind a `=`."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value
