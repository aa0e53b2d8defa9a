"""Messages on an optimizer before its first step."""

import os
import sys
from functools import cache

import torch

from hfpatch.trainer.compat import is_sharded_by_zero3

# Options of optimizers that keep small updates of 16-bit weights: torchao, bitsandbytes' kin,
# optimi, torchdistX.
_KEEPS = ("bf16_stochastic_round", "stochastic_rounding", "kahan_sum", "use_kahan_summation")


def rounded_to_nearest(optimizer) -> str:
    """A warning if the optimizer rounds small updates of 16-bit weights away, else "".

    Rounding to nearest loses each update below half a step of bf16 (1/512 to 1/256 of the weight).
    Under an engine the optimizer's groups hold fp32 copies, which lose none.
    """
    asked = getattr(optimizer, "defaults", {})
    if any(getattr(optimizer, k, asked.get(k)) for k in _KEEPS):
        return ""
    trained = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    half = [
        p
        for p in trained
        if p.dtype in (torch.bfloat16, torch.float16) and not is_sharded_by_zero3(p)
    ]
    if not half:
        return ""
    return (
        f"hfpatch: {len(half)} of {len(trained)} trained tensors are "
        f"{str(half[0].dtype).removeprefix('torch.')} alone, and {type(optimizer).__name__} loses "
        'updates below about 1/512 of a weight. Pass optim="adamw_torch_8bit", '
        'optim_args="bf16_stochastic_round=True" to TrainingArguments (pip install torchao), or '
        "load the model in float32 and pass bf16=True."
    )


@cache
def say_compiling(optimizer: str) -> None:
    """One line on stderr before torchao's optimizer compiles, once a process."""
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR, if you set it")
    print(
        f"hfpatch: torchao compiles its {optimizer} in the first step: up to five minutes on a "
        f"slow host, seconds the next time (kept in {place}).",
        file=sys.stderr,
    )
