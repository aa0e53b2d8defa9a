"""Checks that weights, gradients, optimizer states and activations fit into the memory there is."""

from dataclasses import replace

import torch

from hfpatch.budget.hardware import CONTEXT_BYTES, GPUS, GiB
from hfpatch.lab.adapters import Adapters
from hfpatch.lab.shallow import STOCK, STOCK_CHECKPOINTING
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import evaluate
from hfpatch.planner.machine import gpu_limit, host_limit
from hfpatch.trainer.arguments import checkpointing_of


def check(config, model, data, args) -> None:
    """Raises ValueError if weights, gradients, moments and, on a GPU, activations do not fit.

    Nothing is checked under an engine or a placement, which spread or move them, nor for a model
    that cannot be planned.
    """
    if args.deepspeed or args.fsdp or model.placement or model.impl == "liger":
        return
    have, on_gpu = device_memory(args)
    try:
        parameters, states, step = _bytes(config, model, data, args, have, on_gpu)
    except ValueError:  # it runs, if it runs, without a plan
        return
    if have is not None and states + step > have:
        activations = (
            f" and {step / GiB:.1f} GiB of activations" if on_gpu else " before any activation"
        )
        raise ValueError(
            f"hfpatch: weights, gradients and optimizer states of {parameters / 1e9:.2f}B "
            f"parameters need {states / GiB:.1f} GiB{activations}, "
            f"{'the GPU' if on_gpu else 'this machine'} has {have / GiB:.1f} GiB; see `hfpatch "
            "plan`, --placement, --engine zero3_cpu_offload, or --lora_r."
        )


def _bytes(config, model, data, args, have, on_gpu: bool) -> tuple[int, int, int]:
    """(parameters, bytes of weights, gradients and moments, bytes of activations on a GPU)."""
    base = "4bit" if model.load_in_4bit else "8bit" if model.load_in_8bit else "bf16"
    adapters = Adapters.of(model.lora_r, base, model.lora_target_modules) if model.lora_r else None
    asked = checkpointing_of(model) if model.impl == "hfpatch" else STOCK
    if asked == STOCK and args.gradient_checkpointing:
        asked = STOCK_CHECKPOINTING
    default = torch.float32 if model.preset else getattr(config, "dtype", None) or torch.float32
    wide = not adapters and getattr(torch, model.dtype, default) == torch.float32
    gpu = replace(GPUS["h100"], memory_bytes=(have or 1 << 60) + CONTEXT_BYTES)
    sizes = {"seq_len": data.seq_len, "batch": args.per_device_train_batch_size}
    run = make_run(config, gpu=gpu, checkpointing=asked, adapters=adapters, **sizes)
    name = "adamw-fp32" if wide else "adamw"
    moments = 2 if args.optim in ("adamw_torch", "adamw_torch_fused") else 0
    states = (1 + wide) * (run.shape.nbytes + (1 + moments) * run.shape.trained_bytes)
    step = evaluate(run, name).gpu_bytes["activations"] if on_gpu else 0
    return run.shape.parameters, states, step


def device_memory(args) -> tuple[int | None, bool]:
    """Bytes of the device that trains (None if unknown), and whether it is a GPU."""
    if args.device.type == "cuda":
        return gpu_limit(args.device), True
    return host_limit(), False
