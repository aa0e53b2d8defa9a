"""The element-wise ops of hfpatch.lab, and Liger's form of each."""

from collections.abc import Callable

import common  # noqa: F401  (its root, where hfpatch is not installed)
import torch

from hfpatch.lab.elementwise import (  # noqa: F401
    EPS,
    LLAMA_8B,
    OPS,
    TINY,
    Error,
    Op,
    Widths,
    errors,
)


def liger_forms(device: torch.device) -> dict[str, Callable]:
    """Liger's form of each op, by name; empty where it is absent or has no device to run on."""
    if device.type != "cuda":
        return {}
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return {}
    forms = {
        "rms_norm": lambda x, w: (liger.liger_rms_norm(x, w, EPS),),
        "add_rms_norm": lambda x, r, w: tuple(liger.liger_fused_add_rms_norm(x, r, w, EPS)),
        "rope": lambda q, k, cos, sin: tuple(liger.liger_rope(q, k, cos, sin)),
        "swiglu": lambda g, u: (liger.liger_swiglu(g, u),),
    }
    return forms
