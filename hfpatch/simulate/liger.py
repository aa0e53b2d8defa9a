"""Liger Kernel as a comparison that needs no GPU: its own Python, its Triton kernels replaced by nothing.

A Triton kernel writes into what torch allocated and allocates nothing itself, so on fake tensors leaving the launch
out changes no figure. Liger rebinds names in transformers' modules: use a process for this and nothing else.
"""

import sys

import torch
from torch import nn


class _NoKernel:
    """Stands for a Triton kernel: kernel[grid](...) does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def _drop_kernels() -> int:
    import triton

    dropped = 0
    kernel_types = (triton.runtime.jit.KernelInterface,)
    for name, module in list(sys.modules.items()):
        if not name.startswith("liger_kernel"):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, kernel_types):
                setattr(module, attribute, _NoKernel())
                dropped += 1
    return dropped


def apply(model: nn.Module, *, tiled: bool = False, loss_only: bool = False) -> nn.Module:
    """Liger's kernels on a Llama model. tiled: its TiledMLP too, with layer inputs checkpointed into host memory.

    Raises ImportError where liger-kernel is not installed.
    """
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        raise ImportError(
            "hfpatch: the comparison needs liger-kernel, which is absent; pip install liger-kernel."
        ) from error
    rest = not loss_only
    apply_liger_kernel_to_llama(rope=rest, rms_norm=rest, swiglu=rest, fused_linear_cross_entropy=True, model=model)
    if tiled:
        from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

        for layer in model.model.layers:
            layer.mlp.__class__ = LigerTiledSwiGLUMLP
            layer.mlp.num_shards = None
            layer.mlp.__dict__.pop("forward", None)  # Liger bound its untiled forward on the instance
        _offload_inputs(model)
    _drop_kernels()
    return model


def _offload_inputs(model: nn.Module) -> None:
    """Non-reentrant checkpointing under saved-tensor hooks that copy layer inputs to host memory: the ALST recipe."""
    checkpointing = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    checkpointing({"use_reentrant": False})
    body = model.model
    forward = body.forward

    def offloaded(*args, **kwargs):
        with offloading():
            return forward(*args, **kwargs)

    body.forward = offloaded


def offloading():
    """A context in which what autograd saves is copied to host memory and back."""
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor):
    from hfpatch.simulate.follow import current

    follower = current()
    if follower is None or isinstance(tensor, nn.Parameter):
        return tensor
    with follower.host():
        return tensor.detach().clone()


def _to_device(tensor):
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone()
