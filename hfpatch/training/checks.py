"""What cannot work is refused here, in a sentence, before a model is loaded or a file is written."""

import importlib.util
import json
import os
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hfpatch.memory.adapters import Adapters
from hfpatch.memory.choice import choose
from hfpatch.memory.families import FAMILIES
from hfpatch.memory.formula import GiB, ModelShape, step_memory
from hfpatch.memory.free import cores, gpu_limit, host_free, host_limit
from hfpatch.memory.limits import check_ranges, environment_number
from hfpatch.memory.policy import Checkpointing
from hfpatch.memory.sequence import why_not_shared_out
from hfpatch.training import folders
from hfpatch.training.arguments import checkpointing_of

_SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_parameters", "rope_scaling",
)  # fmt: skip
# Restored with the optimizer's state, whatever the flags say.
_OPTIMIZER = ("learning_rate", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
HOST_SECONDS = 30  # until MASTER_ADDR must be known: machines start one after the other
_MAY_DIFFER = (
    "max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "lr_floor", "lr_restarts", "max_grad_norm",
    "bf16", "fp16",
)  # fmt: skip
_ROWS = ("seq_length", "packing", "long_rows", "truncation_side", "validation_split", "streaming")


def environment() -> None:
    """What a launcher, or somebody in its place, put into the environment. Raises ValueError."""
    ranks = environment_number("WORLD_SIZE", 1, 1)
    launched = (
        environment_number("LOCAL_RANK", -1, -1) >= 0
    )  # without it this process is alone, whatever the others say
    rank = environment_number("RANK", 0, 0, ranks - 1 if launched else None)
    environment_number("LOCAL_WORLD_SIZE", 1, 1)
    port = environment_number("MASTER_PORT", 29500, 1, 65535)
    if launched and ranks > 1:
        address = os.environ.get("MASTER_ADDR", "localhost")
        _known_host(address)
        if rank and not environment_number("LOCAL_RANK", -1, -1):
            _say_whom_we_wait_for(rank, address, port)
    host_free()  # HFPATCH_HOST_MEMORY, which the first step would ask for


def _known_host(address: str) -> None:
    """ValueError for a name that nobody knows after HOST_SECONDS: torch would wait for it half an hour."""
    end = time.monotonic() + HOST_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"hfpatch: expected a host in the environment's MASTER_ADDR, {address!r} is not known after "
                    f"{HOST_SECONDS} s ({error}); correct it."
                ) from error
        time.sleep(0.5)


def _say_whom_we_wait_for(rank: int, address: str, port: int) -> None:
    """A sentence on stderr where rank 0 does not answer yet: torch waits for it half an hour without a word."""
    try:
        socket.create_connection((address, port), timeout=HOST_SECONDS / 10).close()
    except OSError as error:
        print(
            f"hfpatch: rank {rank} waits for rank 0 at {address}:{port}, which does not answer yet ({error}); if this lasts, "
            "look whether it runs there and whether a firewall closes the port.",
            file=sys.stderr,
            flush=True,
        )


def _offload_folder(model) -> None:
    """ValueError for an --offload that no folder can be made of: the first step would say so, when the model is loaded."""
    settings = checkpointing_of(model)
    directory = settings.directory if model.impl == "hfpatch" and isinstance(settings, Checkpointing) else None
    if directory is None:
        return
    path = Path(directory).absolute()
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "which may not be written to" if there.is_dir() else "which is no folder"
        raise ValueError(f"hfpatch: expected a folder for --offload, {there} came, {what}; name another.")


def flags(model, data, args) -> None:
    """Flags out of range, and flags that contradict each other. Raises ValueError."""
    check_ranges(vars(model) | vars(data) | vars(args), "_")
    launched = environment_number("WORLD_SIZE", 1) if "LOCAL_RANK" in os.environ else 1
    if launched > 1 and args.world_size == 1:  # each would train by itself, into one folder
        raise ValueError(
            f"hfpatch: expected {launched} processes that train together, as they were launched, each sees itself alone, having "
            "no GPU; pass --use_cpu True and no engine, or launch one."
        )
    most = 16 + 4 * cores()
    if args.dataloader_num_workers > most:
        raise ValueError(
            f"hfpatch: --dataloader_num_workers {args.dataloader_num_workers} is as many processes, this one has {cores()} "
            f"cores; take {most} or fewer."
        )
    if args.max_steps == 0:
        raise ValueError(
            "hfpatch: expected --max_steps of 1 or more, 0 came; leave it out to train --num_train_epochs."
        )
    if (model.model is None) == (model.preset is None):
        came = "both" if model.model else "none"
        raise ValueError(f"hfpatch: expected one of --model and --preset, {came} came; name one model.")
    if not data.data:
        raise ValueError("hfpatch: expected --data with files, folders, or a hub data set, none came; name some.")
    if model.config_overrides and not model.preset:
        raise ValueError("hfpatch: --config_overrides changes a --preset, --model came; edit the model's config.json.")
    if model.preset and not model.tokenizer and not model.train_tokenizer:
        raise ValueError("hfpatch: a preset has no tokenizer; give --tokenizer NAME or --train_tokenizer SIZE.")
    if model.tokenizer and model.train_tokenizer:
        raise ValueError("hfpatch: expected one of --tokenizer and --train_tokenizer, both came; keep one.")
    if model.model and model.train_tokenizer:
        raise ValueError("hfpatch: --train_tokenizer makes tokens that --model never saw; use it with --preset.")
    bits = [f"--load_in_{n}bit" for n in (4, 8) if getattr(model, f"load_in_{n}bit")]
    if bits and not model.lora_r:
        raise ValueError(
            f"hfpatch: {bits[0]} freezes the weights that it quantises, no --lora_r came; add --lora_r 16."
        )
    if len(bits) > 1:
        raise ValueError("hfpatch: expected one of --load_in_4bit and --load_in_8bit, both came; keep one.")
    if bits and model.preset:
        raise ValueError(f"hfpatch: {bits[0]} quantises trained weights as they load, --preset came; name a --model.")
    if bits and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"hfpatch: {bits[0]} needs the package bitsandbytes, it is missing; pip install bitsandbytes.")
    if bits and (args.deepspeed or args.fsdp):
        raise ValueError(f"hfpatch: {bits[0]} keeps a whole base on each GPU, an engine came; drop one.")
    if model.impl == "liger":
        if not torch.cuda.is_available() or args.use_cpu:
            raise ValueError("hfpatch: --impl liger needs a GPU (Liger has no CPU path), none came; use hf or hfpatch.")
        if importlib.util.find_spec("liger_kernel") is None:
            raise ValueError(
                "hfpatch: --impl liger needs the package liger-kernel, it is missing; pip install liger-kernel."
            )
    elif args.use_liger_kernel:
        raise ValueError(f"hfpatch: --use_liger_kernel and --impl {model.impl} both patch the model; use --impl liger.")
    if model.impl == "hfpatch" and model.checkpointing == "auto" and args.gradient_checkpointing:
        raise ValueError(
            "hfpatch: --gradient_checkpointing would checkpoint what hfpatch checkpoints already; drop it, or use "
            "--checkpointing off."
        )
    places = [f"--{name}" for name in ("offload", "checkpoint_every", "tile") if getattr(model, name) != "auto"]
    if model.impl != "hfpatch" and (places or model.rope_float64):
        raise ValueError(
            f"hfpatch: --offload, --checkpoint_every, --tile and --rope_float64 belong to --impl hfpatch, {model.impl} came."
        )
    if places and model.checkpointing == "off":
        raise ValueError(
            f"hfpatch: {places[0]} says how layers are checkpointed, --checkpointing off came; drop one of them."
        )
    for name in ("checkpoint_every", "tile"):
        value = getattr(model, name)
        if value != "auto" and not (value.isdigit() and int(value) > 0):
            raise ValueError(f"hfpatch: expected auto or a whole number above 0 for --{name}, {value!r} came.")
    _offload_folder(model)
    if data.validation_split and data.eval_data:
        raise ValueError("hfpatch: expected one of --validation_split and --eval_data, both came; keep one.")
    if data.streaming and data.validation_split:
        raise ValueError("hfpatch: --validation_split needs all of the data, --streaming came; give --eval_data.")
    if data.streaming and model.train_tokenizer:
        raise ValueError("hfpatch: --train_tokenizer reads all of the data, --streaming came; give --tokenizer.")
    if data.streaming and args.max_steps <= 0:
        raise ValueError("hfpatch: --streaming needs --max_steps, for the length of the data is unknown; give it.")
    evaluates = bool(data.eval_data or data.validation_split)
    if (args.eval_strategy != "no" or args.early_stopping_patience) and not evaluates:
        raise ValueError("hfpatch: evaluation needs --eval_data or --validation_split, none came; give one.")
    if args.early_stopping_patience and args.eval_strategy == "no":
        raise ValueError("hfpatch: --early_stopping_patience needs --eval_strategy steps or epoch, no came; set it.")
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if (args.lr_floor or args.lr_restarts) and schedule != "cosine":
        raise ValueError(f"hfpatch: --lr_floor and --lr_restarts shape the cosine, {schedule} came; use cosine.")
    if data.chat_template and not Path(data.chat_template).is_file():
        raise ValueError(f"hfpatch: expected a template at --chat_template {data.chat_template}, there is no file.")


def begin(folder: str, resume) -> tuple[str | None, list[str]]:
    """The checkpoint to go on from (None: from the start), and the folders to set aside first.

    resume: a folder, or "true" for the newest whole checkpoint of `folder`. Raises ValueError where there is none, or
    where `folder` holds another run.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"hfpatch: expected a folder for --output_dir, {folder} is a file; name another.")
    if str(resume or "false").lower() == "false":
        _no_other_run(path)
        return None, list(map(str, folders.checkpoints(path)))
    if str(resume).lower() != "true":
        chosen = Path(resume)
        why = folders.flaw(chosen)
        if why:
            whole = next((p for p in folders.checkpoints(chosen.parent) if not folders.flaw(p)), None)
            fix = f"{whole} is whole" if whole else "check the path"
            raise ValueError(f"hfpatch: expected a checkpoint at {resume} to resume from, {why}; {fix}.")
        if chosen.resolve().parent != path.resolve():
            _no_other_run(path)
    else:
        found = {p: folders.flaw(p) for p in folders.checkpoints(path)}
        chosen = next((p for p, why in found.items() if not why), None)
        if chosen is None and any((p / folders.STATE_FILE).exists() for p in found):
            listed = "; ".join(f"{p.name}: {why}" for p, why in found.items())
            raise ValueError(
                f"hfpatch: no checkpoint in {folder} is whole ({listed}); name another one, or start in another --output_dir."
            )
        if chosen is None and not found and not (path / folders.SAVING).is_dir():
            raise ValueError(
                f"hfpatch: expected a checkpoint in {folder} to resume from, none came; check --output_dir."
            )
    if chosen is None:  # killed while it wrote its first checkpoint
        return None, list(map(str, folders.checkpoints(path)))
    step = folders.step_of(chosen)
    later = [p for p in folders.checkpoints(path) if p.resolve() != chosen.resolve()]
    later = [p for p in later if step is None or folders.step_of(p) > step]
    return str(chosen), list(map(str, later))


def _no_other_run(path: Path) -> None:
    """ValueError where the folder holds a model or a checkpoint that was once finished."""
    held = [p.name for p in folders.checkpoints(path) if (p / folders.STATE_FILE).exists()]
    if path.is_dir():
        held += sorted(p.name for p in path.iterdir() if p.suffix == ".safetensors")
    if held:
        raise ValueError(
            f"hfpatch: {path} holds another run ({held[0]}); go on with --resume_from_checkpoint True, or name "
            "another --output_dir."
        )


def agreed(args, look):
    """What look() finds on rank 0, on all ranks: what it looks at may change while the others come. Raises its ValueError."""
    if args.world_size <= 1:
        return look()
    found = [None, None]
    if args.process_index == 0:
        try:
            found[0] = look()
        except ValueError as error:
            found[1] = str(error)
    torch.distributed.broadcast_object_list(found, src=0, device=args.device)
    if found[1]:
        raise ValueError(found[1])
    return found[0]


@contextmanager
def writing_to(args, aside: list[str]):
    """--output_dir is this run's, and the folders `aside` are out of its way (gives their names). Raises ValueError."""
    held = []

    def take():
        held.append(folders.Lock(args.output_dir))
        return folders.set_aside(map(Path, aside))

    try:
        yield agreed(args, take)
        if args.world_size > 1:
            torch.distributed.barrier()  # a rank that ends first may take the launcher, and with it the others, along
    finally:
        for lock in held:
            lock.close()


def checkpoint_matches(checkpoint: str, record: dict) -> str | None:
    """The checkpoint is of this model, of this data in this order, and its optimizer is the one asked for.

    Raises ValueError listing what differs. What may differ, for it takes effect, comes back as one sentence, or None.
    """
    file, config = Path(checkpoint) / folders.RUN_FILE, Path(checkpoint) / "config.json"
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
    elif config.is_file():  # another script's checkpoint: only the model can be compared
        values = json.loads(config.read_text(encoding="utf-8"))
        before = {"model": {k: values[k] for k in record["model"] if k in values}}
    else:
        return None
    different, allowed = [], []
    for key, value in record.items():
        old, new = (v if isinstance(v, dict) else {key: v} for v in (before.get(key, {}), value))
        said = [f"{k} {old[k]} there, {v} here" for k, v in new.items() if k in old and old[k] != v]
        (allowed if key == "may_differ" else different).extend(said)
    if different:
        raise ValueError(
            f"hfpatch: {checkpoint} does not match this run: {'; '.join([*different, *allowed])}; use the same flags and "
            "data, or start anew with --model set to the checkpoint."
        )
    return f"going on with what differs from the saved run: {'; '.join(allowed)}." if allowed else None


def length(seq_length: int, config) -> None:
    """The rope table's limit. Raises ValueError."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit and seq_length > limit:
        raise ValueError(
            f"hfpatch: --seq_length {seq_length} is over the model's {limit} positions (max_position_embeddings); "
            "shorten it, or lengthen the model with --rope_scaling or --max_position_embeddings."
        )


def sharing(sp_size: int, config) -> None:
    """Heads that do not go evenly over the ranks that share each sequence, which DeepSpeed refuses. Raises ValueError."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    reason = heads and why_not_shared_out(heads, getattr(config, "num_key_value_heads", None) or heads, sp_size)
    if reason:
        raise ValueError(
            f"hfpatch: --sp_size {sp_size} came, but {reason}, which DeepSpeed's Ulysses refuses; pass another size, or "
            "--engine fsdp2."
        )


def memory_of(config, model, data, args) -> None:
    """Weights, gradients, Adam's moments and, on a GPU, the planner's activations against what there is. ValueError.

    An engine or a placement spreads or moves them, so there its own plan answers; so it does for families without a
    closed form.
    """
    if args.deepspeed or args.fsdp or model.placement or config.model_type not in FAMILIES:
        return
    shape = ModelShape.from_config(config)
    default = torch.float32 if model.preset else getattr(config, "dtype", None) or torch.float32
    itemsize = getattr(torch, model.dtype, default).itemsize
    if model.lora_r:
        shape = as_adapted(shape, model)
    trained = shape.trained_parameters
    moments = 2 if args.optim in ("adamw_torch", "adamw_torch_fused") else 0
    states = shape.parameter_bytes(itemsize) + trained * (1 + moments) * shape.trained_itemsize(itemsize)
    have, gpu = device_memory(args)
    step = _activations(shape, model, data, args, 2 if args.bf16 or args.fp16 else itemsize) if gpu else 0
    if have is not None and states + step > have:
        activations = f" and {step / GiB:.1f} GiB of activations" if gpu else " before any activation"
        raise ValueError(
            f"hfpatch: weights, gradients and optimizer states of {shape.parameters / 1e9:.2f}B parameters need "
            f"{states / GiB:.1f} GiB{activations}, {'the GPU' if gpu else 'this machine'} has {have / GiB:.1f} GiB; "
            "see `hfpatch plan`, --placement, --engine zero3_cpu_offload, or --lora_r."
        )


def as_adapted(shape: ModelShape, model) -> ModelShape:
    """The shape with the adapters of the flags, where its closed form knows their layers."""
    base = "4bit" if model.load_in_4bit else "8bit" if model.load_in_8bit else "bf16"
    try:
        return replace(shape, adapters=Adapters.of(model.lora_r, base, model.lora_target_modules))
    except ValueError:  # names in the form of PEFT, experts
        return shape


def device_memory(args) -> tuple[int | None, bool]:
    """Bytes of the device that trains (None if unknown), and whether it is a GPU."""
    if args.device.type == "cuda":
        return gpu_limit(args.device), True
    return host_limit(), False


def _activations(shape: ModelShape, model, data, args, itemsize: int) -> int:
    """Bytes of a step on the device beyond weights and gradients, by the closed form; 0 for Liger, which it lacks."""
    if model.impl == "liger":
        return 0
    sizes = {"batch": args.per_device_train_batch_size, "tokens": data.seq_length, "itemsize": itemsize}
    policy = checkpointing_of(model) if model.impl == "hfpatch" else "stock"
    if isinstance(policy, Checkpointing):
        ranks = environment_number("LOCAL_WORLD_SIZE", 1, 1)
        policy = choose(policy, shape, **sizes, host_free=host_free(), n_ranks=ranks)
    elif policy == "stock" and args.gradient_checkpointing:
        policy = "stock-checkpointing"
    return step_memory(shape, policy, **sizes).beyond


def engine_is_on(args, accelerator, checkpoint: str | None = None) -> None:
    """ValueError where DeepSpeed was asked for and accelerate chose something else: the weights are split, nobody gathers them.
    Likewise where FSDP was, and each process would train all weights, and where a checkpoint was written under FSDP, and this run
    is not under it, or the other way round."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if args.deepspeed and kind != "DEEPSPEED":
        raise ValueError(
            f"hfpatch: expected accelerate to run DeepSpeed as its config asks, it runs {kind}; "
            "launch with `accelerate launch --use_deepspeed --deepspeed_config_file FILE`, or with plain python."
        )
    if (getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP") == "true") and kind != "FSDP":
        raise ValueError(
            f"hfpatch: expected accelerate to run FSDP as its config asks, it runs {kind}: its FSDP is for GPUs, started as by "
            "`accelerate launch` without --cpu; on CPUs leave FSDP out."
        )
    if checkpoint is not None and (kind == "FSDP") is not any(Path(checkpoint).glob("pytorch_model_fsdp*")):
        here, there = ("under", "without") if kind == "FSDP" else ("without", "under")
        raise ValueError(
            f"hfpatch: {checkpoint} was saved {there} FSDP, this run of {args.world_size} processes is {here} it; launch as many "
            "with the same --engine, or start anew with --model set to what scripts/consolidate.py makes of it."
        )


def run_record(config, model, data, args, fingerprint: str) -> dict:
    """What a resumed run must share with the one before, for the same batches, weights and optimizer; and what it may not.

    The optimizer's settings come back with its state: another value on the command line would be ignored.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    ranks = {"world_size": args.world_size}
    return {
        "model": {name: getattr(config, name) for name in _SIZES if getattr(config, name, None) is not None},
        "lora_r": model.lora_r,
        "lora": {
            "lora_target_modules": list(model.lora_target_modules),
            "load_in_4bit": model.load_in_4bit,
            "load_in_8bit": model.load_in_8bit,
        },
        "data": fingerprint,
        "rows": {name: getattr(data, name) for name in _ROWS},
        "seed": args.seed,
        "data_seed": args.data_seed,
        "batch": batch,
        "optimizer": {name: _plain(getattr(args, name)) for name in _OPTIMIZER},
        "engine": {"engine": "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else "none"}
        | (ranks if args.deepspeed else {}),
        "may_differ": ({} if args.deepspeed else ranks) | {name: _plain(getattr(args, name)) for name in _MAY_DIFFER},
    }


def _plain(value) -> str:
    return str(getattr(value, "value", value))  # the word of an enumeration
