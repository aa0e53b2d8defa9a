"""Where weights, gradients and optimizer states live when one GPU trains all weights: `--placement`.

| placement     | bytes a parameter: GPU | host | weights               | moments     |
| zero3-offload | live layers only       | 18   | fp32 master, on host  | fp32        |
| gpu8bit       | 6                      | 0    | bf16, rounded at random | 8-bit blocks |
| gpu8bit-fused | 4 + one layer's gradients | 0 | as gpu8bit            | as gpu8bit  |

Stochastic rounding is what lets bf16 be the only copy of the weights: an update below half a bf16 step (2^-9 of the
weight) would always be lost by rounding to nearest, and is kept on average by rounding at random.
"""

import os
import socket
from dataclasses import dataclass

import torch

from hfpatch import configs

GiB = 1 << 30
HOST_SHARE = 0.9  # of the free host memory; the rest is for the process, the data loader and page tables
LIVE_PARAMETERS = 1_000_000_000  # what ZeRO-3 keeps gathered or buffered at most, ds_configs/zero3_cpu_offload.json


@dataclass(frozen=True)
class Placement:
    """One row: bytes a parameter on the GPU and on the host, and what it cannot do."""

    name: str
    gpu_bytes: float
    host_bytes: float
    bf16_weights: bool
    fused: bool = False


# bf16 weights 2, bf16 gradients 2, two 8-bit moments 2 and their float32 scale per 256; the host row is fp32 master,
# gradient and two moments (16) and the bf16 weights that are streamed to the GPU (2).
PLACEMENTS = {
    "zero3-offload": Placement("zero3-offload", 0.0, 18.0, bf16_weights=False),
    "gpu8bit": Placement("gpu8bit", 6 + 2 * 4 / 256, 0.0, bf16_weights=True),
    "gpu8bit-fused": Placement("gpu8bit-fused", 4 + 2 * 4 / 256, 0.0, bf16_weights=True, fused=True),
}


def get(name: str) -> Placement:
    """The row called name; ValueError for another word."""
    if name not in PLACEMENTS:
        raise ValueError(f"hfpatch: --placement: expected auto, {', '.join(PLACEMENTS)}, came {name!r}.")
    return PLACEMENTS[name]


def training_arguments(name: str, *, flags: dict | None = None) -> dict:
    """The TrainingArguments a placement stands for. Call it before they are built.

    flags: the TrainingArguments the user set by hand; ValueError where the placement cannot honour one.
    """
    placement, flags = get(name), flags or {}
    for engine in ("deepspeed", "fsdp"):
        if flags.get(engine):
            raise ValueError(f"hfpatch: --placement {name} is for one GPU, --{engine} came with it; keep one.")
    if placement.name == "zero3-offload":
        single_process_environment()
        engine = configs.training_arguments(configs.load("zero3_cpu_offload"), flags=flags)
        return {"bf16": True, **engine}
    if flags.get("optim") not in (None, "adamw_torch_8bit"):
        raise ValueError(f"hfpatch: --placement {name} brings its optimizer, --optim {flags['optim']} came; drop one.")
    found = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
    if placement.fused:
        _refuse_what_fused_cannot(flags.get("max_grad_norm"), flags.get("gradient_accumulation_steps"), 1)
        found |= {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    return found


def trainer_arguments(model, args, name: str) -> dict:
    """Keyword arguments for Trainer(...) beside args: the optimizer that steps in backward, or nothing.

    model: on its way to Trainer; its trained weights must be bfloat16 where they are the only copy (ValueError).
    args: the TrainingArguments, with training_arguments(name) in them.
    """
    placement = get(name)
    if not placement.bf16_weights:
        return {}
    other = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.bfloat16]
    if other:
        raise ValueError(
            f"hfpatch: --placement {name} expects bfloat16 weights, {other[0]} is "
            f"{str(model.get_parameter(other[0]).dtype).removeprefix('torch.')}; load the model in bfloat16."
        )
    if not placement.fused:
        return {}
    _refuse_what_fused_cannot(args.max_grad_norm, args.gradient_accumulation_steps, args.world_size)
    from hfpatch.step_in_backward import AdamW8bitInBackward

    settings = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "bf16_stochastic_round": True,
    }
    return {"optimizer_cls_and_kwargs": (AdamW8bitInBackward, settings)}


def choose(
    parameters: int, *, gpu_free: int, host_free: int, gpu_activations: int = 0, host_activations: int = 0,
    largest_gradients: int = 0, fused: bool = True,
) -> str:  # fmt: skip
    """The most faithful placement that fits: zero3-offload, then gpu8bit, then gpu8bit-fused. All sizes in bytes.

    gpu_activations, host_activations: what a step needs beyond weights, gradients and optimizer states.
    largest_gradients: gradients alive at once when the step runs in backward (the largest layer, or the head).
    fused: False where clipping or accumulation is wanted. ValueError says what each lacks when none fits.
    """
    short = []
    for placement in PLACEMENTS.values():
        if placement.fused and not fused:
            continue
        host = int(parameters * placement.host_bytes) + host_activations
        gpu = int(parameters * placement.gpu_bytes) + gpu_activations
        gpu += largest_gradients if placement.fused else 0
        if placement.host_bytes:
            gpu += 2 * min(parameters, LIVE_PARAMETERS)
        if host <= HOST_SHARE * host_free and gpu <= gpu_free:
            return placement.name
        short.append(f"{placement.name} needs {gpu / GiB:.1f} GiB on the GPU and {host / GiB:.1f} on the host")
    raise ValueError(
        f"hfpatch: no placement fits {gpu_free / GiB:.1f} GiB on the GPU and {HOST_SHARE * host_free / GiB:.1f} "
        f"usable on the host: {'; '.join(short)}; shorten the sequence, add GPUs or train with LoRA."
    )


def _refuse_what_fused_cannot(max_grad_norm, accumulation, world_size) -> None:
    if max_grad_norm:
        raise ValueError(
            f"hfpatch: gpu8bit-fused never has all gradients, so no global norm: --max_grad_norm {max_grad_norm} came; "
            "set it to 0 or use gpu8bit."
        )
    if accumulation not in (None, 1):
        raise ValueError(
            f"hfpatch: gpu8bit-fused updates in every backward, --gradient_accumulation_steps {accumulation} came; "
            "set it to 1 or use gpu8bit."
        )
    if world_size > 1:
        raise ValueError(f"hfpatch: gpu8bit-fused runs in one process, {world_size} came; use an --engine for several.")


def single_process_environment() -> None:
    """What torch.distributed asks for when no launcher set it: DeepSpeed starts a group of one otherwise by MPI."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for key, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        os.environ.setdefault(key, str(value))
