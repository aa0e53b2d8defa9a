"""Refuses flags and surroundings that cannot work, before a model loads or a file is written."""

import importlib.util
import os
from itertools import chain
from pathlib import Path

import torch

from hfpatch.budget.limits import environment_number
from hfpatch.budget.policy import Checkpointing
from hfpatch.planner.machine import cores
from hfpatch.trainer.arguments import checkpointing_of
from hfpatch.trainer.placement import launched_processes
from hfpatch.trainer.run_file import NEEDED


def _expect_folder(flag: str, name: str) -> None:
    """Raises ValueError for a folder that is none and cannot be made."""
    path = Path(name).absolute()
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "which may not be written to" if there.is_dir() else "a file"
        raise ValueError(f"hfpatch: --{flag} must be a folder, got {there}, {what}. Name another.")


def flags(model, data, args) -> None:
    """Raises ValueError for flags that contradict each other."""
    rules = chain(
        _process_rules(args),
        _model_rules(model, data),
        _quantisation_rules(model, args),
        _float8_rules(model, args),
        _implementation_rules(model, args),
        _data_rules(model, data, args),
        _report_rules(args),
    )
    for broken, sentence in rules:  # in order: later rules build on earlier ones
        if broken:
            raise ValueError(f"hfpatch: {sentence}")
    _expect_folder("output_dir", args.output_dir)
    directory = checkpointing_of(model).directory
    if directory is not None and model.impl == "hfpatch":
        _expect_folder("checkpointing", directory)


def _process_rules(args):
    launched = launched_processes()
    # Each process would train by itself, into one folder.
    yield (
        launched > 1 and args.world_size == 1,
        f"the {launched} processes of this launch must train together, and each sees itself alone: "
        "there is no GPU. Pass --use_cpu True and no engine, or launch one.",
    )
    most = 16 + 4 * cores()
    yield (
        args.dataloader_num_workers > most,
        f"--dataloader_num_workers must be {most} or less with {cores()} cores, got "
        f"{args.dataloader_num_workers}. Take fewer.",
    )
    yield (
        args.max_steps == 0,
        "--max_steps must be 1 or more, got 0. Leave it out to train --num_train_epochs.",
    )


def _model_rules(model, data):
    yield model.model is None, NEEDED["model"]
    yield not data.data, NEEDED["data"]
    yield (
        model.config_overrides and not model.preset,
        (
            f"--config_overrides works with a preset only, got --model {model.model}. Edit its "
            "config.json."
        ),
    )
    yield (
        model.preset and not model.tokenizer and not model.train_tokenizer,
        (
            f"the preset {model.preset} has random weights and no tokenizer. Give --tokenizer NAME "
            "or --train_tokenizer SIZE."
        ),
    )
    yield (
        model.tokenizer and model.train_tokenizer,
        ("--tokenizer and --train_tokenizer cannot be combined. Keep one."),
    )
    yield (
        not model.preset and model.train_tokenizer,
        (
            f"--train_tokenizer works with a preset only: {model.model} never saw its tokens. Leave "
            "it out."
        ),
    )


def _quantisation_rules(model, args):
    bits = [f"--load_in_{n}bit" for n in (4, 8) if getattr(model, f"load_in_{n}bit")]
    if not bits:
        return
    yield (
        not model.lora_r,
        f"{bits[0]} freezes the weights that it quantises and needs adapters. Add --lora_r 16.",
    )
    yield len(bits) > 1, "--load_in_4bit and --load_in_8bit cannot be combined. Keep one."
    yield (
        model.preset,
        f"{bits[0]} needs trained weights, got the preset {model.preset}. Name a folder or a hub "
        "id.",
    )
    yield (
        _missing("bitsandbytes"),
        f"{bits[0]} needs bitsandbytes. Run: pip install bitsandbytes.",
    )
    yield (
        args.has_engine,
        f"{bits[0]} and an engine cannot be combined: the base is whole on each GPU. Leave one out.",
    )


def _float8_rules(model, args):
    yield (
        model.fp8 and model.lora_r,
        f"--fp8 {model.fp8} and --lora_r cannot be combined. Leave one out.",
    )
    yield (
        model.fp8 and args.has_engine,
        f"--fp8 {model.fp8} and an engine cannot be combined. Leave one out.",
    )
    yield model.fp8 and _missing("torchao"), "--fp8 needs torchao. Run: pip install torchao."


def _implementation_rules(model, args):
    ours = model.impl == "hfpatch"
    liger = model.impl == "liger"
    asked = checkpointing_of(model)
    yield (
        liger and (not torch.cuda.is_available() or args.use_cpu),
        ("--impl liger needs a GPU, and there is none. Use hf or hfpatch."),
    )
    yield (
        liger and _missing("liger_kernel"),
        "--impl liger needs liger-kernel. Run: pip install liger-kernel.",
    )
    yield (
        not liger and args.use_liger_kernel,
        (f"--use_liger_kernel and --impl {model.impl} both patch the model. Use --impl liger."),
    )
    yield (
        ours and asked.offload != "off" and args.gradient_checkpointing,
        (
            "--gradient_checkpointing and hfpatch's checkpointing cannot be combined. Leave it "
            "out, or use --checkpointing off."
        ),
    )
    yield (
        model.attn_implementation == "flash_attention_2" and _missing("flash_attn"),
        "--attn_implementation flash_attention_2 needs flash-attn. Leave it out: hfpatch brings its "
        "own attention.",
    )
    yield (
        not ours and asked not in (Checkpointing("off"), Checkpointing()),
        f"--checkpointing works with --impl hfpatch only, got {model.impl}. Leave it out.",
    )


def _report_rules(args):
    """A reporter that is not installed; Trainer would say so after the data are tokenized."""
    from transformers.integrations import INTEGRATION_TO_CALLBACK

    for name in args.report_to:
        try:
            INTEGRATION_TO_CALLBACK.get(name, object)()
        except (RuntimeError, ImportError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            yield True, f"--report_to {name}: {why}, or pass --report_to none."


def _data_rules(model, data, args):
    yield (
        data.validation_split and data.eval_data,
        ("--validation_split and --eval_data cannot be combined. Keep one."),
    )
    yield (
        data.streaming and data.validation_split,
        (
            "--validation_split and --streaming cannot be combined: it needs all of the data. Give "
            "--eval_data."
        ),
    )
    yield (
        data.streaming and model.train_tokenizer,
        (
            "--train_tokenizer and --streaming cannot be combined: it reads all of the data. Give "
            "--tokenizer."
        ),
    )
    yield (
        data.streaming and args.max_steps <= 0,
        ("--streaming needs --max_steps: the length of the data is unknown. Add it."),
    )
    evaluates = data.eval_data or data.validation_split
    chosen = {
        "--early_stopping_patience": args.early_stopping_patience,
        "--load_best_model_at_end": args.load_best_model_at_end,
        "--save_strategy best": args.save_strategy == "best",
        "--metric_for_best_model": args.metric_for_best_model,
    }
    asked = chosen | {
        "--eval_on_start": args.eval_on_start,
        "--eval_strategy": args.eval_strategy != "no",
    }
    for name, on in asked.items():
        yield on and not evaluates, f"{name} needs --eval_data or --validation_split. Add one."
    for name, on in chosen.items():
        yield (
            on and args.eval_strategy == "no",
            f"{name} needs --eval_strategy steps or epoch. Add it.",
        )
    yield (
        args.optim_args and args.optim in ("adamw_torch", "adamw_torch_fused"),
        f"--optim_args works with another optimizer than {args.optim.value}. Add --optim.",
    )
    yield (
        data.chat_template and not Path(data.chat_template).is_file(),
        (
            f"--chat_template must be a file, and there is none at {data.chat_template}. Check the "
            "path."
        ),
    )


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def length(seq_len: int, config) -> None:
    """Raises ValueError for rows longer than the model's rotary table."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit and seq_len > limit:
        raise ValueError(
            f"hfpatch: --seq-len must be at most the model's {limit} positions "
            f"(max_position_embeddings), got {seq_len}. Shorten it, or extend the model with "
            "--rope_scaling or --max_position_embeddings."
        )


def engine_is_on(args, accelerator, checkpoint: str | None = None) -> None:
    """Raises ValueError if accelerate does not run the engine of the flags and of the checkpoint.

    DeepSpeed left out: the weights are split and nobody gathers them. FSDP left out: each process
    trains all weights. A checkpoint of FSDP without it, or the other way round, does not load, nor
    one of ZeRO with another number of processes.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if args.deepspeed and kind != "DEEPSPEED":
        raise ValueError(
            f"hfpatch: accelerate must run DeepSpeed, as the config asks, and runs {kind}. Launch "
            "with `accelerate launch --use_deepspeed --deepspeed_config_file FILE`, or with plain "
            "python."
        )
    fsdp = getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp and kind != "FSDP":
        raise ValueError(
            f"hfpatch: accelerate must run FSDP, as the config asks, and runs {kind}: its FSDP "
            "needs GPUs and `accelerate launch` without --cpu. On CPUs leave FSDP out."
        )
    if checkpoint is None:
        return
    folder = Path(checkpoint)
    parts = len([*folder.glob("*/*zero_pp_rank_*_optim_states.pt")])
    # Machines with storage of their own have their own processes' parts.
    expected = (0, args.world_size, environment_number("LOCAL_WORLD_SIZE", args.world_size))
    if parts not in expected and not any(folder.glob("*_universal")):
        raise ValueError(
            f"hfpatch: the run must have as many processes as saved {checkpoint} under ZeRO, "
            f"{parts}, got {args.world_size}. Launch as many, or start a new run from its weights "
            "(guide: Export)."
        )
    if (kind == "FSDP") is not any(folder.glob("pytorch_model_fsdp*")):
        here, there = ("under", "without") if kind == "FSDP" else ("without", "under")
        raise ValueError(
            f"hfpatch: {checkpoint} was saved {there} FSDP, and this run of {args.world_size} "
            f"processes is {here} it. Launch as many with the same --placement, or start a new run "
            "with --model set to what `accelerate merge-weights` makes of it."
        )
