"""What `--placement` means for a Trainer: arguments, an engine's config, or an optimizer.

planner/placements.py has the table of them all.
"""

import os
import socket
from dataclasses import replace

import torch

from hfpatch.budget.limits import environment_number, gib
from hfpatch.lab.hardware import CONTEXT_BYTES, GPUS
from hfpatch.planner.placements import PLACEMENTS, placement_of_engine
from hfpatch.planner.plan import plan
from hfpatch.trainer import configs

EIGHT_BIT = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}


def is_bf16_alone(name: str | None) -> bool:
    """Whether bf16 weights are the only copy under this placement."""
    return name in PLACEMENTS and PLACEMENTS[name].bf16


def engine_of(name: str, *, nvme_path: str | None = None) -> configs.EngineConfig | None:
    """The engine's config of a placement or of a file; None without an engine. Raises ValueError."""
    row = PLACEMENTS.get(placement_of_engine(name))
    if row is not None and not row.config:
        return None
    return configs.load(row.config if row else name, nvme_path=nvme_path)


def training_arguments(name: str, *, flags: dict | None = None) -> dict:
    """The TrainingArguments that a placement without an engine stands for.

    flags: TrainingArguments that the user set. Raises ValueError if the placement cannot honour
    one.
    """
    row = PLACEMENTS[name]
    flags = flags or {}
    for engine in ("deepspeed", "fsdp"):
        if flags.get(engine):
            raise ValueError(
                f"hfpatch: --placement {name} is for one GPU and cannot be combined with "
                f"--{engine}. Keep one."
            )
    if row.own:
        return {"optim": "adamw_torch", "bf16": not row.bf16}
    if flags.get("optim") not in (None, EIGHT_BIT["optim"]):
        raise ValueError(
            f"hfpatch: --placement {name} brings its optimizer and cannot be combined with --optim "
            f"{flags['optim']}. Leave one out."
        )
    if not row.fused:
        return dict(EIGHT_BIT)
    _refuse_what_fused_cannot(
        flags.get("max_grad_norm"), flags.get("gradient_accumulation_steps"), 1
    )
    return EIGHT_BIT | {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}


def trainer_arguments(model, args, name: str) -> dict:
    """Keyword arguments for Trainer beside args: the optimizer that steps in backward, or none.

    model: on its way to Trainer. args: made with training_arguments(name). Raises ValueError for
    trained weights that are not bfloat16 if they are the only copy.
    """
    if not is_bf16_alone(name):
        return {}
    other = [
        n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.bfloat16
    ]
    if other:
        raise ValueError(
            f"hfpatch: --placement {name} needs bfloat16 weights, and {other[0]} is "
            f"{str(model.get_parameter(other[0]).dtype).removeprefix('torch.')}. Load the model in "
            "bfloat16."
        )
    if not PLACEMENTS[name].fused:
        return {}
    _refuse_what_fused_cannot(args.max_grad_norm, args.gradient_accumulation_steps, args.world_size)
    from hfpatch.trainer.step_in_backward import AdamW8bitInBackward

    settings = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "bf16_stochastic_round": True,
    }
    return {"optimizer_cls_and_kwargs": (AdamW8bitInBackward, settings)}


def fitting(config, *, gpu_free: int, host_free: int, fused: bool = True, **run) -> str:
    """The placement for "auto": the most faithful one whose plan fits this machine.

    Args:
        config: of the model.
        gpu_free, host_free: bytes.
        fused: False if clipping or accumulation is wanted.
        run: other arguments of hfpatch.plan.

    Raises:
        ValueError: none fits; the sentence says what the best one needs.
    """
    # Only memory matters here, not the speed of this card. gpu_free has no CUDA context in it.
    gpu = replace(GPUS["h100"], memory_bytes=gpu_free + CONTEXT_BYTES)
    found = plan(config, gpu=gpu, host_ram=host_free, **run)
    if found.fits and (fused or not PLACEMENTS[found.run.placement].fused):
        return found.run.placement
    raise ValueError(
        f"hfpatch: no placement fits {gib(gpu_free)} on the GPU and {gib(found.host.usable_bytes)} "
        f"usable on the host: {found.run.placement} needs {gib(found.gpu.peak_bytes)} and "
        f"{gib(found.host.peak_bytes)}. Shorten the sequence, add GPUs or train with LoRA."
    )


def _refuse_what_fused_cannot(max_grad_norm, accumulation, world_size) -> None:
    for wrong, sentence in (
        (
            max_grad_norm,
            "never has all gradients, so no global norm, got --max_grad_norm "
            f"{max_grad_norm}. Set it to 0 or use gpu8bit.",
        ),
        (
            accumulation not in (None, 1),
            "updates in every backward, got --gradient_accumulation_steps "
            f"{accumulation}. Set it to 1 or use gpu8bit.",
        ),
        (
            world_size > 1,
            f"runs in one process, got {world_size}. Use zero3 or fsdp2 for several.",
        ),
    ):
        if wrong:
            raise ValueError(f"hfpatch: gpu8bit-fused {sentence}")


def launched_processes() -> int:
    """The processes of this launch. Without a rank a scheduler's WORLD_SIZE counts machines."""
    return environment_number("WORLD_SIZE", 1, 1) if "LOCAL_RANK" in os.environ else 1


def single_process_environment() -> None:
    """Sets what torch.distributed needs if no launcher did.

    DeepSpeed would start its group of one process by MPI.
    """
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Schedulers set some of these (WORLD_SIZE for machines); with them a process without a rank
    # would wait for others.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
