"""The plan of a run, said and held before its weights load."""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from hfpatch.budget.limits import gib
from hfpatch.lab.hardware import Gpu, gpu_named
from hfpatch.planner.machine import card, gpu_limit, host_limit
from hfpatch.planner.placements import PLACEMENTS, placement_of_engine
from hfpatch.planner.plan import Adapters, plan
from hfpatch.trainer.arguments import checkpointing_of

_OF_ONE_PROCESS = [name for name, row in PLACEMENTS.items() if not row.config]


def check(config, model, data, args, say):
    """Says in three lines what is planned, and returns the plan; None where there is none. ValueError
    for a run that does not fit.

    Nothing is said without a GPU, of Liger, nor of an engine's config that plans do not know.
    """
    gpu = this_gpu(args)
    if gpu is None:
        _expect_memory(config, model, args)
    if gpu is None or model.impl == "liger":
        return None
    placement = placement_of(config, model, args)
    if placement not in ("auto", *PLACEMENTS):
        return None
    stock = "stock-checkpointing" if args.gradient_checkpointing else "stock"
    try:
        found = plan(
            config, seq_len=data.seq_len, batch=args.per_device_train_batch_size, gpu=gpu,
            gpus=args.world_size, host_ram=host_limit(), placement=placement, sp_size=model.sp_size,
            checkpointing=checkpointing_of(model) if model.impl == "hfpatch" else stock,
            adapters=adapters_of(model),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
        )  # fmt: skip
    except Exception as error:  # a plan runs the family's own code, which may raise anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        say(f"hfpatch: not planned: {reason.removeprefix('hfpatch: ')}")
        return None
    memory = (
        f"{gib(found.gpu.peak_bytes)} of {gib(found.gpu.usable_bytes)} on the GPU, "
        f"{gib(found.host.peak_bytes)} of {gib(found.host.usable_bytes)} of host memory"
    )
    if not found.fits:
        raise ValueError(
            f"hfpatch: the planned step must fit, got {memory}. Change the run or the "
            f"machine{_ways(found)}."
        )
    say(f"hfpatch: planned: {str(found).splitlines()[0]}")
    say(f"hfpatch: planned: {memory}")
    say(f"hfpatch: planned: {found.time.step_seconds:.1f} s a step of one batch a GPU")
    return found


def _ways(found) -> str:
    """Three of the plan's suggestions for this machine, in the flags of `hfpatch train`."""
    changes = (s["change"] for s in found.advice.suggestions)
    mine = [way for way in changes if not way.startswith(("--gpu", "--host-ram"))]
    said = "; ".join(mine[:3]).replace("--base 4bit", "--load_in_4bit")
    said = said.replace("--batch ", "--per_device_train_batch_size ")
    return f", for example by {said}" if said else ""


def _expect_memory(config, model, args) -> None:
    """ValueError for a CPU that cannot hold what stays between steps: the machine would stop the
    run without a word while its weights load."""
    engine = placement_of_engine(model.placement or "gpu8bit") not in _OF_ONE_PROCESS
    if engine or args.has_engine or model.load_in_4bit or model.load_in_8bit:
        return
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=model.trust_remote_code
        )
    count = made.num_parameters()
    # Weights; where they train, gradients (of 8-bit AdamW: or its states), and AdamW's two states.
    states = 2 if "adamw" in args.optim and "8bit" not in args.optim else 0
    tensors = 1 if model.lora_r else 2 + states
    nbytes = tensors * dtype_of(config, model).itemsize * count
    memory = host_limit()
    if memory is not None and nbytes > memory:
        raise ValueError(
            f"hfpatch: {count:,} parameters and what trains them must fit this machine's "
            f"{gib(memory)}, got {gib(nbytes)}. Take a smaller model, --lora_r 16, or a GPU."
        )


def against(found, peak: float | None, seconds: float) -> str:
    """The line that compares a plan with what a step took. peak: GiB on the GPU, if there is one."""
    memory = f"{gib(found.gpu.peak_bytes)}, peak {peak:.1f}; planned " if peak else ""
    return (
        f"planned {memory}{found.time.step_seconds:.1f} s, took {seconds:.1f} (a batch of step 2)."
    )


def this_gpu(args) -> Gpu | None:
    """The row of the device that trains, with the memory that this process may use."""
    if args.device.type != "cuda":
        return None
    memory = gpu_limit(args.device)
    gpu = gpu_named(torch.cuda.get_device_name(args.device)) or card(gib(memory))
    return replace(gpu, memory_bytes=memory)


def placement_of(config, model, args) -> str:
    """The planner's name for where this run's weights and optimizer states are."""
    named = placement_of_engine(model.placement or "auto")
    if args.has_engine and named in ("auto", *_OF_ONE_PROCESS):
        return "unknown"
    if model.placement or model.lora_r:
        return named
    if "8bit" in args.optim:
        return "gpu8bit"
    return "adamw-fp32" if dtype_of(config, model) == torch.float32 else "adamw"


def dtype_of(config, model) -> torch.dtype:
    loaded = torch.float32 if model.preset else getattr(config, "dtype", None) or torch.float32
    return getattr(torch, model.dtype, loaded)


def adapters_of(model) -> Adapters | None:
    base = next((b for b in ("4bit", "8bit") if getattr(model, f"load_in_{b}")), "bf16")
    return Adapters.of(model.lora_r, base, model.lora_target_modules) if model.lora_r else None
