"""Where `--placement` keeps weights, gradients and optimizer states of full training on one GPU.

| placement     | bytes a parameter: GPU | host | weights               | moments     |
| zero3-offload | live layers only       | 18   | fp32 master, on host  | fp32        |
| gpu8bit       | 6                      | 0    | bf16, rounded at random | 8-bit blocks |
| gpu8bit-fused | 4 + one layer's gradients | 0 | as gpu8bit            | as gpu8bit  |

Stochastic rounding lets bf16 be the only copy of the weights: rounding to nearest always loses an
update below half a bf16 step (2^-9 of the weight), rounding at random keeps it on average.
"""

import os
import socket
from dataclasses import dataclass, replace

import torch

from hfpatch.budget.policy import refuse_unknown
from hfpatch.lab.hardware import GiB
from hfpatch.trainer import configs


@dataclass(frozen=True)
class Placement:
    """One row of the table above; planner/placements.py counts the bytes.

    bf16_weights: bf16 weights are the only copy. fused: the optimizer steps inside backward.
    """

    bf16_weights: bool
    fused: bool = False


PLACEMENTS = {
    "zero3-offload": Placement(bf16_weights=False),
    "gpu8bit": Placement(bf16_weights=True),
    "gpu8bit-fused": Placement(bf16_weights=True, fused=True),
}


def get(name: str) -> Placement:
    """The placement of that name. Raises ValueError for another word."""
    refuse_unknown([name], ("auto", *PLACEMENTS), "--placement")
    return PLACEMENTS[name]


def training_arguments(name: str, *, flags: dict | None = None) -> dict:
    """The TrainingArguments that a placement stands for, to be called before they are built.

    flags: TrainingArguments that the user set. Raises ValueError if the placement cannot honour
    one.
    """
    placement, flags = get(name), flags or {}
    for engine in ("deepspeed", "fsdp"):
        if flags.get(engine):
            raise ValueError(
                f"hfpatch: --placement {name} is for one GPU and cannot be combined with "
                f"--{engine}. Keep one."
            )
    if name == "zero3-offload":
        single_process_environment()
        engine = configs.training_arguments(configs.load("zero3_cpu_offload"), flags=flags)
        return {"bf16": True, **engine}
    if flags.get("optim") not in (None, "adamw_torch_8bit"):
        raise ValueError(
            f"hfpatch: --placement {name} brings its optimizer and cannot be combined with --optim "
            f"{flags['optim']}. Leave one out."
        )
    found = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
    if placement.fused:
        _refuse_what_fused_cannot(
            flags.get("max_grad_norm"), flags.get("gradient_accumulation_steps"), 1
        )
        found |= {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    return found


def trainer_arguments(model, args, name: str) -> dict:
    """Keyword arguments for Trainer beside args: the optimizer that steps in backward, or none.

    model: on its way to Trainer. args: made with training_arguments(name). Raises ValueError for
    trained weights that are not bfloat16 if they are the only copy.
    """
    placement = get(name)
    if not placement.bf16_weights:
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
    if not placement.fused:
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


def fitting(
    config, *, seq_len: int, batch: int, gpu_free: int, host_free: int, fused: bool = True,
    fp8: str | None = None,
) -> str:  # fmt: skip
    """The placement for "auto": the first of PLACEMENTS, the most faithful first, whose plan fits.

    Args:
        config: of the model.
        seq_len, batch: tokens a row and rows a step on the GPU.
        gpu_free, host_free: bytes.
        fused: False if clipping or accumulation is wanted.
        fp8: of --fp8, which takes no engine.

    Raises:
        ValueError: none fits; the sentence says what each needs.
    """
    from hfpatch.lab.hardware import CONTEXT_BYTES, GPUS
    from hfpatch.planner.answer import make_run
    from hfpatch.planner.evaluate import GLANCE, evaluate, placements
    from hfpatch.planner.placements import FLOAT8_RECIPES

    # Only memory matters here, not the speed of the GPU in this row. gpu_free has no CUDA context
    # in it, so that is added.
    here = {"name": "this GPU", "memory_bytes": gpu_free + CONTEXT_BYTES}
    gpu = replace(GPUS["h100"], **here, float8=FLOAT8_RECIPES.get(fp8, 1.0))
    run = make_run(config, seq_len=seq_len, batch=batch, gpu=gpu, host_ram=host_free)
    short = []
    for name in placements(run, "auto"):
        if PLACEMENTS[name].fused and not fused:
            continue
        found = evaluate(run, name, GLANCE)
        if found.fits:
            return name
        on_gpu, on_host = found.gpu_peak_bytes / GiB, found.host_peak_bytes / GiB
        short.append(f"{name} needs {on_gpu:.1f} GiB on the GPU and {on_host:.1f} on the host")
    raise ValueError(
        f"hfpatch: no placement fits {gpu_free / GiB:.1f} GiB on the GPU and "
        f"{found.host_usable_bytes / GiB:.1f} usable on the host: {'; '.join(short)}. Shorten the "
        "sequence, add GPUs or train with LoRA."
    )


def _refuse_what_fused_cannot(max_grad_norm, accumulation, world_size) -> None:
    if max_grad_norm:
        raise ValueError(
            "hfpatch: gpu8bit-fused never has all gradients, so no global norm, got "
            f"--max_grad_norm {max_grad_norm}. Set it to 0 or use gpu8bit."
        )
    if accumulation not in (None, 1):
        raise ValueError(
            "hfpatch: gpu8bit-fused updates in every backward, got --gradient_accumulation_steps "
            f"{accumulation}. Set it to 1 or use gpu8bit."
        )
    if world_size > 1:
        raise ValueError(
            f"hfpatch: gpu8bit-fused runs in one process, got {world_size}. Use an --engine for "
            "several."
        )


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
    alone = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in alone.items()})
