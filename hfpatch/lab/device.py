"""Helpers of measurements: wait for the device, free memory, tell what ran out."""

import gc
import math
from contextlib import contextmanager

import torch

from hfpatch.lab.compat import for_now


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean() -> None:
    """Returns memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a CPU too, whose allocator raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in ("out of memory", "can't allocate memory"))


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


@contextmanager
def nan_in_new_memory():
    """Within, torch.empty and its relatives return NaN."""

    def filled(make):
        def wrapper(*args, **kwargs):
            made = make(*args, **kwargs)
            if type(made) is torch.Tensor and made.is_floating_point():
                with torch.no_grad():
                    made.fill_(math.nan)
            return made

        return wrapper

    with torch.device("cpu"):  # torch notes once which functions `with torch.device` is for
        torch.empty(0)
    functions = for_now(torch, empty=filled(torch.empty), empty_like=filled(torch.empty_like))
    with functions, for_now(torch.Tensor, new_empty=filled(torch.Tensor.new_empty)):
        yield
