"""Registers the ops of `hfpatch::`: schema, implementation, fake and autograd.

Uses plain `torch.library.Library` calls, because the `custom_op` wrapper costs more per call. One
implementation serves all devices. It runs the Triton kernel for CUDA tensors (and under
TRITON_INTERPRET=1 for CPU tensors), else plain torch.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

LIBRARY = torch.library.Library("hfpatch", "FRAGMENT")
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# overload -> the op in plain torch: for the simulator, which follows allocations inside an op.
IMPLEMENTATIONS: dict = {}


def use_kernel(*tensors: Tensor) -> bool:
    """Whether the Triton kernel serves these tensors.

    Plain torch serves float64, CPUs and missing triton.
    """
    if not HAS_TRITON:
        return False
    for x in tensors:
        if not (x.is_cuda or INTERPRET and x.is_cpu) or x.dtype not in KERNEL_DTYPES:
            return False
    return True


def refuse(op: str, *rules: tuple) -> None:
    """Raises ValueError for the first broken rule (broken, message, the values of its {})."""
    for broken, message, *values in rules:
        if broken:
            raise ValueError(f"hfpatch: {op}: {message.format(*values)}.")


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that the plain versions compute in: float32, or float64 if an input is float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def define(
    schema: str,
    reference: Callable,
    kernel: str,
    fake: Callable | None = None,
    *,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
):
    """Registers `hfpatch::<schema>` and returns the overload to call.

    Args:
        schema: without namespace and default values. The dispatcher strips defaults from calls, and
            restoring them costs time.
        reference: the op in plain torch.
        kernel: "file.launcher" in hfpatch/kernels, which runs where a kernel serves the op's
            floating-point tensors. The launcher takes the results to fill before the op's
            arguments.
        fake: returns empty results with the right shapes, dtypes and strides. None for an op that
            writes to its arguments.
        backward: backward(ctx, *grads) -> a gradient per argument, as
            torch.library.register_autograd takes it.
        setup_context: setup_context(ctx, inputs, output), as for register_autograd.

    Returns:
        torch.ops.hfpatch.<name>.default.
    """
    name = schema.split("(")[0]
    file, launcher = kernel.split(".")

    def run(*args):
        tensors = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        if not tensors[0].numel() or not use_kernel(*tensors):
            return reference(*args)
        launch = getattr(importlib.import_module(f"hfpatch.kernels.{file}"), launcher)
        if fake is None:
            return launch(*args)
        outs = fake(*args)
        launch(outs, *args)
        return outs

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    full_name = f"hfpatch::{name}"
    torch.library.register_fake(full_name, fake or (lambda *args: None), lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            full_name, backward, setup_context=setup_context, lib=LIBRARY
        )
    op = getattr(torch.ops.hfpatch, name).default
    IMPLEMENTATIONS[op] = reference
    return op


def no_second_derivative(name: str, file: str = "") -> Callable:
    """The backward of a backward op: it raises, because the second derivative would be silently
    wrong."""

    def backward(ctx, *grads):
        raise RuntimeError(
            f"hfpatch: {name} has no second derivative, got create_graph=True. Use `from "
            f"hfpatch.ops.{file or name} import {name}_ref`, which autograd can differentiate again, "
            "or, in a patched model, hfpatch.undo(model) and "
            "model.set_attn_implementation('eager')."
        )

    return backward
