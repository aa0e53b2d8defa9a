"""Checks that weights, gradients, optimizer states and activations fit into the memory there is."""

from dataclasses import replace

import torch

from hfpatch.budget.adapters import Adapters
from hfpatch.budget.choice import choose
from hfpatch.budget.families import FAMILIES
from hfpatch.budget.formula import GiB, ModelShape
from hfpatch.budget.free import host_free
from hfpatch.budget.limits import environment_number
from hfpatch.budget.policy import Checkpointing
from hfpatch.lab.stock import STOCK, STOCK_CHECKPOINTING, memory_of
from hfpatch.planner.machine import gpu_limit, host_limit
from hfpatch.trainer.arguments import checkpointing_of


def check(config, model, data, args) -> None:
    """Raises ValueError if weights, gradients, moments and, on a GPU, activations do not fit.

    Nothing is checked under an engine or a placement, which spread or move them, nor for a family
    without a closed form.
    """
    if args.deepspeed or args.fsdp or model.placement or config.model_type not in FAMILIES:
        return
    shape = ModelShape.from_config(config)
    default = torch.float32 if model.preset else getattr(config, "dtype", None) or torch.float32
    itemsize = getattr(torch, model.dtype, default).itemsize
    if model.lora_r:
        shape = _adapted(shape, model)
    trained = shape.trained_parameters
    moments = 2 if args.optim in ("adamw_torch", "adamw_torch_fused") else 0
    states = shape.parameter_bytes(itemsize) + trained * (1 + moments) * shape.trained_itemsize(
        itemsize
    )
    have, gpu = device_memory(args)
    step = (
        _activations(shape, model, data, args, 2 if args.bf16 or args.fp16 else itemsize)
        if gpu
        else 0
    )
    if have is not None and states + step > have:
        activations = (
            f" and {step / GiB:.1f} GiB of activations" if gpu else " before any activation"
        )
        raise ValueError(
            f"hfpatch: weights, gradients and optimizer states of {shape.parameters / 1e9:.2f}B "
            f"parameters need {states / GiB:.1f} GiB{activations}, "
            f"{'the GPU' if gpu else 'this machine'} has {have / GiB:.1f} GiB; see `hfpatch "
            "plan`, --placement, --engine zero3_cpu_offload, or --lora_r."
        )


def _adapted(shape: ModelShape, model) -> ModelShape:
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
    """Bytes of a step beyond weights and gradients, by the closed form; 0 for Liger."""
    if model.impl == "liger":
        return 0
    sizes = {
        "batch": args.per_device_train_batch_size,
        "tokens": data.seq_len,
        "itemsize": itemsize,
    }
    policy = checkpointing_of(model) if model.impl == "hfpatch" else STOCK
    if isinstance(policy, Checkpointing):
        ranks = environment_number("LOCAL_WORLD_SIZE", 1, 1)
        policy = choose(policy, shape, **sizes, host_free=host_free(), n_ranks=ranks)
    elif policy == STOCK and args.gradient_checkpointing:
        policy = STOCK_CHECKPOINTING
    return memory_of(shape, policy, **sizes).beyond
