"""Checks that weights, gradients, optimizer states and activations fit into the memory there is."""

from dataclasses import replace

from hfpatch.budget.hardware import CONTEXT_BYTES, GPUS, GiB
from hfpatch.lab.adapters import Adapters
from hfpatch.planner.answer import make_run
from hfpatch.planner.evaluate import evaluate
from hfpatch.planner.machine import gpu_limit, host_limit
from hfpatch.planner.model import STOCK, STOCK_CHECKPOINTING
from hfpatch.trainer.arguments import checkpointing_of


def check(config, model, data, args) -> None:
    """Raises ValueError if weights, gradients, moments and, on a GPU, activations do not fit.

    Nothing is checked under an engine or a placement, which spread or move them.
    """
    if args.deepspeed or args.fsdp or model.placement or model.impl == "liger":
        return
    have, on_gpu = device_memory(args)
    base = "4bit" if model.load_in_4bit else "8bit" if model.load_in_8bit else "bf16"
    adapters = Adapters.of(model.lora_r, base, model.lora_target_modules) if model.lora_r else None
    asked = checkpointing_of(model) if model.impl == "hfpatch" else STOCK
    if asked == STOCK and args.gradient_checkpointing:
        asked = STOCK_CHECKPOINTING
    wide = not adapters and model.dtype in (None, "float32")
    gpu = replace(GPUS["h100"], memory_bytes=(have or 1 << 60) + CONTEXT_BYTES)
    sizes = {"seq_len": data.seq_len, "batch": args.per_device_train_batch_size}
    run = make_run(config, gpu=gpu, checkpointing=asked, adapters=adapters, **sizes)
    found = evaluate(run, "adamw-fp32" if wide else "adamw")
    states = sum(found.gpu_bytes[n] for n in ("parameters", "gradients", "optimizer"))
    step = found.gpu_bytes["activations"] if on_gpu else 0
    if have is not None and states + step > have:
        activations = (
            f" and {step / GiB:.1f} GiB of activations" if on_gpu else " before any activation"
        )
        raise ValueError(
            f"hfpatch: weights, gradients and optimizer states of {run.shape.parameters / 1e9:.2f}B "
            f"parameters need {states / GiB:.1f} GiB{activations}, "
            f"{'the GPU' if on_gpu else 'this machine'} has {have / GiB:.1f} GiB; see `hfpatch "
            "plan`, --placement, --engine zero3_cpu_offload, or --lora_r."
        )


def device_memory(args) -> tuple[int | None, bool]:
    """Bytes of the device that trains (None if unknown), and whether it is a GPU."""
    if args.device.type == "cuda":
        return gpu_limit(args.device), True
    return host_limit(), False
